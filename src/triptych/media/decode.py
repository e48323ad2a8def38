"""Encoded bytes to a picture. Only six raster formats, header before pixels, and every failure is a MediaError.

The plugins are called by name instead of through ``Image.open``: formats that start interpreters (EPS, PDF, WMF)
are then out of reach, and our own limits decide before Pillow's process-wide ones are asked.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from triptych.core.errors import MediaError, MediaUnavailable
from triptych.core.media import Picture
from triptych.media.limits import check_item_bytes
from triptych.media.normalise import to_rgb

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt
    from PIL.ImageFile import ImageFile

    from triptych.media.limits import RequestBudget


@dataclass(frozen=True, slots=True)
class _Format:
    """How one format is recognised and opened."""

    name: str
    magics: tuple[bytes, ...]
    open: Callable[[io.BytesIO], ImageFile]
    form: bytes = b""
    """What stands at byte 8 of a RIFF file; sound and video begin with the same magic."""

    def matches(self, data: bytes) -> bool:
        """Whether the data begin as this format does."""
        return data.startswith(self.magics) and data[8 : 8 + len(self.form)] == self.form


_FORMATS = (
    _Format("PNG", (b"\x89PNG\r\n\x1a\n",), PngImageFile),
    _Format("JPEG", (b"\xff\xd8\xff",), JpegImageFile),
    _Format("WebP", (b"RIFF",), WebPImageFile, form=b"WEBP"),
    _Format("GIF", (b"GIF87a", b"GIF89a"), GifImageFile),
    _Format("BMP", (b"BM",), BmpImageFile),
    _Format("TIFF", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), TiffImageFile),
)


class _Size(NamedTuple):
    width: int
    height: int


def decode_picture(index: int, data: bytes, budget: RequestBudget) -> Picture:
    """Decode, turn upright and flatten one picture; of an animation the first frame.

    Raises:
        MediaError: empty, not a supported picture, damaged, cut off, or over a limit; ``index`` names the item.
    """
    check_item_bytes(index, len(data), budget.limits)
    if not data:
        raise MediaError(index, "the item is empty")
    kind = next((f for f in _FORMATS if f.matches(data)), None)
    if kind is None:
        names = ", ".join(f.name for f in _FORMATS)
        raise MediaError(index, f"not a picture that can be read; supported: {names}")
    try:
        return Picture(_decode(index, data, kind, budget))
    except MediaError:
        raise
    except MemoryError as error:
        raise MediaUnavailable(
            index, f"not enough memory for this {kind.name} picture; retry later, or lower --max-item-pixels"
        ) from error
    except Exception as error:
        # Hostile bytes reach a decoder written by others: whatever it raises means that they are no good picture.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise MediaError(index, f"damaged or cut off {kind.name} picture: {reason[0][:200]}") from error


def _decode(index: int, data: bytes, kind: _Format, budget: RequestBudget) -> npt.NDArray[np.uint8]:
    # Pillow's WebP reader makes its canvas while it opens the file, so this one header is read by us.
    declared = _webp_size(data) if kind.open is WebPImageFile else None
    if declared is not None:
        budget.take_picture(index, *declared)
    with kind.open(io.BytesIO(data)) as image:
        if declared is None:
            budget.take_picture(index, image.width, image.height)
        elif image.size != declared:
            raise MediaError(index, f"the WebP header says {tuple(declared)}, its frame {image.size}")
        image.load()
        return to_rgb(image)


def _webp_size(data: bytes) -> _Size:
    """Canvas of a WebP file: 24-bit fields when extended, 14-bit fields in its two plain forms."""
    chunk, body = data[12:16], data[20:30]
    if len(body) == 10:
        if chunk == b"VP8X":
            return _Size(int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1)
        if chunk == b"VP8L" and body[0] == 0x2F:
            bits = int.from_bytes(body[1:5], "little")
            return _Size((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
        if chunk == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
            return _Size(int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF)
    raise ValueError("no WebP header")
