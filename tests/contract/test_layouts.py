"""Layouts: their labels tell them apart, whatever they are of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest
from triptych.core.handles import MAX_DTYPE, MAX_LABEL, MAX_ROW_BLOCK, KvHandle, KvLayout, RowHandle, RowLayout

SIZES = st.integers(1, 2**20)
KV = st.builds(
    KvLayout,
    SIZES,
    SIZES,
    SIZES,
    SIZES,
    st.text(st.characters(max_codepoint=127), min_size=1, max_size=MAX_DTYPE),
    SIZES,
)
ROWS = st.builds(RowLayout, st.integers(1, MAX_ROW_BLOCK))


@given(KV | ROWS, KV | ROWS)
def test_labels_are_equal_where_layouts_are(one: KvLayout | RowLayout, other: KvLayout | RowLayout) -> None:
    assert (one.label == other.label) is (one == other)
    assert one.label.isascii()
    assert len(one.label) <= MAX_LABEL


@pytest.mark.parametrize("dtype", ["", "x" * (MAX_DTYPE + 1), "fl\u00f6at"])
def test_a_dtype_that_is_no_name(dtype: str) -> None:
    with pytest.raises(InvalidRequest, match="dtype"):
        KvLayout(1, 1, 1, 1, dtype, 4)


@pytest.mark.parametrize("size", [0, -1, MAX_ROW_BLOCK + 1])
def test_a_block_of_rows_has_a_size(size: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{size} bytes"):
        RowLayout(size)


@pytest.mark.parametrize(("size", "blocks"), [(1, 1), (64, 1), (65, 2), (640, 10), (641, 11)])
def test_rows_lie_over_as_many_blocks_as_they_need(size: int, blocks: int) -> None:
    assert RowLayout(64).blocks(size) == blocks


def test_handles_can_be_made_by_their_names() -> None:
    kv, rows = KvLayout(1, 1, 1, 1, "float32", 4), RowLayout(64)
    assert KvHandle("S", "memory", "P", kv, 1, b"").layout == kv
    assert RowHandle("S", "memory", "P", rows, 1, b"").layout == rows
