"""What a prefill engine hands to the decode engine that continues its work.

KvSession        on both engines      everything, read and checked
SealedSession    between them         opaque: whoever carries it has no use for what is inside
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.core.finish import FinishReason, StopMatch
    from triptych.core.handles import KvHandle
    from triptych.core.logprobs import TokenLogprob
    from triptych.core.plan import PromptPlan


@dataclass(frozen=True, slots=True, eq=False)
class FirstToken:
    """The first token of one output: sampled once, by whoever computed the prompt."""

    token_id: int
    logprob: TokenLogprob | None = None
    """Where the request asked for the output's."""
    finish: FinishReason | None = None
    """Set when the output ends with this token."""
    stop: StopMatch | None = None


@dataclass(frozen=True, slots=True, eq=False)
class KvSession:
    """One prompt's KV, and everything needed to go on from it."""

    handle: KvHandle
    plan: PromptPlan | None
    """None: the session came without a portable plan, or with one of a version that is not known here."""
    prompt: bytes
    """32 bytes that name the expanded prompt: who expands it again must come to the same."""
    first: tuple[FirstToken, ...]
    """One for each output of the request."""
    seed: int
    """The request's own, or the one that was drawn for it; outputs derive theirs."""
    cached_prompt_tokens: int
    """What the prefill engine reused."""
    model: bytes
    """32 bytes: weights, tokenizer, processor settings. Both engines must have the same."""
    adapter: bytes
    """The adapter's digest; empty for the base model."""
    expires_unix_nanos: int


@dataclass(frozen=True, slots=True)
class SealedSession:
    """A session on its way, as bytes that are handed on unread and unchanged."""

    session_id: str
    data: bytes
    """A ``KvSessionRef`` as a message."""


Session = KvSession | SealedSession
