from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from triptych.transport.moves import Run, runs


def test_neighbours_are_joined() -> None:
    assert list(runs([4, 5, 6, 2, 3, 9])) == [Run(4, 3), Run(2, 2), Run(9, 1)]
    assert list(runs([])) == []
    assert list(runs([3, 2, 1])) == [Run(3, 1), Run(2, 1), Run(1, 1)]
    assert list(runs([0, 0])) == [Run(0, 1), Run(0, 1)]


@given(st.lists(st.integers(0, 20)))
def test_runs_say_the_same_in_fewer_words(blocks: list[int]) -> None:
    joined = list(runs(blocks))
    assert [first + index for first, length in joined for index in range(length)] == blocks
    assert all(one.first + one.length != other.first for one, other in itertools.pairwise(joined))
