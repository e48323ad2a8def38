"""Dense targets for the tower: what each merged token covers, and what the picture holds as a whole."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .draw import MERGE
from .world import COLOURS, SHAPES, Scene

NAMES = ("", *SHAPES, *"0123456789")
COLOUR_NAMES = ("", *COLOURS)
PLACE_COUNT = 10
CENTRES = 3
COUNTS = 6
IGNORE = -100
TOKEN_HEADS = (len(NAMES), len(COLOUR_NAMES), PLACE_COUNT, CENTRES)
"""Classes per merged token: name, colour, place of the thing (0: none), centres within the token."""
NAME_INDEX = {name: i for i, name in enumerate(NAMES)}
COLOUR_INDEX = {name: i for i, name in enumerate(COLOUR_NAMES)}


class Labels(NamedTuple):
    """Targets of one picture."""

    tokens: np.ndarray
    """[tokens, 4] classes after `TOKEN_HEADS`."""
    whole: np.ndarray
    """[2]: how many things (five stands for more), and the ground's colour."""
    present: np.ndarray
    """[len(NAMES) - 1 + len(COLOURS)] of 0 and 1."""


def labels_of(scene: Scene, grid: tuple[int, int]) -> Labels:
    """The targets of a scene on a grid of patches."""
    high, wide = grid[0] // MERGE, grid[1] // MERGE
    side = min(high, wide)
    count = len(scene.things)
    boxes = np.array([(t.x * wide, t.y * high, t.half_width * side, t.half_height * side) for t in scene.things])
    centre_x, centre_y, half_x, half_y = boxes.T[..., None]
    columns, rows = np.arange(wide)[None], np.arange(high)[None]
    over_x = np.minimum(centre_x + half_x, columns + 1) - np.maximum(centre_x - half_x, columns)
    over_y = np.minimum(centre_y + half_y, rows + 1) - np.maximum(centre_y - half_y, rows)
    area = (over_y.clip(0)[:, :, None] * over_x.clip(0)[:, None, :]).reshape(count, -1)
    best = area.argmax(0)
    share = area[best, np.arange(high * wide)]
    clear = np.maximum(share / 0.2, share / (0.3 * 4 * boxes[best, 2] * boxes[best, 3]))
    facts = np.array(
        [
            (
                NAME_INDEX[t.name],
                COLOUR_INDEX[t.colour],
                1 + 3 * min(int(t.y * 3), 2) + min(int(t.x * 3), 2),
            )
            for t in scene.things
        ]
    )
    tokens = np.full((high * wide, 4), 0)
    tokens[:, :3] = np.where((clear >= 1)[:, None], facts[best], np.where((share > 0)[:, None], IGNORE, 0))
    cells = np.minimum(boxes[:, 1].astype(int), high - 1) * wide + np.minimum(boxes[:, 0].astype(int), wide - 1)
    tokens[:, 3] = np.bincount(cells, minlength=high * wide).clip(max=CENTRES - 1)
    ground = COLOUR_INDEX[scene.ground_colour] - 1 if scene.ground_colour else IGNORE
    present = np.zeros(len(NAMES) - 1 + len(COLOURS), np.float32)
    present[facts[:, 0] - 1] = 1
    present[len(NAMES) - 2 + facts[:, 1]] = 1
    return Labels(tokens, np.array((min(count, COUNTS - 1), ground)), present)
