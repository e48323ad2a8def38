"""Pictures decoded all at once, in this process: for files that are trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from triptych.core.errors import MediaError
from triptych.core.media import Picture, Stage
from triptych.core.media_options import PictureOptions
from triptych.media.decode import admit_picture, decode, explain

if TYPE_CHECKING:
    from triptych.core.picture_fit import PictureFit
    from triptych.media.decode import Admitted
    from triptych.media.limits import RequestBudget

DEFAULT_OPTIONS = PictureOptions()


def decode_picture(
    index: int,
    data: bytes,
    budget: RequestBudget,
    options: PictureOptions = DEFAULT_OPTIONS,
    fit: PictureFit | None = None,
) -> Picture:
    """Admitted, then decoded.

    Raises:
        MediaError: empty, not a supported picture, damaged, cut off, or over a limit; ``index`` names the item.
    """
    return decode_here(index, data, admit_picture(index, data, budget), options, fit)


def decode_here(
    index: int, data: bytes, admitted: Admitted, options: PictureOptions, fit: PictureFit | None = None
) -> Picture:
    """The pixels of an admitted picture.

    Raises:
        MediaError: damaged, cut off, or too narrow; ``index`` names the item.
    """
    try:
        return Picture(np.asarray(decode(index, data, admitted, options, fit).image))
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(index, explain(admitted.kind, error), Stage.DECODE) from error
