"""One live request as the scheduler sees it: progress, blocks, references, times.

There are no phases. ``computed`` tokens have their KV, ``known`` tokens exist (prompt and answer so far), and
a step computes some of the difference:

    0 ............ computed ............ known ............ limit
    [ KV is there ][ to be computed     ][ not yet sampled ]

A request that decodes is one whose prompt is computed and whose difference is 1.

The outputs of one client's request are a group of such records. The first leads: it computes the prompt. The others
follow, attached to it and holding nothing, until that is done; from then on each is a request like any other. Where
another engine has computed the prompt nobody leads: all belong to a resumption until its KV has come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triptych.core.events import EosToken, FinishReason, Prompt, Span, StopMatch, StopToken, Usage
from triptych.engine.prefix import BlockChain, chain_seed

if TYPE_CHECKING:
    from triptych.core.logprobs import TokenLogprob
    from triptych.core.request import Request
    from triptych.engine.leases import Lease
    from triptych.engine.priority import Key
    from triptych.engine.resumption import Resumption


class Ending(NamedTuple):
    """How an answer ends."""

    reason: FinishReason
    stop: StopMatch | None
    """Set when the reason is STOP."""


class Sequence:
    """Mutable record of one request; every field belongs to the scheduler."""

    __slots__ = (
        "aborted",
        "arrival",
        "blocks",
        "cached_prompt_tokens",
        "chain",
        "computed",
        "counted",
        "encode_seconds",
        "encode_started",
        "first_scheduled",
        "first_token",
        "fixed",
        "followers",
        "held",
        "in_flight",
        "key",
        "known",
        "leader",
        "lease",
        "limit",
        "next_item",
        "output",
        "prompt_len",
        "prompt_logprobs",
        "registered",
        "request",
        "request_id",
        "resumption",
        "running",
        "sent",
        "started",
        "unproven",
    )

    def __init__(
        self, request: Request, key: Key, context: int, block_size: int, leader: Sequence | None = None
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.key = key
        self.leader = leader
        """Whose prompt this request waits for; None when it is on its own."""
        self.followers: list[Sequence] = []
        """Who is attached to this request; nobody once its prompt is computed."""
        self.lease: Lease | None = None
        """Where its blocks are stored, if it computes the prompt for another engine."""
        self.resumption: Resumption | None = None
        """What it waits for, if another engine computed the prompt."""
        self.fixed = bool(request.plan.items) and not request.inputs
        """Whether its prompt cannot be computed here: another engine did."""
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
        self.unproven: tuple[int, ...] = ()
        """Blocks whose content came from another engine, until a step has found it to be finite numbers."""
        digest = request.adapter.digest if request.adapter else b""
        self.chain = BlockChain(request.plan, chain_seed(request.cache.salt, digest), block_size)
        self.held: set[int] = set()
        """Items whose rows this request holds a reference on."""
        self.next_item = 0
        """First item that is not wholly computed."""
        self.running = False
        self.in_flight = False
        self.aborted = False
        self.started = False
        """Whether the runner has state for it."""
        self.counted = False
        """Whether its prompt is in the statistics, as its own or as its leader's."""
        self.prompt_logprobs: list[TokenLogprob] | None = [] if request.logprobs.prompt and leader is None else None
        """Of the computed part of the prompt; None where nobody wants them, a follower's prompt being its leader's,
        and once they were handed out."""
        self.cached_prompt_tokens = 0
        self.arrival = request.arrival
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.encode_started: float | None = None
        self.encode_seconds = 0.0

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt is computed."""
        return self.computed >= self.prompt_len

    @property
    def decoding(self) -> bool:
        """Whether the next step computes only the latest token of the answer."""
        return self.computed >= self.prompt_len and self.known - self.computed == 1

    @property
    def reusable(self) -> int:
        """Leading tokens that need not be computed if their KV is found.

        The last known token is computed for the next one, and the token before the first prompt token that gets a
        log probability for that. If the next one is known already, nothing need be computed.
        """
        if self.resumption is not None:
            return self.known
        return self.known - 1 if self.prompt_logprobs is None else self.first_logprob - 1

    @property
    def replaceable(self) -> bool:
        """Whether it can give its blocks away now, and compute them again later."""
        stored = self.lease is not None and self.lease.open  # another engine may read them: they would not be free
        return not (stored or self.fixed)

    @property
    def first_logprob(self) -> int:
        """Index of the first prompt token that gets a log probability; the token at 0 has none."""
        return max(self.request.logprobs.prompt_start, 1)

    def take_prompt(self) -> Prompt:
        """The prompt with its log probabilities, all of which must be there. They are let go of."""
        logprobs = (*(None,) * self.first_logprob, *(self.prompt_logprobs or ()))
        self.prompt_logprobs = None
        return Prompt(self.request_id, tuple(self.request.plan.token_ids.tolist()), logprobs)

    def reset(self) -> None:
        """Forget all progress but the known tokens; blocks and references must have been given back."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.clear()
        self.blocks = []
        self.unproven = ()
        self.computed = self.sent = self.registered = self.next_item = 0
        self.held.clear()

    def append(self, token: int) -> Ending | None:
        """Add a token; returns how the answer ends with it, or None."""
        ending = self.ending(token)
        self.output.append(token)
        self.known += 1
        return ending

    def ending(self, token: int) -> Ending | None:
        """How the answer would end if this token came next; None if it would go on."""
        stop = self._stop_match(token)
        if stop is not None:
            return Ending(FinishReason.STOP, stop)
        return Ending(FinishReason.LENGTH, None) if self.known + 1 >= self.limit else None

    def _stop_match(self, token: int) -> StopMatch | None:
        """What the answer would end by; a caller's own stop id goes before the model's eos.

        A grammar allows an eos where the answer is complete and nothing else may follow, so that one always counts.
        """
        stopping = self.request.stopping
        early = len(self.output) < stopping.min_tokens
        if not early and token in stopping.stop_token_ids:
            return StopToken(token)
        if token in self.request.eos_token_ids and (
            self.request.grammar is not None or not (early or stopping.ignore_eos)
        ):
            return EosToken(token)
        return None

    def shows(self, stop: StopMatch) -> bool:
        """Whether the token that ends the answer is part of the visible one. An eos never is."""
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
        before = "prefill" if self.request.resume is None else "load"
        spans.append(Span(before, self.first_scheduled, now if self.first_token is None else self.first_token))
        if self.first_token is not None:
            spans.append(Span("decode", self.first_token, now))
        return tuple(spans)
