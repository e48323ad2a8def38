"""One engine step as data: what the scheduler decides, and what the runner reports.

The runner keeps a request's tokens, block table, positions and sampling options from ``starts``
until ``ends``; a plan names the request and says only what is new.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triptych.core.errors import TriptychError
    from triptych.core.handles import KvHandle
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


class Copy(NamedTuple):
    """One KV block's content, once more in the same pool."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch another engine's KV. How it ended is heard later, by ``number``."""

    number: int
    """No other load of this engine has it."""
    handle: KvHandle
    moves: tuple[tuple[int, int], ...]
    """(index into the handle's blocks, block of this pool), each at most once. Perhaps none: the session is then taken,
    and nothing is moved."""


@dataclass(frozen=True, slots=True)
class Store:
    """Name the next blocks of one prompt, or those of one item's rows, to another engine.

    It is not done if the request fails in this step.
    """

    request_id: str
    session_id: str
    blocks: tuple[int, ...]
    """In order, at least one; with ``seals`` the last one may be partly filled."""
    opens: bool
    """Whether it is the session's first."""
    seals: bool
    """Whether it is the session's last."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that happens in one step, in the order of the fields."""

    ends: tuple[str, ...] = ()
    """Requests whose state the runner drops."""
    evictions: tuple[bytes, ...] = ()
    """Encoder-cache keys whose rows the runner drops."""
    copies: tuple[Copy, ...] = ()
    scrubs: tuple[int, ...] = ()
    """Blocks that may hold anything: their numbers are made finite."""
    withdrawals: tuple[str, ...] = ()
    """Sessions that nobody shall take any more; the transport may not know them."""
    cancels: tuple[int, ...] = ()
    """Loads that nobody wants any more; they end all the same."""
    loads: tuple[Load, ...] = ()
    """They are begun, and go on by themselves."""
    starts: tuple[Request, ...] = ()
    """Requests that the runner has not seen before."""
    encode: tuple[EncodeTask, ...] = ()
    tokens: tuple[TokenSlice, ...] = ()
    stores: tuple[Store, ...] = ()


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
    stored: Mapping[str, KvHandle | None] = field(default_factory=dict)
    """Session id to its handle, or None while it is not sealed, for every store that was done."""
