"""Decoded videos that no decoder has seen: random pixels at uneven times."""

from __future__ import annotations

import numpy as np

from triptych.core.clip import Clip, FramePlan


def clip(seed: int, frames: int, height: int, width: int) -> Clip:
    """So many frames of a longer file, as they would come out of a decoder that fits them."""
    dice = np.random.default_rng(seed)
    pixels = dice.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    indices = np.cumsum(dice.integers(1, 40, frames)) - 1
    times = indices / 25 + dice.uniform(0, 0.02, frames)
    total = int(indices[-1]) + 10
    plan = FramePlan(tuple(indices.tolist()), tuple(times.tolist()), 25.0, total, total / 25 + 1)
    return Clip(pixels, plan)
