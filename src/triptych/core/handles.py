"""Names of memory in another process: what must agree before bytes may move, and where they are."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from triptych.core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_HANDLE_STATE = 64 * 1024
"""Bytes of a transport's own part of a handle, before it is known whose it is."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of one KV block. Two engines move blocks only when all of it is equal.

    A block is contiguous: [layers, 2 (keys, values), kv_heads, block_size, head_size] of ``dtype``.
    """

    layers: int
    kv_heads: int
    head_size: int
    block_size: int
    """Tokens."""
    dtype: str
    """As torch spells it, without its prefix: ``float32``."""
    itemsize: int
    """Bytes of one number."""

    def __post_init__(self) -> None:
        """Refuse sizes that no pool has.

        Raises:
            InvalidRequest: naming the field.
        """
        for name in ("layers", "kv_heads", "head_size", "block_size", "itemsize"):
            if not 1 <= getattr(self, name) <= 2**20:
                raise InvalidRequest(f"a KV layout's {name} must be in [1, 2^20], not {getattr(self, name)}")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.layers * 2 * self.kv_heads * self.block_size * self.head_size * self.itemsize

    def differences(self, other: KvLayout) -> Iterator[str]:
        """What differs, each as ``name: ours against theirs``."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                yield f"{field.name}: {ours} against {theirs}"


@dataclass(frozen=True, slots=True)
class KvHandle:
    """Where the KV of one prompt lies. Opaque to everyone but the transport that made it."""

    session_id: str
    """Unique over all starts of all engines."""
    backend: str
    instance_id: str
    """The producer's incarnation."""
    layout: KvLayout
    blocks: int
    """How many, in prompt order; the last one may be partly filled."""
    state: bytes
    """The transport's own; at most ``MAX_HANDLE_STATE`` bytes."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            InvalidRequest: naming the bound.
        """
        if len(self.state) > MAX_HANDLE_STATE:
            raise InvalidRequest(f"a KV handle's state has {len(self.state)} bytes; at most {MAX_HANDLE_STATE}")
        if self.blocks < 1:
            raise InvalidRequest(f"a KV handle has {self.blocks} blocks")
