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
    """What the tower reads for one item, with the layout that says what comes out."""

    layout: ItemLayout
    patches: npt.NDArray[np.float32]
    """Shape [encoder tokens, channels * temporal patch * patch * patch], in the family's patch order."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedInput:
    """The rows of one item, which another engine's tower has computed."""

    layout: ItemLayout
    rows: npt.NDArray[np.uint8]
    """Shape [rows, row bytes]: bytes of numbers in the decoder's dtype, all deepstack levels of a row together."""


ItemInput = EncoderInput | EncodedInput
