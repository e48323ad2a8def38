"""One step of an encoder engine as data: what the scheduler decides, and what the runner reports.

Nothing is kept of an item between steps but its rows, under its content key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triptych.core.errors import TriptychError
    from triptych.core.handles import RowHandle
    from triptych.core.request import EncodeRequest
    from triptych.core.step import Store


class ItemStep(NamedTuple):
    """Hand one item's rows to other engines, perhaps once they are computed."""

    request: EncodeRequest
    encodes: bool
    """Whether it is this one that is encoded for its key. Else the rows are there, or another one of the step is."""
    store: Store
    """It opens its session and seals it. Its blocks have room for the rows, one after the other. It is not done if the
    item fails in this step."""


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """Everything that happens in one step, in the order of the fields."""

    evictions: tuple[bytes, ...] = ()
    """Content keys whose rows the runner drops."""
    withdrawals: tuple[str, ...] = ()
    """Sessions that nobody shall take any more; the transport may not know them."""
    items: tuple[ItemStep, ...] = ()
    """What encodes is encoded together, and then everything is stored."""


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """What a step produced."""

    encoded: tuple[bytes, ...] = ()
    """Content keys whose rows were computed, and are kept."""
    failures: Mapping[str, TriptychError] = field(default_factory=dict)
    """Request id to the reason, which does not name the item: which of the client's it is, is not known here. Nothing
    of a failed one was handed on."""
    stored: Mapping[str, RowHandle] = field(default_factory=dict)
    """Session id to its handle, for every store that was done."""
    encode_seconds: float = 0.0
