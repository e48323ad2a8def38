"""Any picture to upright, opaque, 8-bit RGB. The one path for every source of pictures.

    load -> grey of more than 8 bits to 8 -> transparency onto the background -> RGB -> upright

- Orientation as EXIF, XMP or AVIF's own boxes say, all eight; broken metadata count as none.
- Transparency (an alpha channel, a transparent colour or palette entry, what a GIF's first frame leaves uncovered)
  shows the background, blended and rounded to the nearest.
- 16-bit samples keep their high byte; a transparent value of 16 bits is compared in full where samples are grey, and
  by its high bytes where they are colour, of which the decoder keeps no more.
- 12-bit samples keep their high 8 bits.
- 16-bit signed, 32-bit integer and float samples have no fixed range: their darkest becomes 0, their brightest 255.
- A TIFF that says that 0 is white is inverted, also where Pillow leaves that to its caller.
- Colour profiles are ignored. What models learned from went through converters that ignore them too, a profile is one
  more program by a stranger, and the colours of sRGB, which nearly all pictures have, are the same either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT, TiffImageFile

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
_SMALL_GREY = {"L;2": 255 // 3, "L;4": 255 // 15}
"""What a PNG's samples of 2 and 4 bits are multiplied by when they are decoded, but not its transparent value."""
_STRETCH = 1 << 18
"""Samples that are stretched at a time: enough to be fast, few enough to need no memory to speak of."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """How an image is stored; Pillow forgets it, or leaves it to its caller, when it loads."""

    layout: str = ""
    """Pillow's name for the stored samples."""
    part: tuple[int, int, int, int] | None = None
    """What of the picture they cover, where not all of it."""
    bits: int = 16
    """Per sample, where there are more than 8."""
    unsigned: bool = False
    white_is_zero: bool = False

    @classmethod
    def of(cls, image: Image.Image) -> _Stored:
        """Look before it is loaded."""
        layout, part = "", None
        for tile in getattr(image, "tile", ())[:1]:
            layout = tile.args if isinstance(tile.args, str) else ""
            if image.format == "GIF" and tile.extents != (0, 0, *image.size):
                part = tile.extents
        if not isinstance(image, TiffImageFile):
            return cls(layout, part)
        tags = image.tag_v2
        return cls(
            layout,
            part,
            bits=max(tags.get(BITSPERSAMPLE, (1,))),
            unsigned=max(tags.get(SAMPLEFORMAT, (1,))) == 1,
            white_is_zero=tags.get(PHOTOMETRIC_INTERPRETATION, 0) == 0,
        )


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """The same picture in mode RGB; loads ``image``, of an animation its first frame.

    Raises:
        ValueError: samples are not finite, or Pillow knows no way from the colour model to RGB.
        Exception: whatever the decoder raises over damaged data.
    """
    stored = _Stored.of(image)
    image.load()
    orientation = _orientation(image)
    flat = _flatten(image, stored, background)
    if stored.part is not None:
        covered = flat.crop(stored.part)
        flat.paste(background, (0, 0, *flat.size))
        flat.paste(covered, stored.part)
    method = _UPRIGHT.get(orientation)
    return flat if method is None else flat.transpose(method)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(EXIF_ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:
        # Metadata by others, parsed by others: a picture with a broken EXIF block is still a good picture.
        return 1
    return value if isinstance(value, int) else 1


def _flatten(image: Image.Image, stored: _Stored, background: tuple[int, int, int]) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _flatten_16(image, stored, background)
    if image.mode in ("I", "F"):
        return _stretch(image, stored).convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode == "La":  # from which Pillow knows one way only
        image = image.convert("LA")
    transparent = image.info.get("transparency")
    if stored.layout in _SMALL_GREY and isinstance(transparent, int):
        image.info["transparency"] = transparent * _SMALL_GREY[stored.layout]
    elif stored.layout == "RGB;16B" and isinstance(transparent, tuple):
        image.info["transparency"] = tuple(part >> 8 for part in transparent)
    layer = image if image.mode == "RGBA" else image.convert("RGBA")
    flat = Image.new("RGB", layer.size, background)
    flat.paste(layer, mask=layer)
    return flat


def _flatten_16(image: Image.Image, stored: _Stored, background: tuple[int, int, int]) -> Image.Image:
    samples = np.asarray(image)
    grey = (samples >> (stored.bits - 8)).astype(np.uint8)
    if stored.white_is_zero:
        grey = ~grey
    flat = Image.fromarray(grey).convert("RGB")
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        flat.paste(background, mask=Image.fromarray((samples == transparent).astype(np.uint8) * 255))
    return flat


def _stretch(image: Image.Image, stored: _Stored) -> Image.Image:
    """Mode I or F to L, from the darkest sample to the brightest."""
    samples = np.asarray(image)
    if stored.unsigned and image.mode == "I":
        samples = samples.view(np.uint32)
    low, high = float(samples.min()), float(samples.max())
    if not np.isfinite(high - low):
        raise ValueError("its samples are not finite numbers")
    grey = np.empty(samples.shape, np.uint8)
    flat, out = samples.reshape(-1), grey.reshape(-1)
    for start in range(0, flat.size, _STRETCH):
        part = flat[start : start + _STRETCH].astype(np.float64)
        level = np.clip(part, 0, 255) if low == high else _spread(part, low, high)
        out[start : start + _STRETCH] = 255 - level if stored.white_is_zero else level
    return Image.fromarray(grey)


def _spread(values: npt.NDArray[np.float64], low: float, high: float) -> npt.NDArray[np.float64]:
    spread: npt.NDArray[np.float64] = np.round((values - low) * (255 / (high - low)))
    return spread
