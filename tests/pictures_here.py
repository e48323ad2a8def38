"""Pictures decoded all at once, in this process: for files that are trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.media_options import PictureOptions
from triptych.media.decode import admit_picture, decode_here

if TYPE_CHECKING:
    from triptych.core.media import Picture
    from triptych.core.picture_fit import PictureFit
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
