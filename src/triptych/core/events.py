"""What comes out of an engine: engine -> roles -> wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.core.finish import EosToken as EosToken  # handed on, all of them: an event says how its output ended
from triptych.core.finish import FinishReason as FinishReason  # noqa: TC001
from triptych.core.finish import StopMatch as StopMatch  # noqa: TC001
from triptych.core.finish import StopText as StopText
from triptych.core.finish import StopToken as StopToken

if TYPE_CHECKING:
    from triptych.core.encoded import Reference
    from triptych.core.errors import TriptychError
    from triptych.core.handles import KvHandle, RowHandle
    from triptych.core.logprobs import TokenLogprob
    from triptych.core.session import FirstToken, Session


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


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The expanded prompt with its log probabilities, for a request that asked; once, before any of its tokens."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    """One for each token; None for the first, and before the start that was asked for."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one output; a delta, never cumulative."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str = ""
    """What the delta adds to the visible answer; empty inside the engine, which knows no text."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token where the request asked for them, else empty."""
    output_index: int = 0
    """Which of the request's outputs; 0 inside the engine, where each output is a request of its own."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One output is complete; with ``usage`` it was the last one and the event is terminal."""

    request_id: str
    reason: FinishReason
    usage: Usage | None
    """Of the whole request; None while another of its outputs goes on."""
    stop: StopMatch | None = None
    """Set when the reason is STOP."""
    spans: tuple[Span, ...] = ()
    output_index: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PrefillReady:
    """The prompt is computed, and another engine can go on from it. Terminal."""

    request_id: str
    session: Session
    usage: Usage
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class EncoderReady:
    """The media are encoded, and another engine can use them. Terminal."""

    request_id: str
    references: tuple[Reference, ...]
    """One for each item of the request, in its order."""
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """The request failed after it was accepted. Terminal."""

    request_id: str
    error: TriptychError


@dataclass(frozen=True, slots=True)
class Admitted:
    """Another engine's work is taken up: there is room for it. Before any token. Inside the engine only."""

    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """One output's first token, and the prompt's KV where others can take it. Terminal. Inside the engine only."""

    request_id: str
    first: FirstToken
    handle: KvHandle | None
    """With the output that computed the prompt; None with the others."""
    usage: Usage
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One item's rows, where others can take them. Terminal. Inside the engine only."""

    request_id: str
    handle: RowHandle
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class RowsGone:
    """Rows that were thought to be cached are not. Terminal. Inside the engine only.

    It is said of all items of a group at once, before anything of it is encoded or held: the group is to be submitted
    again as a whole, with the inputs of the items that came without. Were only those submitted again, two requests
    could wait for the memory that each other's finished items hold.
    """

    request_id: str


Event = Prompt | Tokens | PrefillReady | EncoderReady | Finished | Failed
"""What a caller hears."""
EngineEvent = Prompt | Admitted | Tokens | Prefilled | Encoded | RowsGone | Finished | Failed
"""What an engine says to its role."""


def is_terminal(event: Event) -> bool:
    """Whether nothing follows the event."""
    return isinstance(event, PrefillReady | EncoderReady | Failed) or (
        isinstance(event, Finished) and event.usage is not None
    )
