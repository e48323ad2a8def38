"""A video in a Qwen3-VL prompt: one marker in, one group of frames after the other out, each with its time.

    <|video_pad|>  ->  <0.3 seconds><|vision_start|><|video_pad|> x rows<|vision_end|>  ->  the next group's time ...

A group is what the tower merges along time (two frames). The marks and the time are ordinary text: they stand between
the item's runs and get rotary positions as text does; only the repeated marker receives rows. What stands around the
marker in the prompt stays, so the outer vision marks of the chat template remain, as in the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from triptych.core.layout import MAX_SECONDS, Run
from triptych.processors.expand import ItemText

if TYPE_CHECKING:
    import numpy.typing as npt

    from triptych.core.layout import Grid

Tokenise = Callable[[str], Sequence[int]]
"""Text to ids among which there are no added tokens, nor what the tokenizer itself would add."""

FEWEST_WRITTEN = 3
"""Tokens around the rows of a group: its time, of one at least, and a mark on either side."""
_MOST_BEFORE = len(f"<{MAX_SECONDS:.1f} seconds>") + 1
"""Tokens that a time and the mark behind it can have: one a character."""


class VideoTokens(NamedTuple):
    """The ids of the added tokens that a video is written with."""

    pad: int
    """Stands for one row; alone it is the marker of a whole video."""
    start: int
    end: int


def group_times(timestamps: Sequence[float], temporal: int) -> tuple[float, ...]:
    """The time of each group of frames: halfway between its first and its last one.

    Args:
        timestamps: Seconds, one a frame; where the last group is not full, its last frame is repeated.
        temporal: Frames in a group.
    """
    firsts = timestamps[::temporal]
    lasts = [timestamps[min(at + temporal, len(timestamps)) - 1] for at in range(0, len(timestamps), temporal)]
    return tuple((first + last) / 2 for first, last in zip(firsts, lasts, strict=True))


def time_text(seconds: float) -> str:
    """How the family writes the time of a group."""
    return f"<{seconds:.1f} seconds>"


def video_text(times: Sequence[float], grid: Grid, merge: int, tokens: VideoTokens, tokenise: Tokenise) -> ItemText:
    """The tokens that replace one marker, with a run for each group.

    Args:
        times: Seconds, one a group; as many as the grid has steps of time.
        grid: Patches of the video, before merging; ``t`` counts groups.
        merge: Patches along one side of a merged cell.
        tokens: The family's added tokens.
        tokenise: A time is tokenised for itself, which is how it comes out in the reference too, where an added token
            stands on both sides of it.
    """
    rows = (grid.h // merge) * (grid.w // merge)
    written = [[*tokenise(time_text(seconds)), tokens.start] for _, seconds in zip(range(grid.t), times, strict=True)]
    sizes = np.array([len(text) for text in written])
    groups = np.arange(grid.t) * (rows + 1)
    starts = np.cumsum(sizes) + groups  # of each group's rows
    token_ids = np.full(int(starts[-1]) + rows + 1, tokens.pad, dtype=np.int32)
    token_ids[np.arange(sizes.sum()) + np.repeat(groups, sizes)] = list(chain.from_iterable(written))
    token_ids[starts + rows] = tokens.end
    token_ids.setflags(write=False)
    return ItemText(token_ids, tuple(Run(start, rows) for start in starts.tolist()))


def written_before(token_ids: npt.NDArray[np.int32], tokenise: Tokenise) -> int:
    """How many tokens at the end of a prompt's beginning are what :func:`video_text` puts before a video's first run.

    They are found by the first of them, which is the same for every time and does not come again in it. Where it is
    not found in the tokens that a time can have, there are none.
    """
    opening = tokenise(time_text(0.0))[0]
    found = np.flatnonzero(token_ids[-_MOST_BEFORE:] == opening)
    return min(len(token_ids), _MOST_BEFORE) - int(found[-1]) if len(found) else 0
