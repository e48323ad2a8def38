from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest
from triptych.core.layout import Grid, ItemLayout, Run
from triptych.core.media import Modality
from triptych.core.plan import PositionRule, PromptPlan
from triptych.processors.positions import positions_of

MERGE = 2


def item(start: int, t: int, h: int, w: int, *, runs: int = 1, gap: int = 0) -> ItemLayout:
    """A picture, or a video in ``runs`` stretches, of t x h x w merged cells."""
    length = t * h * w // runs
    return ItemLayout(
        modality=Modality.IMAGE,
        runs=tuple(Run(start + r * (length + gap), length) for r in range(runs)),
        rows=t * h * w,
        encoder_tokens=t * h * w * MERGE**2,
        grid=Grid(t, h * MERGE, w * MERGE),
        content_key=bytes(32),
    )


def plan(length: int, *items: ItemLayout, rule: PositionRule = PositionRule.MROPE) -> PromptPlan:
    return PromptPlan(np.zeros(length, dtype=np.int32), items, rule, MERGE, b"")


def test_text_of_a_one_axis_family_counts_up() -> None:
    positions = positions_of(plan(5, rule=PositionRule.LINEAR))
    assert positions.table.tolist() == [[0, 1, 2, 3, 4]]
    assert positions.delta == 0


def test_text_of_a_three_axis_family_counts_up_on_each() -> None:
    positions = positions_of(plan(4))
    assert positions.table.tolist() == [[0, 1, 2, 3]] * 3
    assert positions.delta == 0


def test_a_picture_spreads_over_its_grid_and_advances_by_its_longer_side() -> None:
    positions = positions_of(plan(10, item(2, 1, 2, 3)))
    assert positions.table[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert positions.table[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    assert positions.table[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]
    assert positions.delta == 7 - 10


def test_a_picture_at_the_end_still_moves_what_comes_after() -> None:
    positions = positions_of(plan(7, item(1, 1, 3, 2)))
    assert positions.table[1].tolist() == [0, 1, 1, 2, 2, 3, 3]
    assert positions.delta == 4 - 7


def test_pictures_that_touch_are_still_two() -> None:
    positions = positions_of(plan(3, item(0, 1, 1, 2), item(2, 1, 1, 1)))
    assert positions.table[2].tolist() == [0, 1, 2]


def test_each_run_of_an_item_in_several_runs_holds_its_share_of_the_time_steps() -> None:
    positions = positions_of(plan(7, item(1, 2, 1, 2, runs=2, gap=1)))
    assert positions.table[0].tolist() == [0, 1, 1, 3, 4, 4, 6]
    assert positions.table[2].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_runs_that_do_not_hold_the_grid_are_refused() -> None:
    wrong = ItemLayout(Modality.IMAGE, (Run(0, 3),), 3, 16, Grid(1, 4, 4), bytes(32))
    with pytest.raises(InvalidRequest, match=r"media item 0: runs of \[3\] positions do not hold"):
        positions_of(plan(5, wrong))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 4)), max_size=4), st.integers(1, 6))
def test_text_is_consecutive_and_nothing_stands_at_or_after_the_next_position(
    shapes: list[tuple[int, int, int]], tail: int
) -> None:
    at, items = 0, []
    for text, h, w in shapes:
        items.append(item(at + text, 1, h, w))
        at = items[-1].end
    length = at + tail
    positions = positions_of(plan(length, *items))
    table = positions.table
    assert table.shape == (3, length)
    assert (table.max() + 1) == length + positions.delta
    media = {p for entry in items for p in range(entry.start, entry.end)}
    text_at = [p for p in range(length) if p not in media]
    assert (table[0, text_at] == table[1, text_at]).all()
    assert (table[0, text_at] == table[2, text_at]).all()
    assert (np.diff(table[0, text_at]) >= 1).all()
