"""Encoder references made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from tests.sessions import picture
from triptych.core.encoded import EncodedItem, EncoderReference
from triptych.core.handles import Handle, RowLayout
from triptych.core.layout import MAX_SECONDS, Grid, ItemLayout, Run
from triptych.core.media import Modality

BLOCK = 1024
ROW = 400
"""Bytes."""

_SIZES = st.integers(1, 2**31 - 1)


def reference(
    layout: ItemLayout | None = None, *, name: str = "encoder-1/17", instance: str = "instance-1", **fields: Any
) -> EncoderReference:
    """A reference to a picture of 2 x 3 rows, or to another item, in as many blocks as it fills."""
    layout = picture(0, 2, 3) if layout is None else layout
    rows = RowLayout(BLOCK)
    handle = Handle(name, "memory", instance, rows, rows.blocks(layout.rows * ROW), b"\x00state\xff")
    made = EncoderReference(EncodedItem(layout, handle, ROW, "float32"), bytes(range(32)), 1_790_000_000_123_456_789)
    return dataclasses.replace(made, **fields)


@st.composite
def layouts(draw: st.DrawFn, start: int = 0) -> ItemLayout:
    """Any layout at all whose first run begins at ``start``."""
    runs = [Run(start, draw(st.integers(1, 9)))]
    for _ in range(draw(st.integers(0, 4))):
        runs.append(Run(runs[-1].end + draw(st.integers(0, 9)), draw(st.integers(1, 9))))
    positions = [position for run in runs for position in range(run.start, run.end)]
    framing = sorted(draw(st.sets(st.sampled_from(positions), max_size=len(positions) - 1)))
    times = tuple(draw(st.lists(st.floats(0, MAX_SECONDS), max_size=4)))
    return ItemLayout(
        modality=draw(st.sampled_from(Modality)),
        runs=tuple(runs),
        rows=len(positions) - len(framing),
        encoder_tokens=draw(_SIZES),
        grid=Grid(len(times) or draw(_SIZES), draw(_SIZES), draw(_SIZES)),
        content_key=draw(st.binary(min_size=32, max_size=32)),
        framing=tuple(framing),
        times=times,
    )


def timed(times: tuple[float, ...] = (0.25, 1.0, 2.0)) -> ItemLayout:
    """A clip of 1 x 2 merged cells a step, as an encoder hands it over: its times are not written yet."""
    count = len(times)
    rows = 2 * count
    return ItemLayout(Modality.VIDEO, (Run(0, rows),), rows, 4 * rows, Grid(count, 2, 4), bytes(32), times=times)


def steps(count: int, framing: tuple[int, ...] = ()) -> ItemLayout:
    """A clip with a run of two positions for each of its steps, and one position between them."""
    runs = tuple(Run(3 * step, 2) for step in range(count))
    return ItemLayout(Modality.VIDEO, runs, 2 * count - len(framing), 4, Grid(count, 2, 2), bytes(32), framing)
