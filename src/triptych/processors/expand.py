"""Token-level expansion: one marker in, one item's rows and what is written around them out; other ids stay."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from triptych.core.errors import InvalidRequest, PlaceholderMismatch, UnsupportedFeature
from triptych.core.layout import ItemLayout, Run
from triptych.core.media import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from triptych.core.media import Modality


class ItemText(NamedTuple):
    """What replaces one marker."""

    token_ids: npt.NDArray[np.int32]
    """Read-only."""
    runs: tuple[Run, ...]
    """Where the item is; positions count from the first of these tokens."""


class Expansion(NamedTuple):
    """The expanded prompt and where its items came to lie."""

    token_ids: npt.NDArray[np.int32]
    """Read-only."""
    layouts: tuple[ItemLayout, ...]


def check_counts(
    token_ids: npt.NDArray[np.int32], modalities: Sequence[Modality], placeholders: Mapping[Modality, int]
) -> None:
    """Match items with un-expanded markers: as many of each kind, in the same order.

    Raises:
        UnsupportedFeature: a modality without a marker here.
        PlaceholderMismatch: naming both counts.
        InvalidRequest: the counts agree but not the order of kinds.
    """
    for index, modality in enumerate(modalities):
        if modality not in placeholders:
            accepted = ", ".join(kind.value for kind in placeholders) or "text only"
            raise UnsupportedFeature(
                f"media item {index}: {Stage.PREPROCESS.value}: {modality.value} is not accepted here; "
                f"accepted: {accepted}"
            )
    for modality, marker in placeholders.items():
        items, markers = modalities.count(modality), int(np.count_nonzero(token_ids == marker))
        if items != markers:
            raise PlaceholderMismatch(modality.value, items, markers)
    if len(placeholders) > 1:
        wanted = [placeholders[modality] for modality in modalities]
        found = token_ids[np.isin(token_ids, list(placeholders.values()))].tolist()
        if wanted != found:
            raise InvalidRequest("the order of the media items is not the order of their placeholders in the prompt")


def expand(
    token_ids: npt.NDArray[np.int32], markers: Sequence[int], layouts: Sequence[ItemLayout], texts: Sequence[ItemText]
) -> Expansion:
    """Write the i-th text where the i-th marker is, and place the i-th layout there.

    Args:
        token_ids: Shape [un-expanded prompt].
        markers: Ids that stand for items; call :func:`check_counts` first.
        layouts: One per marker in the prompt, in order, each one unbroken stretch that begins at position 0.
        texts: What replaces the markers.
    """
    at = np.flatnonzero(np.isin(token_ids, list(markers))).tolist()
    pieces: list[npt.NDArray[np.int32]] = []
    placed: list[ItemLayout] = []
    read, length = 0, 0
    for marker, layout, text in zip(at, layouts, texts, strict=True):
        start = length + marker - read
        pieces += [token_ids[read:marker], text.token_ids]
        placed.append(_place(layout, text, start))
        read, length = marker + 1, start + len(text.token_ids)
    expanded = np.concatenate([*pieces, token_ids[read:]]).astype(np.int32, copy=False)
    expanded.setflags(write=False)
    return Expansion(expanded, tuple(placed))


def _place(layout: ItemLayout, text: ItemText, start: int) -> ItemLayout:
    """The layout in the prompt, where its times are written."""
    return replace(
        layout,
        runs=tuple(Run(run.start + start, run.length) for run in text.runs),
        framing=tuple(position + start for position in layout.framing),
        times=(),
    )
