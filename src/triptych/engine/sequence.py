"""One live request as the scheduler sees it: progress, blocks, references, times.

There are no phases. ``computed`` tokens have their KV, ``known`` tokens exist (prompt and answer so far), and
a step computes some of the difference:

    0 ............ computed ............ known ............ limit
    [ KV is there ][ to be computed     ][ not yet sampled ]

A request that decodes is one whose prompt is computed and whose difference is 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.events import EosToken, FinishReason, Span, StopMatch, StopToken, Usage
from triptych.engine.prefix import BlockChain

if TYPE_CHECKING:
    from triptych.core.request import Request


class Sequence:
    """Mutable record of one request; every field belongs to the scheduler."""

    __slots__ = (
        "aborted",
        "arrival",
        "blocks",
        "cached_prompt_tokens",
        "chain",
        "computed",
        "encode_seconds",
        "encode_started",
        "first_scheduled",
        "first_token",
        "held",
        "in_flight",
        "known",
        "limit",
        "next_item",
        "output",
        "prompt_len",
        "registered",
        "request",
        "request_id",
        "running",
        "sent",
        "started",
    )

    def __init__(self, request: Request, context: int, block_size: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.prompt_len = len(request.plan)
        self.limit = context
        """Tokens at which the answer ends: the context window, the pool and max_tokens together."""
        if request.stopping.max_tokens is not None:
            self.limit = min(context, self.prompt_len + request.stopping.max_tokens)
        self.output: list[int] = []
        self.known = self.prompt_len
        self.computed = 0
        self.blocks: list[int] = []
        self.sent = 0
        """Leading blocks of the table that the runner knows."""
        self.registered = 0
        """Leading blocks of the table that were offered to the prefix cache, or came from it."""
        self.chain = BlockChain(request.plan, request.cache.salt, block_size)
        self.held: set[int] = set()
        """Items whose rows this request holds a reference on."""
        self.next_item = 0
        """First item that is not wholly computed."""
        self.running = False
        self.in_flight = False
        self.aborted = False
        self.started = False
        """Whether the runner has state for it."""
        self.cached_prompt_tokens = 0
        self.arrival = request.arrival
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.encode_started: float | None = None
        self.encode_seconds = 0.0

    @property
    def decoding(self) -> bool:
        """Whether the next step computes only the latest token of the answer."""
        return self.computed >= self.prompt_len and self.known - self.computed == 1

    def reset(self) -> None:
        """Forget all progress but the known tokens; blocks and references must have been given back."""
        self.blocks = []
        self.computed = self.sent = self.registered = self.next_item = 0
        self.held.clear()
        self.running = False

    def append(self, token: int) -> FinishReason | None:
        """Add a sampled token; returns why the answer ends with it, or None."""
        self.output.append(token)
        self.known += 1
        if self.stop_match(token) is not None:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.known >= self.limit else None

    def stop_match(self, token: int) -> StopMatch | None:
        """What the latest token ends the answer by; a caller's own stop id goes before the model's eos."""
        stopping = self.request.stopping
        if len(self.output) <= stopping.min_tokens:
            return None
        if token in stopping.stop_token_ids:
            return StopToken(token)
        if token in self.request.eos_token_ids and not stopping.ignore_eos:
            return EosToken(token)
        return None

    def shows(self, stop: StopMatch | None) -> bool:
        """Whether the latest token is part of the visible answer. An eos never is."""
        if stop is None:
            return True
        return isinstance(stop, StopToken) and self.request.stopping.include_stop_in_output

    def usage(self) -> Usage:
        """Token counts now. A stop id or eos counts as generated, shown or not: it was computed."""
        return Usage(self.prompt_len, len(self.output), self.cached_prompt_tokens)

    def spans(self, now: float) -> tuple[Span, ...]:
        """The stages so far, in monotonic seconds; a stage that never began is left out."""
        if self.first_scheduled is None:
            return (Span("queue", self.arrival, now),)
        spans = [Span("queue", self.arrival, self.first_scheduled)]
        if self.encode_started is not None:
            spans.append(Span("encode", self.encode_started, self.encode_started + self.encode_seconds))
        if self.first_token is None:
            spans.append(Span("prefill", self.first_scheduled, now))
        else:
            spans.append(Span("prefill", self.first_scheduled, self.first_token))
            spans.append(Span("decode", self.first_token, now))
        return tuple(spans)
