"""What the corpus draws, and how it says what must come out of it."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 40, 24
EXIF_ORIENTATION = 0x0112


@dataclass(frozen=True)
class Good:
    """One picture that can be used."""

    name: str
    what: str
    """How it is stored."""
    data: bytes
    exact: np.ndarray | None = None
    """Its pixels, [height, width, 3]."""
    near: np.ndarray | None = None
    """What its pixels are like, where it is stored with losses."""
    committed: bool = True
    """False for what is too large for that; it is made when the tests run."""


def smooth() -> np.ndarray:
    """A picture without symmetries, all of whose corners differ: [24, 40, 3]."""
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    return np.dstack([columns * 6, rows * 10, 255 - columns * 3 - rows * 5]).astype(np.uint8)


def stored(upright: np.ndarray, orientation: int) -> np.ndarray:
    """How a camera that is held like this stores the picture; written without Pillow."""
    flipped = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }
    return np.ascontiguousarray(flipped[orientation])


def on_white(rgb: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Composited, rounded to the nearest."""
    opacity = alpha.astype(np.float64)[..., None] / 255
    return np.round(rgb * opacity + 255 * (1 - opacity)).astype(np.uint8)


def grey3(grey: np.ndarray) -> np.ndarray:
    """Grey as RGB."""
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)


def save(image: Image.Image | np.ndarray, kind: str, **options: object) -> bytes:
    """As Pillow writes it."""
    if kind == "AVIF":
        options["max_threads"] = 1  # so that every machine writes the same
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation: int) -> Image.Exif:
    """A block that says how the camera was held."""
    block = Image.Exif()
    block[EXIF_ORIENTATION] = orientation
    return block


RGB = smooth()
GREY = RGB[..., 0]
ALPHA = (np.mgrid[0:HEIGHT, 0:WIDTH].sum(0) * 4).astype(np.uint8)
ON_WHITE = on_white(RGB, ALPHA)
DEEP = (np.mgrid[0:HEIGHT, 0:WIDTH][1] * 1601 + 77).astype(np.uint16)
"""16-bit samples."""
LEVELS = (np.mgrid[0:HEIGHT, 0:WIDTH].sum(0) % 16).astype(np.uint8)
"""4-bit samples."""
PALETTE = np.random.default_rng(1).integers(0, 256, (256, 3), dtype=np.uint8)
INDICES = ((np.arange(HEIGHT)[:, None] * 7 + np.arange(WIDTH) * 3) % 256).astype(np.uint8)
ENTRY_ALPHA = np.arange(256, dtype=np.uint8)
