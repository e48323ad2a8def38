"""What becomes of requests: a token more, the end, and what is counted and said of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.errors import Internal
from triptych.core.events import Failed, Finished, FinishReason, Prefilled, Tokens
from triptych.core.session import FirstToken

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    from triptych.core.errors import TriptychError
    from triptych.core.events import EngineEvent
    from triptych.core.handles import KvHandle
    from triptych.core.logprobs import TokenLogprob
    from triptych.core.step import StepResult
    from triptych.engine.roster import Roster
    from triptych.engine.sequence import Sequence


class Outcomes:
    """Counts since the start, and the one place at which requests leave the roster."""

    __slots__ = ("_roster", "counts")

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.counts = dict.fromkeys(
            (
                *("steps", "accepted", "finished", "cancelled", "failed", "prompt_tokens", "cached_prompt_tokens"),
                *("computed_tokens", "generated_tokens", "encoded_items"),
                *("imported_items", "exported_sessions", "imported_sessions", "imported_blocks"),
            ),
            0,
        )
        """By the names of ``SchedulerStatistics``."""

    def prompt(self, members: Items[Sequence], cached: int) -> None:
        """The prompt of a group counts once, as its first finds it; that of one whose leader never ran as its own."""
        if not members[0].counted:
            self.counts["prompt_tokens"] += members[0].prompt_len
            self.counts["cached_prompt_tokens"] += cached
            for member in members:
                member.counted = True

    def sampled(
        self,
        sequence: Sequence,
        token: int,
        logprob: TokenLogprob | None,
        handle: KvHandle | None,
        now: float,
        events: list[EngineEvent],
    ) -> None:
        """A token was computed; ``handle`` is that of the session which was sealed with it."""
        self.counts["generated_tokens"] += 1
        if sequence.prompt_logprobs is not None:
            events.append(sequence.take_prompt())
        if sequence.request.export is None:
            self.token(sequence, token, logprob, now, events)
        else:
            events.append(self._hand_over(sequence, token, logprob, handle, now))

    def token(
        self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float, events: list[EngineEvent]
    ) -> None:
        """The answer has one more token, wherever it was computed, and may end with it."""
        if sequence.first_token is None:
            sequence.first_token = now
        ending = sequence.append(token)
        if ending is None or ending.stop is None or sequence.shows(ending.stop):
            logprobs = (logprob,) if logprob is not None and sequence.request.logprobs.output else ()
            events.append(Tokens(sequence.request_id, (token,), "", logprobs))
        if ending is not None:
            self._roster.retire(sequence)
            self.counts["finished"] += 1
            usage, spans = sequence.usage(), sequence.spans(now)
            events.append(Finished(sequence.request_id, ending.reason, usage, ending.stop, spans))

    def _hand_over(
        self, sequence: Sequence, token: int, logprob: TokenLogprob | None, handle: KvHandle | None, now: float
    ) -> Prefilled:
        """The answer goes on elsewhere, if it goes on."""
        spans = sequence.spans(now)
        ending = sequence.append(token)
        first = FirstToken(token, logprob, *(ending or (None, None)))
        if sequence.lease is not None:
            self._roster.leases.seal(sequence.lease)
            sequence.lease = None
            self.counts["exported_sessions"] += 1
        self._roster.retire(sequence)
        self.counts["finished"] += 1
        return Prefilled(sequence.request_id, first, handle, sequence.usage(), spans)

    def cancel(self, sequence: Sequence, now: float) -> Finished:
        """Its caller wants no more of it."""
        self._roster.retire(sequence)
        self.counts["cancelled"] += 1
        return Finished(sequence.request_id, FinishReason.CANCELLED, sequence.usage(), spans=sequence.spans(now))

    def fail(self, sequence: Sequence, error: TriptychError, *, suspect: bool = False) -> Failed:
        """It cannot go on; what a ``suspect`` one computed is not left for others to find."""
        self._roster.retire(sequence, suspect=suspect)
        return self.lost(sequence, error)

    def lost(self, sequence: Sequence, error: TriptychError) -> Failed:
        """It has left the roster already."""
        self.counts["failed"] += 1
        return Failed(sequence.request_id, error)


def left_out(sequence: Sequence, token: int | None, result: StepResult) -> TriptychError | None:
    """What a runner owes for a slice that sampled and did not fail, and did not return."""
    request_id = sequence.request_id
    if token is None:
        return Internal(f"the step returned no token for request {request_id!r}")
    if sequence.request.logprobs.output and request_id not in result.logprobs:
        return Internal(f"the step returned no log probability for request {request_id!r}")
    if sequence.prompt_logprobs is not None:  # the slice that samples for the first time ends the prompt
        got, due = len(sequence.prompt_logprobs), sequence.prompt_len - sequence.first_logprob
        if got != due:
            return Internal(f"{got} log probabilities came for {due} prompt tokens of request {request_id!r}")
    if sequence.lease is not None and result.stored.get(sequence.lease.session_id) is None:
        return Internal(f"the step returned no handle of the KV session of request {request_id!r}")
    return None
