"""Random scenes: one thing, several things, a digit, a mosaic. Same generator state, same scene."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .digits import TRAIN_DIGITS, digit_labels
from .world import COLOURS, MIN_CONTRAST, SHAPES, Scene, Thing, contrast, pick_rgb

COLOUR_NAMES = tuple(COLOURS)
TURNS = {"circle": 0, "square": 7, "rectangle": 7, "diamond": 6, "triangle": 12, "star": 36, "cross": 14, "heart": 14}
"""Largest turn of each shape in degrees; squares and diamonds must stay apart."""


def random_ground(rng: np.random.Generator) -> tuple[tuple[int, int, int], str | None]:
    """A ground: mostly white, black, gray or a named colour, often a pastel without a name."""
    draw = rng.random()
    if draw < 0.35:
        red, green, blue = rng.integers(222, 256, 3).tolist()
        name = "white" if min(red, green, blue) >= 245 else None
        return (red, green, blue), name
    name = "white" if draw < 0.6 else "black" if draw < 0.7 else str(rng.choice(COLOUR_NAMES))
    return pick_rgb(rng, name), name


def random_ink(rng: np.random.Generator, ground: tuple[int, int, int]) -> tuple[str, tuple[int, int, int]]:
    """A colour that can be seen on the ground, by name and as drawn."""
    while True:
        colour = COLOUR_NAMES[int(rng.integers(len(COLOUR_NAMES)))]
        rgb = pick_rgb(rng, colour)
        if contrast(rgb, ground) >= MIN_CONTRAST:
            return colour, rgb


def half_extents(rng: np.random.Generator, shape: str, reach: float) -> tuple[float, float]:
    """Half width and half height of a shape whose longer side reaches `reach` from its centre."""
    if shape == "rectangle":
        short = reach / rng.uniform(1.4, 2.6)
        return (reach, short) if rng.random() < 0.5 else (short, reach)
    if shape == "diamond":
        return reach * float(rng.uniform(0.65, 0.85)), reach
    if shape == "triangle":
        return reach, reach * float(rng.uniform(0.85, 1.0))
    return reach, reach


def random_shape(
    rng: np.random.Generator, ground: tuple[int, int, int], x: float, y: float, reach: float, shape: str | None = None
) -> Thing:
    """A shape of random colour at a given place."""
    shape = shape or SHAPES[int(rng.integers(len(SHAPES)))]
    colour, rgb = random_ink(rng, ground)
    wide, high = half_extents(rng, shape, reach)
    angle = float(rng.uniform(-1, 1)) * TURNS[shape] if rng.random() < 0.6 else 0.0
    return Thing(shape, colour, rgb, x, y, wide, high, angle)


def random_digit(
    rng: np.random.Generator,
    ground: tuple[int, int, int],
    x: float,
    y: float,
    reach: float,
    pool: np.ndarray = TRAIN_DIGITS,
) -> Thing:
    """A handwritten digit of random colour at a given place."""
    index = int(pool[int(rng.integers(len(pool)))])
    colour, rgb = random_ink(rng, ground)
    angle = float(rng.uniform(-14, 14)) if rng.random() < 0.6 else 0.0
    return Thing(str(digit_labels()[index]), colour, rgb, x, y, reach * float(rng.uniform(0.8, 1)), reach, angle, index)


def single_scene(rng: np.random.Generator) -> Scene:
    """One shape, anywhere, of any size; half of the centres are drawn by place, so that places are even."""
    ground, name = random_ground(rng)
    reach = float(rng.uniform(0.09, 0.3)) if rng.random() < 0.7 else float(rng.uniform(0.25, 0.46))
    x, y = (
        (rng.uniform(0.05, 0.29, 2) + rng.integers(0, 3, 2) / 3)
        if rng.random() < 0.7
        else rng.uniform(reach, 1 - reach, 2)
    )
    low, high = reach * 0.9, 1 - reach * 0.9
    x, y = (float(np.clip(v, low, high)) for v in (x, y))
    return Scene((random_shape(rng, ground, x, y, reach),), ground, name)


def echo_scene(rng: np.random.Generator, first: Scene) -> Scene:
    """One shape that has the shape or the colour of the first scene's thing."""
    model = first.things[0]
    while True:
        scene = single_scene(rng)
        thing = scene.things[0]
        if rng.random() < 0.5 and not model.is_digit:
            wide, high = half_extents(rng, model.name, max(thing.half_width, thing.half_height))
            thing = replace(thing, name=model.name, half_width=wide, half_height=high, angle=0.0)
        elif contrast(model.rgb, scene.ground) >= MIN_CONTRAST:
            thing = replace(thing, colour=model.colour, rgb=model.rgb)
        else:
            continue
        return replace(scene, things=(thing,))


def digit_scene(rng: np.random.Generator, pool: np.ndarray = TRAIN_DIGITS) -> Scene:
    """One handwritten digit, mostly large; often dark on light or light on dark as scans are."""
    draw = rng.random()
    if draw < 0.2:
        ground, name, ink = (255, 255, 255), "white", ("black", (0, 0, 0))
    elif draw < 0.4:
        ground, name, ink = (0, 0, 0), "black", ("white", (255, 255, 255))
    else:
        ground, name = random_ground(rng)
        ink = random_ink(rng, ground)
    reach = float(rng.uniform(0.34, 0.5)) if rng.random() < 0.7 else float(rng.uniform(0.2, 0.36))
    slack = 0.52 - reach
    x, y = (0.5 + rng.uniform(-slack, slack, 2)).tolist()
    thing = random_digit(rng, ground, x, y, reach, pool)
    return Scene((Thing(thing.name, *ink, x, y, thing.half_width, reach, thing.angle, thing.index),), ground, name)


def multi_scene(rng: np.random.Generator, count: int | None = None) -> Scene:
    """Two to four shapes that do not touch; shapes and colours repeat often enough to be counted."""
    count = count or int(rng.integers(2, 5))
    ground, name = random_ground(rng)
    shared = SHAPES[int(rng.integers(len(SHAPES)))] if rng.random() < 0.5 else None
    things: list[Thing] = []
    tries = 0
    while len(things) < count:
        tries += 1
        reach = float(rng.uniform(0.09, 0.23 if count == 2 else 0.18)) * (0.85 if tries > 60 else 1)
        x, y = rng.uniform(reach + 0.01, 0.99 - reach, 2).tolist()
        if any(max(abs(t.x - x), abs(t.y - y)) < reach + max(t.half_width, t.half_height) + 0.03 for t in things):
            continue
        thing = random_shape(rng, ground, x, y, reach, shared if rng.random() < 0.6 else None)
        if things and rng.random() < 0.25:
            first = things[0]
            thing = Thing(thing.name, first.colour, first.rgb, x, y, thing.half_width, thing.half_height, thing.angle)
        things.append(thing)
    return Scene(tuple(things), ground, name)


def mosaic_scene(rng: np.random.Generator, digits: float) -> Scene:
    """A grid of 2 x 2 to 4 x 4 cells, most of them filled: many labels per picture for the warm-up."""
    ground, name = random_ground(rng)
    side = int(rng.integers(2, 5))
    things = []
    for cell in rng.permutation(side * side):
        if things and rng.random() < 0.12:
            continue
        reach = float(rng.uniform(0.28, 0.47)) / side
        slack = 0.48 / side - reach
        x = (cell % side + 0.5) / side + float(rng.uniform(-slack, slack))
        y = (cell // side + 0.5) / side + float(rng.uniform(-slack, slack))
        make = random_digit if rng.random() < digits else random_shape
        things.append(make(rng, ground, x, y, reach))
    return Scene(tuple(things), ground, name)
