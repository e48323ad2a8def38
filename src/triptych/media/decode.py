"""Encoded bytes to a picture. Only seven raster formats, header before pixels, and every failure is a MediaError.

    admit    bytes -> format and size        ours; limits are asked here, and nothing of the picture is allocated
    decode   bytes -> upright RGB            Pillow's; wherever hostile bytes may do harm: workers.py
    explain  what it raised -> the reason    for the one who sent the bytes

The plugins are called by name instead of through ``Image.open``: formats that start interpreters (EPS, PDF, WMF) are
then out of reach, and our own limits decide before Pillow's process-wide ones are asked.
"""

from __future__ import annotations

import errno
import io
from typing import TYPE_CHECKING, NamedTuple

from PIL import AvifImagePlugin
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.Image import Image, Resampling
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from triptych.core.clip import FrameSize
from triptych.core.errors import MediaError, one_line
from triptych.core.media import Stage
from triptych.media.header import Format, Size, read_size, recognise
from triptych.media.limits import check_item_bytes
from triptych.media.normalise import to_rgb

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.ImageFile import ImageFile

    from triptych.core.media_options import PictureOptions
    from triptych.core.picture_fit import PictureFit
    from triptych.media.limits import RequestBudget

MAX_REASON = 200
"""Characters of a decoder's own message that are passed on."""
_OPEN: dict[Format, Callable[[io.BytesIO], ImageFile]] = {
    Format.PNG: PngImageFile,
    Format.JPEG: JpegImageFile,
    Format.WEBP: WebPImageFile,
    Format.GIF: GifImageFile,
    Format.BMP: BmpImageFile,
    Format.TIFF: TiffImageFile,
}
if AvifImagePlugin.SUPPORTED:
    _OPEN[Format.AVIF] = AvifImageFile
_NO_MEMORY = ("out of memory", "decoder error -9")
"""How decoders say it that do not raise MemoryError."""


class Admitted(NamedTuple):
    """A picture within all limits, of which nothing is decoded yet."""

    kind: Format
    size: Size
    """What its header claims; the decoder is held to it."""


def admit_picture(index: int, data: bytes, budget: RequestBudget) -> Admitted:
    """What kind of picture it is, and how large; counts it against the limits.

    Raises:
        MediaError: empty, not a supported picture, without a header, or over a limit; ``index`` names the item.
    """
    check_item_bytes(index, len(data), budget.limits)
    if not data:
        raise MediaError(index, "the item is empty", Stage.DECODE)
    kind = recognise(data)
    if kind not in _OPEN:
        names = ", ".join(one.value for one in _OPEN)
        raise MediaError(index, f"not a picture that can be read; supported: {names}", Stage.DECODE)
    try:
        size = read_size(kind, data)
    except ValueError as error:
        raise MediaError(index, explain(kind, error), Stage.DECODE) from error
    budget.take_picture(index, size.width, size.height)
    return Admitted(kind, size)


class DecodedPicture(NamedTuple):
    """A picture as it is wanted, and what it was made of."""

    image: Image
    source: FrameSize
    """Before it was resized, upright."""


def decode(
    index: int, data: bytes, admitted: Admitted, options: PictureOptions, fit: PictureFit | None = None
) -> DecodedPicture:
    """Decode, turn upright and flatten one picture, of an animation the first frame; then resize it, if that is wanted.

    Raises:
        MediaError: it is too narrow to be resized; ``index`` names the item.
        MemoryError: there is not enough.
        Exception: anything else means that the bytes are no good picture; ``explain`` says why.
    """
    with _OPEN[admitted.kind](io.BytesIO(data)) as image:
        if image.width * image.height > admitted.size.pixels:
            raise ValueError(
                f"its header says {admitted.size.width} x {admitted.size.height}, "
                f"but the picture is {image.width} x {image.height}"
            )
        upright = to_rgb(image, options.background)
    source = FrameSize(upright.height, upright.width)
    if fit is None:
        return DecodedPicture(upright, source)
    try:
        size = fit.size(source)
    except ValueError as error:
        raise MediaError(index, str(error), Stage.PREPROCESS) from error
    return DecodedPicture(upright.resize((size.width, size.height), resample=Resampling(fit.resample)), source)


def is_memory(error: Exception) -> bool:
    """Whether a decoder failed for want of memory."""
    if isinstance(error, MemoryError | ImportError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    words = one_line(error).lower()
    return any(phrase in words for phrase in _NO_MEMORY)


def explain(kind: Format, error: Exception) -> str:
    """The reason that a client is told, on one line."""
    reason = "".join(letter for letter in one_line(error)[:MAX_REASON] if letter.isprintable())
    return f"damaged or cut off {kind.value} picture: {reason}"
