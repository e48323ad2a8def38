"""Pictures made of pixels, in the size that a model looks at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from triptych.core.clip import FrameSize
from triptych.core.media import Picture
from triptych.core.media_options import PictureOptions

if TYPE_CHECKING:
    from triptych.core.encoder_input import EncoderInput
    from triptych.processors.contract import Processor


def fitted(processor: Processor, picture: Picture, options: PictureOptions | None = None) -> Picture:
    """Resized as it would be where it is decoded.

    Raises:
        ValueError: too narrow.
    """
    fit = processor.picture_fit(options or PictureOptions())
    size = fit.size(FrameSize(picture.height, picture.width))
    image = Image.fromarray(picture.pixels)
    return Picture(np.asarray(image.resize((size.width, size.height), Image.Resampling(fit.resample))))


def encoder_input(
    processor: Processor, index: int, picture: Picture, key: bytes, options: PictureOptions | None = None
) -> EncoderInput:
    """Resized and patched."""
    return processor.encoder_input(index, fitted(processor, picture, options), key)
