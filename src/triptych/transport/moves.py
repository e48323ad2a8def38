"""A fetch's moves: checked, and joined so that few copies do them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from triptych.core.handles import KvHandle
    from triptych.transport.contract import KvPool, Move


class Run(NamedTuple):
    """Blocks that follow each other."""

    first: int
    length: int


def check_moves(handle: KvHandle, moves: Sequence[Move], pool: KvPool) -> None:
    """Make sure that every move stays inside the session and inside the pool.

    Raises:
        IntegrityError: an index is out of bounds or comes twice, or the blocks are of another size.
    """
    if handle.layout.block_bytes != pool.layout.block_bytes:
        raise IntegrityError(
            f"a KV session's blocks of {handle.layout.block_bytes} bytes for a pool of {pool.layout.block_bytes}"
        )
    for name, indices, bound in (
        ("source", {move.source for move in moves}, handle.blocks),
        ("target", {move.target for move in moves}, len(pool.memory)),
    ):
        if len(indices) != len(moves):
            raise IntegrityError(f"a KV {name} block comes twice among {len(moves)} moves")
        if moves and not (min(indices) >= 0 and max(indices) < bound):
            raise IntegrityError(f"KV {name} blocks {min(indices)} to {max(indices)} of {bound}")


def runs(blocks: Iterable[int]) -> Iterator[Run]:
    """Join neighbours: 4 5 6 2 3 is 4+3, 2+2."""
    first = count = 0
    for block in blocks:
        if count and block == first + count:
            count += 1
            continue
        if count:
            yield Run(first, count)
        first, count = block, 1
    if count:
        yield Run(first, count)
