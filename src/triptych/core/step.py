"""One engine step as data: what the scheduler decides, and what the runner reports.

The runner keeps a request's tokens, block table, positions and sampling options from ``starts``
until ``ends``; a plan names the request and says only what is new.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triptych.core.errors import TriptychError
    from triptych.core.logprobs import TokenLogprob
    from triptych.core.request import Request


@dataclass(frozen=True, slots=True)
class EncodeTask:
    """Run the encoder on one item and keep its rows under ``key``."""

    request_id: str
    item: int
    """Index into the request's plan.items."""
    key: bytes


@dataclass(frozen=True, slots=True)
class TokenSlice:
    """Compute KV for positions ``[start, start + length)`` of one request."""

    request_id: str
    start: int
    length: int
    table_from: int
    """Index in the request's block table at which ``blocks`` begins; 0 after an admission or a preemption."""
    blocks: tuple[int, ...]
    """Block ids newly added to the table at ``table_from``; what stood behind is forgotten."""
    rows: tuple[tuple[int, bytes], ...]
    """(item index, encoder-cache key) of every item that overlaps the slice."""
    samples: bool
    """Whether the slice reaches the last known token, so that the next one is sampled."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that happens in one step. ``encode`` runs before ``tokens``."""

    starts: tuple[Request, ...] = ()
    """Requests that the runner has not seen before."""
    ends: tuple[str, ...] = ()
    """Requests whose state the runner drops, before anything else happens."""
    evictions: tuple[bytes, ...] = ()
    """Encoder-cache keys whose rows the runner drops, before it encodes."""
    encode: tuple[EncodeTask, ...] = ()
    tokens: tuple[TokenSlice, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced."""

    sampled: Mapping[str, int] = field(default_factory=dict)
    """Request id to its next token, for every slice with ``samples`` that did not fail."""
    encoded: tuple[bytes, ...] = ()
    """Keys whose rows are stored now."""
    logprobs: Mapping[str, TokenLogprob] = field(default_factory=dict)
    """Request id to its sampled token's, for every request that wants the output's."""
    prompt_logprobs: Mapping[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    """Request id to those of its slice [start, end), for every request that wants the prompt's: the tokens with index
    start + 1 .. end, as far as they are prompt tokens at or after ``prompt_start``, in order. A request of which a
    token was sampled has had them all: a prompt that is computed again, after a preemption, gives none."""
    failures: Mapping[str, TriptychError] = field(default_factory=dict)
    """Request id to the reason; nothing of a failed request was committed."""
    encode_seconds: float = 0.0
    token_seconds: float = 0.0
