"""Rotary positions from a plan's grids and runs.

A text token stands one further than the token before it, on every axis. An item of ``h`` x ``w`` merged
cells occupies, from position ``p`` on, time ``p``, heights ``p .. p + h - 1`` and widths ``p .. p + w - 1``;
the text after it goes on at ``p + max(h, w)``, whatever the number of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from triptych.core.errors import InvalidRequest
from triptych.core.layout import Positions
from triptych.core.plan import PositionRule

if TYPE_CHECKING:
    import numpy.typing as npt

    from triptych.core.layout import ItemLayout
    from triptych.core.plan import PromptPlan


def positions_of(plan: PromptPlan) -> Positions:
    """Positions of the whole prompt.

    Raises:
        InvalidRequest: an item's runs do not hold its merged grid.
    """
    if plan.rule is PositionRule.LINEAR:
        return Positions(_read_only(np.arange(len(plan), dtype=np.int32)[None]), 0)
    table = np.empty((3, len(plan)), dtype=np.int32)
    filled, position = 0, 0
    for index, item in enumerate(plan.items):
        cells = _cells(index, item, plan.spatial_merge)
        rows, step = cells.shape[1], max(item.grid.h, item.grid.w) // plan.spatial_merge
        starts = np.array([run.start for run in item.runs], dtype=np.int64)
        # As if all were text, but that a run before it moves what follows by ``step``, and not by its rows.
        before = np.repeat(np.arange(len(starts)), np.diff(starts + rows, prepend=filled))
        table[:, filled : item.end] = np.arange(position, position + item.end - filled) + before * (step - rows)
        firsts = table[0, starts]
        table[:, starts[:, None] + np.arange(rows)] = cells[:, None] + firsts[:, None]  # [axes, runs, rows]
        filled, position = item.end, int(firsts[-1]) + step
    table[:, filled:] = np.arange(position, position + len(plan) - filled)
    next_position = position + len(plan) - filled
    return Positions(_read_only(table), next_position - len(plan))


def _cells(index: int, item: ItemLayout, merge: int) -> npt.NDArray[np.int32]:
    """(time, height, width) offsets of the rows of one of the item's runs, [3, rows]; runs share the time steps."""
    cells = item.cells(merge)
    if cells is None:
        raise InvalidRequest(
            f"media item {index}: runs of {[run.length for run in item.runs]} positions do not hold the grid "
            f"{tuple(item.grid)} merged {merge} x {merge}"
        )
    return np.indices(cells, dtype=np.int32).reshape(3, -1)


def _read_only(table: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    table.setflags(write=False)
    return table
