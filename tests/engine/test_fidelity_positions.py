"""Positions against transformers' own index, for random layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from tests.checkpoints import SHAPES
from triptych.core.layout import Grid, ItemLayout, Run
from triptych.core.media import Modality
from triptych.core.plan import PositionRule, PromptPlan
from triptych.processors.positions import positions_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MERGE = 2


def reference() -> PreTrainedModel:
    with torch.device("meta"):
        return Qwen3VLModel(SHAPES["vl-plain"]())


MODEL = reference()

# Text before each picture is at least one token: two that touch are one stretch to the reference.
layouts = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(1, 7)), max_size=3)


@given(layouts, st.integers(0, 9))
def test_positions_and_delta_are_those_of_transformers(shapes: list[tuple[int, int, int]], tail: int) -> None:
    at, items = 0, []
    for text, h, w in shapes:
        start = at + text
        grid = Grid(1, h * MERGE, w * MERGE)
        items.append(ItemLayout(Modality.IMAGE, (Run(start, h * w),), h * w, h * w * 4, grid, bytes(32)))
        at = start + h * w
    length = max(at + tail, 1)
    kinds = torch.zeros((1, length), dtype=torch.int64)
    for item in items:
        kinds[0, item.start : item.end] = 1
    grids = torch.tensor([tuple(item.grid) for item in items]) if items else None
    expected, delta = MODEL.get_rope_index(torch.zeros((1, length), dtype=torch.int64), kinds, image_grid_thw=grids)
    plan = PromptPlan(np.zeros(length, dtype=np.int32), tuple(items), PositionRule.MROPE, MERGE, b"")
    positions = positions_of(plan)
    assert np.array_equal(positions.table, expected[:, 0].numpy())
    assert positions.delta == delta.item()
