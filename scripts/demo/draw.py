"""Scenes become pictures, and pictures the patches that the tower reads."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from .digits import digit_ink

if TYPE_CHECKING:
    from .world import Scene, Thing

PATCH = 16
MERGE = 2
SQUARE = (8, 8)
"""Patches high and wide of every square picture after the processor's resize."""
OTHER_GRIDS = ((8, 10), (10, 8), (6, 8), (8, 6), (6, 10), (10, 6))
SOURCE_SIDES = (64, 72, 80, 96, 112, 144, 160, 192, 224, 256, 320)


@cache
def outline(shape: str) -> np.ndarray:
    """A shape's outline as points [n, 2] within -1 .. 1, y downwards."""
    if shape in ("square", "rectangle"):
        return np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)], float)
    if shape == "triangle":
        return np.array([(0, -1), (1, 1), (-1, 1)], float)
    if shape == "diamond":
        return np.array([(0, -1), (1, 0), (0, 1), (-1, 0)], float)
    if shape == "cross":
        a = 0.34
        half = [(-a, -1), (a, -1), (a, -a), (1, -a), (1, a), (a, a)]
        return np.array(half + [(-x, -y) for x, y in half], float)
    turn = np.linspace(0, 2 * np.pi, 10 if shape == "star" else 36, endpoint=False)
    if shape == "star":
        radius = np.where(np.arange(10) % 2 == 0, 1.0, 0.42)
        return np.stack([radius * np.sin(turn), -radius * np.cos(turn)], 1)
    if shape == "heart":
        y = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
        return np.stack([np.sin(turn) ** 3, -(y + 2.5) / 14.5], 1)
    return np.stack([np.sin(turn), -np.cos(turn)], 1)


def corners(thing: Thing, width: int, height: int) -> list[tuple[float, float]]:
    """The outline of a shape in pixels of a canvas."""
    side = min(width, height)
    points = outline(thing.name) * (thing.half_width * side, thing.half_height * side)
    if thing.angle:
        a = np.deg2rad(thing.angle)
        points = points @ np.array([(np.cos(a), np.sin(a)), (-np.sin(a), np.cos(a))])
    points += np.array((thing.x * width, thing.y * height))
    return [(x, y) for x, y in points.tolist()]


def draw(scene: Scene, width: int, height: int, rng: np.random.Generator, plain: bool = False) -> Image.Image:
    """Draw a scene on a canvas of width x height; the generator chooses edges and pen strokes."""
    zoom = 2 if rng.random() < 0.6 and width <= 192 and not any(t.is_digit for t in scene.things) else 1
    canvas = Image.new("RGB", (width * zoom, height * zoom), scene.ground)
    pen = ImageDraw.Draw(canvas)
    side = min(canvas.size)
    for thing in scene.things:
        if not thing.is_digit:
            pen.polygon(corners(thing, *canvas.size), fill=thing.rgb)
            continue
        size = (max(round(2 * thing.half_width * side), 8), max(round(2 * thing.half_height * side), 8))
        ink = digit_ink(thing.index, *size, thing.angle, rng, plain)
        corner = (round(thing.x * canvas.width - size[0] / 2), round(thing.y * canvas.height - size[1] / 2))
        canvas.paste(thing.rgb, corner, ink)
    return canvas.resize((width, height), Image.Resampling.BOX) if zoom > 1 else canvas


def source_size(grid: tuple[int, int], rng: np.random.Generator) -> tuple[int, int]:
    """A canvas size (width, height) that the processor will bring to the grid: often just its size."""
    high, wide = grid
    if rng.random() < 0.5:
        return wide * PATCH, high * PATCH
    side = SOURCE_SIDES[int(rng.integers(len(SOURCE_SIDES)))]
    if grid == SQUARE:
        return side, side
    scale = max(side, 96) / 128 * PATCH
    return round(wide * scale * rng.uniform(0.94, 1.06)), round(high * scale)


def to_grid(picture: Image.Image, grid: tuple[int, int]) -> np.ndarray:
    """The processor's resize: uint8 [height, width, 3] of exactly the grid's size."""
    size = (grid[1] * PATCH, grid[0] * PATCH)
    return np.asarray(picture if picture.size == size else picture.resize(size, Image.Resampling.BICUBIC))


def patchify(pictures: np.ndarray) -> np.ndarray:
    """[n, height, width, 3] to [n, patches, 3 * 16 * 16], patches in the order in which they merge."""
    n, height, width, _ = pictures.shape
    rows, columns = height // (PATCH * MERGE), width // (PATCH * MERGE)
    cut = pictures.reshape(n, rows, MERGE, PATCH, columns, MERGE, PATCH, 3)
    return cut.transpose(0, 1, 4, 2, 5, 7, 3, 6).reshape(n, rows * columns * MERGE * MERGE, -1)
