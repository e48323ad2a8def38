"""Rows out of their blocks: every byte where it was, and every number looked at."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.roles.row_copy import EXPONENTS, PIECE, all_finite, copied_rows


@given(rows=st.integers(1, 40), row_bytes=st.integers(1, 50), block_bytes=st.integers(1, 64), seed=st.integers(0, 99))
def test_rows_lie_one_after_the_other_over_blocks_anywhere(
    rows: int, row_bytes: int, block_bytes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    count = -(-rows * row_bytes // block_bytes)
    memory = rng.integers(0, 256, (count + 5, block_bytes), dtype=np.uint8)
    blocks = rng.permutation(count + 5)[:count].tolist()
    got = copied_rows(memory, blocks, rows, row_bytes)
    expected = np.concatenate([memory[block] for block in blocks])[: rows * row_bytes]
    assert got.shape == (rows, row_bytes)
    assert got.tobytes() == expected.tobytes()
    memory.fill(0)  # others get the blocks
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", EXPONENTS)
def test_every_pattern_of_bits_is_judged_as_torch_does(dtype: str) -> None:
    kind = EXPONENTS[dtype][0]
    if kind is np.uint16:
        patterns = np.arange(2**16, dtype=np.uint16)
    else:
        rng = np.random.default_rng(0)
        edges = [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0xFF800000, 0xFFFFFFFF, 0x7FC00000, 0x00800000, 0x80000000]
        patterns = np.concatenate([rng.integers(0, 2**32, 5000, dtype=np.uint32), np.array(edges, np.uint32)])
    judged = torch.from_numpy(patterns.view(np.int16 if kind is np.uint16 else np.int32).copy())
    finite = torch.isfinite(judged.view(getattr(torch, dtype))).tolist()
    assert 0 < sum(finite) < len(finite)
    some = range(len(patterns)) if kind is np.uint32 else range(0, len(patterns), 7)
    for index in some:
        assert all_finite(patterns[index : index + 1].view(np.uint8).reshape(1, -1), dtype) == finite[index]


@pytest.mark.parametrize("dtype", EXPONENTS)
@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 2 * PIECE, 2 * PIECE + 5])
def test_one_number_among_many_is_found(dtype: str, at: int) -> None:
    kind, exponent = EXPONENTS[dtype]
    rows = np.zeros((2 * PIECE + 6, 1), kind)
    assert all_finite(rows.view(np.uint8), dtype)
    rows[at] = exponent
    assert not all_finite(rows.view(np.uint8), dtype)
