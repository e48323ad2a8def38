"""One item as the tower reads it."""

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
