"""A fetch's moves: checked, and joined so that few copies do them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from triptych.core.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from triptych.core.handles import Handle
    from triptych.transport.contract import BlockMemory, Move


class Run(NamedTuple):
    """Blocks that follow each other."""

    first: int
    length: int


def check_moves(handle: Handle[Any], moves: Sequence[Move], pool: BlockMemory) -> None:
    """Make sure that every move stays inside the session and inside the pool.

    Raises:
        IntegrityError: an index is out of bounds or comes twice, or the blocks are of another layout.
    """
    if handle.layout.label != pool.layout.label:
        raise IntegrityError(f"a session's blocks of layout {handle.layout.label} for a pool of {pool.layout.label}")
    for name, indices, bound in (
        ("source", {move.source for move in moves}, handle.blocks),
        ("target", {move.target for move in moves}, len(pool.memory)),
    ):
        if len(indices) != len(moves):
            raise IntegrityError(f"a {name} block comes twice among {len(moves)} moves")
        if moves and not (min(indices) >= 0 and max(indices) < bound):
            raise IntegrityError(f"{name} blocks {min(indices)} to {max(indices)} of {bound}")


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
