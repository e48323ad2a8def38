"""Rows out of the blocks in which they arrived, and a look at each of their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

EXPONENTS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "float32": (np.uint32, 0x7F80_0000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}
"""By number format: the integer of its size, and the bits that are all set in what is not finite."""
PIECE = 32 * 1024
"""Numbers that are looked at together: what is made of them on the way stays in the processor's cache."""


def copied_rows(
    memory: npt.NDArray[np.uint8], blocks: Sequence[int], rows: int, row_bytes: int
) -> npt.NDArray[np.uint8]:
    """Rows that lie one after the other over ``blocks``, in memory of their own: [rows, row_bytes].

    Args:
        memory: [num_blocks, block_bytes].
        blocks: in order; together they have room for the rows.
        rows: how many.
        row_bytes: of each.
    """
    flat = np.empty(rows * row_bytes, np.uint8)
    size = memory.shape[1]
    for index, block in enumerate(blocks):
        part = flat[index * size : (index + 1) * size]
        part[:] = memory[block, : len(part)]
    return flat.reshape(rows, row_bytes)


def all_finite(rows: npt.NDArray[np.uint8], dtype: str) -> bool:
    """Whether no number is infinite or none at all. ``rows`` [rows, row_bytes] are contiguous, of a known format."""
    kind, exponent = EXPONENTS[dtype]
    numbers = rows.reshape(-1).view(kind)
    mask = kind(exponent)
    return not any(((numbers[at : at + PIECE] & mask) == mask).any() for at in range(0, len(numbers), PIECE))
