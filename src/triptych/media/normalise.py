"""Any decoded picture to upright, opaque, 8-bit RGB. The one path for every source of pictures.

- Orientation as EXIF says, all eight; broken EXIF counts as none.
- Transparency is composited on white.
- 16-bit grey keeps its high byte, as 16-bit colour does in the decoder.
- 32-bit integer and float samples have no fixed range: their darkest value becomes 0, their brightest 255.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import numpy.typing as npt

EXIF_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes each orientation; 1 is upright already."""
_ALPHA_MODES = frozenset({"RGBA", "RGBa", "LA", "La", "PA"})
_WHITE = (255, 255, 255, 255)


def to_rgb(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Pixels [height, width, 3] of a loaded image.

    Raises:
        ValueError: samples are not finite, or Pillow knows no way from the colour model to RGB.
    """
    orientation = _orientation(image)
    flat = _flatten(image)
    if (method := _UPRIGHT.get(orientation)) is not None:
        flat = flat.transpose(method)
    return np.asarray(flat)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(EXIF_ORIENTATION, 1)
    except Exception:
        # Metadata by others, parsed by others: a picture with a broken EXIF block is still a good picture.
        return 1
    return value if isinstance(value, int) else 1


def _flatten(image: Image.Image) -> Image.Image:
    """The same picture in mode RGB."""
    if image.mode.startswith("I;16"):
        return _flatten_16(image)
    if image.mode in ("I", "F"):
        return Image.fromarray(_stretch(np.asarray(image))).convert("RGB")
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        layer = _to_rgba(image)
        return Image.alpha_composite(Image.new("RGBA", layer.size, _WHITE), layer).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_rgba(image: Image.Image) -> Image.Image:
    # Pillow has no direct way for the two rare ones.
    if image.mode == "La":
        image = image.convert("LA")
    return image if image.mode == "RGBA" else image.convert("RGBA")


def _flatten_16(image: Image.Image) -> Image.Image:
    samples = np.asarray(image).astype(np.uint16)
    grey = (samples >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[samples == transparent] = 255
    return Image.fromarray(grey).convert("RGB")


def _stretch(samples: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    values = samples.astype(np.float64)
    low, high = values.min(), values.max()
    if not np.isfinite(high - low):
        raise ValueError("its samples are not finite numbers")
    if low == high:
        return np.clip(values, 0, 255).astype(np.uint8)
    stretched: npt.NDArray[np.float64] = np.round((values - low) * (255 / (high - low)))
    return stretched.astype(np.uint8)
