"""How one output ends."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FinishReason(enum.Enum):
    """Why an answer ended well. Failure is never a finish reason."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class StopToken:
    """A stop id of the caller was produced."""

    token_id: int


@dataclass(frozen=True, slots=True)
class EosToken:
    """An end-of-sequence id of the model was produced."""

    token_id: int


@dataclass(frozen=True, slots=True)
class StopText:
    """A stop string of the caller was produced."""

    text: str


StopMatch = StopToken | EosToken | StopText
