"""Names of memory in another process: what must agree before bytes may move, and where they are.

Bytes move in blocks of one size, whatever they are: a layout says what a block is, and two engines move blocks only
when their layouts are the same.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from triptych.core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_HANDLE_STATE = 64 * 1024
"""Bytes of a transport's own part of a handle, before it is known whose it is."""
MAX_ROW_BLOCK = 2**30
"""Bytes."""
MAX_DTYPE = 32
"""Characters of a dtype's name."""
MAX_LABEL = 128
"""Characters of a layout's label."""


class Layout(Protocol):
    """What a block is."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        ...

    @property
    def label(self) -> str:
        """ASCII, at most ``MAX_LABEL`` characters; two layouts are the same when their labels are."""
        ...


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of one KV block.

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
        if not (self.dtype.isascii() and 1 <= len(self.dtype) <= MAX_DTYPE):
            raise InvalidRequest(f"a KV layout's dtype must be 1 to {MAX_DTYPE} ASCII characters")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.layers * 2 * self.kv_heads * self.block_size * self.head_size * self.itemsize

    @property
    def label(self) -> str:
        """All of its numbers."""
        return " ".join(map(str, ("kv", *astuple(self))))

    def differences(self, other: KvLayout) -> Iterator[str]:
        """What differs, each as ``name: ours against theirs``."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                yield f"{field.name}: {ours} against {theirs}"


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A piece of memory for encoder rows. An item's rows lie one after the other over as many blocks as they need."""

    block_bytes: int

    def __post_init__(self) -> None:
        """Refuse sizes that no engine has.

        Raises:
            InvalidRequest: naming the bound.
        """
        if not 1 <= self.block_bytes <= MAX_ROW_BLOCK:
            raise InvalidRequest(f"a block of encoder rows has {self.block_bytes} bytes; 1 to {MAX_ROW_BLOCK}")

    @property
    def label(self) -> str:
        """Its size."""
        return f"rows {self.block_bytes}"

    def blocks(self, size: int) -> int:
        """How many blocks hold ``size`` bytes."""
        return -(-size // self.block_bytes)


L = TypeVar("L", bound=Layout, covariant=True)


@dataclass(frozen=True)
class Handle(Generic[L]):
    """Where blocks of one session lie. Opaque to everyone but the transport that made it."""

    session_id: str
    """Unique over all starts of all engines."""
    backend: str
    instance_id: str
    """The producer's incarnation."""
    layout: L
    blocks: int
    """How many, in order; the last one may be partly filled."""
    state: bytes
    """The transport's own; at most ``MAX_HANDLE_STATE`` bytes."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            InvalidRequest: naming the bound.
        """
        if len(self.state) > MAX_HANDLE_STATE:
            raise InvalidRequest(f"a handle's state has {len(self.state)} bytes; at most {MAX_HANDLE_STATE}")
        if self.blocks < 1:
            raise InvalidRequest(f"a handle has {self.blocks} blocks")


KvHandle = Handle[KvLayout]
"""One prompt's KV. A name for types: handles are made as ``Handle(...)``."""
RowHandle = Handle[RowLayout]
"""One media item's encoder rows."""
