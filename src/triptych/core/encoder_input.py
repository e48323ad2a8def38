"""One item as an engine gets it: to be encoded, or encoded elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from triptych.core.layout import ItemLayout


@dataclass(frozen=True, slots=True, eq=False)
class EncoderInput:
    """What the tower reads for one item, with the layout that says what comes out.

    Samples stay the bytes that they are in a picture until the tower reads them: as numbers, and with a still
    repeated for each frame, they would take eight times the memory while they wait.
    """

    layout: ItemLayout
    patches: npt.NDArray[np.uint8]
    """Shape [encoder tokens, channels, frames, patch, patch], in the family's patch order.

    Frames are those of one patch in time; a still has one, which stands for all of them.
    """
    tones: npt.NDArray[np.float32]
    """Shape [channels, 256]: the number that each sample value becomes. Read-only; items share it."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedInput:
    """The rows of one item, which another engine's tower has computed."""

    layout: ItemLayout
    rows: npt.NDArray[np.uint8]
    """Shape [rows, row bytes]: bytes of numbers in the decoder's dtype, all deepstack levels of a row together."""


ItemInput = EncoderInput | EncodedInput
