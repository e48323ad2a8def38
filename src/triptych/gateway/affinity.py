"""Which encoder gets an item: the same one each time, for that one may still have its rows; unless it is too busy.

Rendezvous hashing: every pair of item and encoder has a score, and the encoder with the best one is preferred. When one
goes, only its own items move; when it is back, they return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from triptych.core.media import DataUri, RawBytes, Url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triptych.core.media import MediaItem

MAX_AHEAD = 8
"""Items by which the preferred encoder may be busier than the least busy one."""


def source_bytes(item: MediaItem) -> int:
    """About how much there is to hash."""
    match item.source:
        case Url(text) | DataUri(text):
            return len(text)
        case RawBytes(data):
            return len(data)


def digest(item: MediaItem) -> bytes:
    """What tells one item from another, by what the client sent; nothing is opened."""
    match item.source:
        case Url(text) | DataUri(text):
            return blake3(text.encode("utf-8", "surrogatepass")).digest()
        case RawBytes(data):
            return blake3(data).digest()


def choose(item: bytes, loads: Mapping[str, int]) -> str:
    """The encoder for an item.

    Args:
        item: its digest.
        loads: items that are at each encoder, by address; not empty.
    """
    preferred = max(loads, key=lambda address: blake3(item + address.encode()).digest())
    least = min(loads, key=lambda address: (loads[address], address))
    return least if loads[preferred] - loads[least] > MAX_AHEAD else preferred
