"""What comes out of an engine: engine -> roles -> wire."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.core.errors import TriptychError


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


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    """Expanded prompt length."""
    completion_tokens: int
    cached_prompt_tokens: int
    """Prompt tokens whose KV was reused; a subset of ``prompt_tokens``."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stage of one request's life."""

    name: str
    start: float
    """Seconds; monotonic inside an engine, Unix time once it leaves the process."""
    end: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one request; a delta, never cumulative."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str = ""
    """What the delta adds to the visible answer; empty inside the engine, which knows no text."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete. Terminal."""

    request_id: str
    reason: FinishReason
    usage: Usage
    stop: StopMatch | None = None
    """Set when the reason is STOP."""
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """The request failed after it was accepted. Terminal."""

    request_id: str
    error: TriptychError


Event = Tokens | Finished | Failed
