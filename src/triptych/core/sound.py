"""A sound as it is decoded, and the windows in which a model hears it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Window(NamedTuple):
    """A stretch of a sound, in samples."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """One past the last sample."""
        return self.start + self.length


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """A decoded sound, one channel, at the model's rate."""

    samples: npt.NDArray[np.float32]
    """Shape [samples]; full scale is -1 to 1."""
    rate: int
    """Samples a second."""
    windows: tuple[Window, ...]
    """What a model hears at a time: they cover every sample once, in order; the last one may be shorter."""

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return len(self.samples) / self.rate
