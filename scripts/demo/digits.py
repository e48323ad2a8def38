"""Real handwritten digits: scikit-learn's 1,797 scans of 8 x 8 pixels, split once and for all by index."""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image, ImageFilter

COUNT = 1797
HELD_OUT_DIGITS = np.arange(0, COUNT, 5)
"""Every fifth scan, 360 of them: never trained on."""
TRAIN_DIGITS = np.setdiff1d(np.arange(COUNT), HELD_OUT_DIGITS)


@cache
def digit_scans() -> np.ndarray:
    """All scans as uint8 [1797, 8, 8], ink 255."""
    from sklearn.datasets import load_digits

    return np.minimum(load_digits().images * 16, 255).astype(np.uint8)


@cache
def digit_labels() -> np.ndarray:
    """The digit of each scan [1797]."""
    from sklearn.datasets import load_digits

    return load_digits().target


def digit_ink(index: int, width: int, height: int, angle: float, rng: np.random.Generator, plain: bool) -> Image.Image:
    """The ink of one scan as an L picture of width x height, 255 where the pen was.

    Plain ink is only enlarged and turned; otherwise thickness, slant, stretch and contrast vary too.
    """
    scan = digit_scans()[index]
    if not plain and rng.random() < 0.5:
        scan = np.clip(scan + rng.normal(0, 14, scan.shape) * (scan > 0), 0, 255).astype(np.uint8)
    picture = Image.fromarray(np.pad(scan, 1))
    if rng.random() < 0.2:
        ink = picture.resize((width, height), Image.Resampling.NEAREST)
        return ink.rotate(angle / 2, Image.Resampling.BILINEAR) if angle else ink
    ink = picture.resize((40, 40), Image.Resampling.BICUBIC)
    if not plain and rng.random() < 0.4:
        ink = ink.filter(ImageFilter.MaxFilter(3) if rng.random() < 0.5 else ImageFilter.MinFilter(3))
    if not plain:
        slant, zoom_x, zoom_y = rng.uniform(-0.25, 0.25), rng.uniform(0.85, 1.2), rng.uniform(0.85, 1.15)
        move_x, move_y = rng.uniform(-3, 3, 2)
        matrix = (zoom_x, slant, 20 - 20 * zoom_x - 20 * slant + move_x, 0, zoom_y, 20 - 20 * zoom_y + move_y)
        ink = ink.transform((40, 40), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    if angle:
        ink = ink.rotate(angle, Image.Resampling.BILINEAR)
    ink = ink.resize((width, height), Image.Resampling.BICUBIC if rng.random() < 0.7 else Image.Resampling.BILINEAR)
    if rng.random() < 0.6:
        gain, middle = rng.uniform(1.2, 4.0), rng.uniform(90, 140)
        ink = ink.point([int(min(max((v - middle) * gain + middle, 0), 255)) for v in range(256)])
    return ink
