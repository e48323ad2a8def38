"""The small world the demo model knows: names, colours, places, and the scene that holds them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

SHAPES = ("circle", "square", "triangle", "rectangle", "star", "diamond", "cross", "heart")
PLURALS = {shape: shape + "s" for shape in SHAPES} | {"cross": "crosses"}

# Each name has one or more prototypes (easy-vqa's exact colours among them); drawing adds jitter.
COLOURS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((255, 0, 0), (220, 25, 35)),
    "green": ((0, 255, 0), (20, 160, 40), (60, 200, 60)),
    "blue": ((0, 0, 255), (35, 80, 220)),
    "yellow": ((255, 255, 0), (240, 220, 30)),
    "orange": ((255, 140, 0), (245, 125, 30)),
    "purple": ((128, 0, 160), (140, 50, 200)),
    "pink": ((255, 130, 190), (255, 175, 200)),
    "brown": ((165, 42, 42), (130, 75, 35)),
    "black": ((0, 0, 0), (20, 20, 24)),
    "white": ((255, 255, 255), (245, 245, 245)),
    "gray": ((128, 128, 128), (140, 140, 145)),
    "teal": ((0, 128, 128), (10, 140, 135)),
}
JITTER = 10
MIN_CONTRAST = 110
"""Smallest Euclidean distance between the colours of a thing and of its ground."""

ROWS = ("top", "", "bottom")
COLUMNS = ("left", "", "right")
PLACES = tuple(" ".join(p for p in (r, c) if p) or "centre" for r in ROWS for c in COLUMNS)
"""Nine places in reading order; the index is `3 * row + column`."""

PLACE_MARGIN = 0.035
"""A centre closer than this to a border between thirds has no place that one could ask for."""


@dataclass(frozen=True)
class Thing:
    """One shape or digit. Lengths are fractions: x of the width, y of the height."""

    name: str
    """A shape's name, or a digit `"0"` to `"9"`."""
    colour: str
    rgb: tuple[int, int, int]
    x: float
    y: float
    half_width: float
    half_height: float
    angle: float = 0.0
    index: int = -1
    """Which handwritten digit of the data set is drawn; shapes have none."""

    @property
    def is_digit(self) -> bool:
        """Whether this is a digit and no shape."""
        return self.name.isdigit()

    @property
    def place(self) -> int | None:
        """Index into `PLACES`, or None where the centre is too near a border to say."""
        near = min(abs(v - third) for v in (self.x, self.y) for third in (1 / 3, 2 / 3))
        return None if near < PLACE_MARGIN else 3 * min(int(self.y * 3), 2) + min(int(self.x * 3), 2)

    @property
    def phrase(self) -> str:
        """The thing with its article: `"a red circle"`, `"an orange star"`, `"a blue digit 7"`."""
        article = "an" if self.colour == "orange" else "a"
        return f"{article} {self.colour} " + (f"digit {self.name}" if self.is_digit else self.name)


@dataclass(frozen=True)
class Scene:
    """What a picture shows, before it is drawn."""

    things: tuple[Thing, ...]
    ground: tuple[int, int, int]
    ground_colour: str | None
    """The ground's name; None for a pastel that has none."""
    easy: int | None = None
    """The easy-vqa training picture that shows this scene, if one does."""

    def mirrored(self) -> Scene:
        """The scene as a mirror shows it."""
        return replace(self, things=tuple(replace(t, x=1 - t.x) for t in self.things))


def pick_rgb(rng: np.random.Generator, colour: str) -> tuple[int, int, int]:
    """A jittered prototype of a colour."""
    prototypes = COLOURS[colour]
    base = prototypes[int(rng.integers(len(prototypes)))]
    red, green, blue = np.clip(np.array(base) + rng.integers(-JITTER, JITTER + 1, 3), 0, 255).tolist()
    return red, green, blue


def contrast(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    """Euclidean distance of two colours."""
    return sum((p - q) ** 2 for p, q in zip(a, b, strict=True)) ** 0.5
