"""The PromptPlan: the expanded prompt, computed once by whoever saw the media."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.core.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from triptych.core.layout import ItemLayout


class PositionRule(enum.Enum):
    """How rotary positions follow from grids and runs; ``processors/positions.py`` computes them."""

    LINEAR = "linear"
    """One axis: 0, 1, 2, ..."""
    MROPE = "mrope"
    """Three axes; an item's rows spread over its merged grid."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """Expanded token ids with the layout of every item. Every later stage reads it, none recomputes it."""

    token_ids: npt.NDArray[np.int32]
    """Shape [prompt length], read-only. Positions of rows hold the family's placeholder id."""
    items: tuple[ItemLayout, ...]
    """In prompt order, not overlapping."""
    rule: PositionRule
    spatial_merge: int
    """Patches along one side of a merged cell; 1 where nothing is merged."""
    fingerprint: bytes
    """Digest of the model revision and the processor settings that produced the plan."""

    def __post_init__(self) -> None:
        """Refuse layouts outside the prompt or out of order.

        Raises:
            InvalidRequest: naming the item.
        """
        if len(self.token_ids) == 0:
            raise InvalidRequest("the prompt is empty")
        end = 0
        for index, item in enumerate(self.items):
            if item.start < end or item.end > len(self.token_ids):
                raise InvalidRequest(
                    f"media item {index} occupies {item.start}..{item.end} of a prompt of {len(self.token_ids)} tokens"
                )
            end = item.end

    def __len__(self) -> int:
        """Prompt length in tokens, expansion included."""
        return len(self.token_ids)
