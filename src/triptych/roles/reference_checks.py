"""Whether encoder outputs can be used here: said before anything is held, naming the media item and what is wrong.

Nothing of what is checked costs more than it says: no rows are fetched, and nothing is allocated for a number that
another engine wrote. What the rows themselves hold is believed, as far as whoever signs with the hand-off secret is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.core.encoded import EncoderReference
from triptych.core.errors import InvalidRequest, ReferenceMismatch, ReferenceNotFound, UnsupportedFeature
from triptych.core.layout import Run
from triptych.core.media import Modality
from triptych.engine.limits import check_rows
from triptych.roles.session_checks import any_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.encoded import EncodedItem, Reference
    from triptych.core.handles import RowLayout
    from triptych.core.layout import ItemLayout
    from triptych.processors.contract import Processor


@dataclass(frozen=True, slots=True)
class RowTerms:
    """What encoder rows must be like to be of use to an engine."""

    fingerprint: bytes
    """Of its model revision and processor settings."""
    dtype: str
    """Of its decoder, as torch spells it, without its prefix."""
    row_bytes: int
    """Of one row, all deepstack levels included."""
    backend: str
    """The transport that it takes rows by."""
    layout: RowLayout
    """Of its arena."""
    arena_blocks: int
    """All that one request can have at once."""
    cache_bytes: int
    """Of the encoder cache: no item can have more."""


def check_references(
    references: Sequence[Reference], terms: RowTerms, processor: Processor, unix_nanos: int
) -> tuple[EncodedItem, ...]:
    """Refuse references whose rows could not be used here, each by itself and all together.

    Args:
        references: one for each media item, in order.
        terms: this engine's.
        processor: likewise.
        unix_nanos: now.

    Returns:
        The items. Two of them may be the same picture, encoded twice: both are then taken.

    Raises:
        UnsupportedFeature: nobody here can read one.
        ReferenceMismatch: another model, other processor settings, or another number format or width.
        ReferenceNotFound: its time is over.
        InvalidRequest: it contradicts itself or another one, or is more than this engine ever holds.
    """
    read = tuple(_read(index, reference) for index, reference in enumerate(references))
    merge = any_plan(processor).spatial_merge
    for index, reference in enumerate(read):
        _check_origin(index, reference, terms)
        _check_time(index, reference, unix_nanos)
        _check_layout(index, reference.item.layout, processor, merge)
        _check_size(index, reference.item, terms)
    items = tuple(reference.item for reference in read)
    _check_apart(items)
    check_rows([item.layout for item in items], terms.row_bytes, terms.cache_bytes)
    _check_quota(items, terms)
    return items


def _read(index: int, reference: Reference) -> EncoderReference:
    if not isinstance(reference, EncoderReference):
        raise UnsupportedFeature(f"media item {index}: encoder_cache is not supported by this engine")
    return reference


def _check_origin(index: int, reference: EncoderReference, terms: RowTerms) -> None:
    """Refuse what an engine of another kind made."""
    item = reference.item
    if reference.fingerprint != terms.fingerprint:
        raise ReferenceMismatch(
            f"media item {index}: it was encoded with another model revision or other processor settings "
            f"(fingerprint {terms.fingerprint.hex()[:16]} here, {reference.fingerprint.hex()[:16]} there)"
        )
    ours = (terms.dtype, terms.row_bytes, terms.layout.block_bytes)
    theirs = (item.dtype, item.row_bytes, item.handle.layout.block_bytes)
    differences = [
        f"{name}: {here} against {there}"
        for name, here, there in zip(("dtype", "row_bytes", "block_bytes"), ours, theirs, strict=True)
        if here != there
    ]
    if differences:
        raise ReferenceMismatch(
            f"media item {index}: its rows are not like those of this engine; here against there: "
            + ", ".join(differences)
        )
    if item.handle.backend != terms.backend:
        raise InvalidRequest(
            f"media item {index}: its rows move by {item.handle.backend!r}; this engine takes them by "
            f"{terms.backend!r} (--encoder-transport)"
        )


def _check_time(index: int, reference: EncoderReference, unix_nanos: int) -> None:
    late = unix_nanos - reference.expires_unix_nanos
    if late >= 0:
        raise ReferenceNotFound(
            f"media item {index}: its reference expired {late / 1e9:.1f} s ago by the clock of this machine; encode "
            "it again"
        )


def _check_layout(index: int, layout: ItemLayout, processor: Processor, merge: int) -> None:
    """Refuse a layout that no encoder of this model makes.

    Raises:
        InvalidRequest: naming the numbers that do not fit.
    """
    if layout.modality not in processor.placeholders:
        raise InvalidRequest(f"media item {index}: it is {layout.modality.value}, which this model does not read")
    if layout.runs != (Run(0, layout.span),):
        raise InvalidRequest(
            f"media item {index}: its positions are {len(layout.runs)} run(s) from {layout.start} to {layout.end}; "
            "they must be one stretch from 0"
        )
    grid, tokens = tuple(layout.grid), math.prod(layout.grid)
    if layout.modality is Modality.IMAGE and layout.grid.t != 1:
        raise InvalidRequest(f"media item {index}: a picture's grid has one time step, not that of {grid}")
    if layout.encoder_tokens != tokens:
        raise InvalidRequest(
            f"media item {index}: its grid {grid} has {tokens} patches, and its encoder tokens are "
            f"{layout.encoder_tokens}"
        )
    if layout.cells(merge) is None or layout.rows != layout.span:
        raise InvalidRequest(
            f"media item {index}: {layout.rows} rows in {layout.span} positions are not its grid {grid} merged "
            f"{merge} x {merge}"
        )


def _check_size(index: int, item: EncodedItem, terms: RowTerms) -> None:
    blocks = terms.layout.blocks(item.layout.rows * terms.row_bytes)
    if item.handle.blocks != blocks:
        raise InvalidRequest(
            f"media item {index}: its rows are said to lie in {item.handle.blocks} blocks of "
            f"{terms.layout.block_bytes} bytes; {item.layout.rows} rows of {terms.row_bytes} bytes fill {blocks}"
        )


def _check_apart(items: Sequence[EncodedItem]) -> None:
    """Refuse one output for two items, and two shapes under one identity.

    Raises:
        InvalidRequest: naming both items.
    """
    by_id: dict[str, int] = {}
    by_key: dict[bytes, int] = {}
    for index, item in enumerate(items):
        other = by_id.setdefault(item.handle.session_id, index)
        if other != index:
            raise InvalidRequest(
                f"media item {index}: its reference {item.handle.session_id[:80]!r} is that of media item {other} "
                "too; an encoder output can be used once"
            )
        other = by_key.setdefault(item.layout.content_key, index)
        if items[other].layout.grid != item.layout.grid:
            raise InvalidRequest(
                f"media item {index}: its content key is that of media item {other}, but its grid is "
                f"{tuple(item.layout.grid)} and not {tuple(items[other].layout.grid)}"
            )


def _check_quota(items: Sequence[EncodedItem], terms: RowTerms) -> None:
    """Refuse more rows than the arena has room for: waiting would not help.

    Raises:
        InvalidRequest: naming the item that is too much.
    """
    blocks, size = 0, terms.layout.block_bytes
    for index, item in enumerate(items):
        blocks += item.handle.blocks
        if blocks > terms.arena_blocks:
            raise InvalidRequest(
                f"media item {index}: the request's encoder rows take {blocks * size} bytes up to here, and this "
                f"engine takes in at most {terms.arena_blocks * size} at once (--encoder-quota)"
            )
