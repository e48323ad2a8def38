"""What an encoder engine hands to the engine that computes the prompt.

EncodedItem        on both engines      one item: where its rows lie, and all that its place in a prompt follows from
EncoderReference   on both engines      everything, read and checked
SealedReference    between them         opaque: whoever carries it has no use for what is inside
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.core.handles import RowHandle
    from triptych.core.layout import ItemLayout


@dataclass(frozen=True, slots=True, eq=False)
class EncodedItem:
    """One item that was encoded."""

    layout: ItemLayout
    """Its runs begin at position 0 until it is placed in a prompt."""
    handle: RowHandle
    """Where the rows are: ``layout.rows`` times ``row_bytes`` bytes, one row after the other."""
    row_bytes: int
    """Of one row, all deepstack levels included."""
    dtype: str
    """Of the numbers in a row, as torch spells it, without its prefix."""


@dataclass(frozen=True, slots=True, eq=False)
class EncoderReference:
    """The single-use name of one item's rows."""

    item: EncodedItem
    fingerprint: bytes
    """32 bytes: model revision and processor settings. Both engines must have the same."""
    expires_unix_nanos: int


@dataclass(frozen=True, slots=True)
class SealedReference:
    """A reference on its way, as bytes that are handed on unread and unchanged."""

    cache_id: str
    data: bytes
    """An ``EncoderCacheRef`` as a message."""


Reference = EncoderReference | SealedReference
