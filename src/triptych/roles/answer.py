"""One live request's events on their way to its caller: those of its outputs become one stream with one end."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from triptych.core.errors import Cancelled
from triptych.core.events import (
    Admitted,
    EngineEvent,
    Event,
    Failed,
    Finished,
    FinishReason,
    Prompt,
    Span,
    Tokens,
    Usage,
)
from triptych.roles.timeline import in_unix_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.core.errors import TriptychError
    from triptych.core.logprobs import TokenLogprob
    from triptych.roles.output import Output

MAX_JOINED_ENTRIES = 100_000
"""Log probabilities, candidates included, up to which deltas that have piled up leave as one message."""


class AnswerStream:
    """Belongs to the event loop. ``push`` on one side, iteration on the other.

    Args:
        request_id: the client's.
        outputs: in the order of their numbers; the first is the one that prefills for all.
        token_text: see ``Answer.token_text``.
        abort: ends a request of the engine by its serial; one that is over, or was never begun, is no error.
        on_close: called when the caller leaves.
    """

    def __init__(
        self,
        request_id: str,
        outputs: tuple[Output, ...],
        *,
        token_text: Callable[[int], str] | None,
        abort: Callable[[str], None],
        on_close: Callable[[AnswerStream], None],
    ) -> None:
        self.request_id = request_id
        self.serials = tuple(output.serial for output in outputs)
        """The engine's names for the outputs."""
        self.token_text = token_text
        self.ended = False
        """Whether a terminal event was pushed."""
        self.closed = False
        """Whether the caller has left."""
        self.stages: tuple[Span, ...] = ()
        """What happened before the engine had the request, in monotonic seconds."""
        self._outputs = {output.serial: output for output in outputs}
        self._abort = abort
        self._on_close = on_close
        self._decided = asyncio.Event()
        """Whether it is known that the engine has taken the request up, or that it never will."""
        self._refusal: TriptychError | None = None
        """Why it never will."""
        self._events: deque[Prompt | Finished | Failed | _Pile] = deque()
        self._piles: dict[int, _Pile] = {}
        """By output: the pile among the events that its next delta may join."""
        self._arrived = asyncio.Event()

    def wanted(self) -> bool:
        """Whether an answer can still reach somebody; from any thread."""
        return not (self.ended or self.closed)

    def push(self, event: EngineEvent) -> None:
        """Take one event of the engine about one of the outputs; after the end nothing more is taken."""
        output = self._outputs[event.request_id]
        if self.ended or output.ended:
            return
        match event:
            case Admitted():
                self._decided.set()
            case Prompt():
                self._put(Prompt(self.request_id, event.token_ids, event.logprobs))
            case Tokens():
                delta = output.feed(event)
                if delta is not None:
                    self._pile(delta)
                    if output.stopped:
                        self._abort(output.serial)
            case Finished():
                self._finish(output, event)
            case Failed():
                output.ended = True
                self.fail(event.error)

    def fail(self, error: TriptychError) -> None:
        """End the whole request; outputs that go on in the engine are ended there."""
        if not self.ended:
            self._end(error)
            self._put(Failed(self.request_id, error))
            self.leave_engine()

    async def admission(self) -> None:
        """Wait until the engine has taken up what another one began, and says so.

        Raises:
            TriptychError: it never will; the answer is still to be closed.
        """
        await self._decided.wait()
        if self._refusal is not None:
            raise self._refusal

    def cancel(self) -> None:
        """End every output of a request that the engine has not yet."""
        for serial in self.serials:
            self.push(Finished(serial, FinishReason.CANCELLED, None))

    def leave_engine(self) -> None:
        """Have the engine end what it still computes; the ends follow as events."""
        for output in self._outputs.values():
            if not output.ended:
                self._abort(output.serial)

    def close(self) -> None:
        """The caller has left; whoever still waits for an event waits in vain."""
        self.closed = True
        self._arrived.set()

    def _finish(self, output: Output, event: Finished) -> None:
        tail, finished = output.finish(event)
        if tail is not None:
            self._pile(tail)
        if all(other.ended for other in self._outputs.values()):
            self._end(Cancelled("the request was ended before the engine had taken it up"))
            finished = replace(finished, usage=self._usage(), spans=self._spans())
        self._put(finished)

    def _end(self, refusal: TriptychError) -> None:
        self.ended = True
        if not self._decided.is_set():
            self._refusal = refusal
            self._decided.set()

    def _usage(self) -> Usage:
        """Of all outputs: the prompt was computed once, by the first."""
        leader = self._outputs[self.serials[0]].usage
        completion = sum(output.usage.completion_tokens for output in self._outputs.values())
        return replace(leader, completion_tokens=completion)

    def _spans(self) -> tuple[Span, ...]:
        """The stages of the first output, the last of them up to the end of all, in Unix seconds."""
        spans = list(self._outputs[self.serials[0]].spans)
        if spans:
            end = max(span.end for output in self._outputs.values() for span in output.spans)
            spans[-1] = replace(spans[-1], end=end)
        return in_unix_seconds([*self.stages, *spans])

    def _pile(self, delta: Tokens) -> None:
        """Queue a delta, together with one of the same output that was not read yet."""
        pile = self._piles.get(delta.output_index)
        if pile is None or not pile.add(delta):
            self._piles[delta.output_index] = pile = _Pile(delta)
            self._put(pile)

    def _put(self, event: Prompt | Finished | Failed | _Pile) -> None:
        self._events.append(event)
        self._arrived.set()

    def __aiter__(self) -> AnswerStream:
        """Itself."""
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event; an output's deltas that have piled up come as one."""
        while not self._events:
            if not self.wanted():
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if not isinstance(event, _Pile):
            return event
        if self._piles.get(event.output_index) is event:
            del self._piles[event.output_index]
        return event.joined()

    async def aclose(self) -> None:
        """Abort if need be and free the id. Never waits, so it cannot be cancelled half-way."""
        self._on_close(self)


class _Pile:
    """Deltas of one output that wait for the reader."""

    __slots__ = ("_deltas", "_entries", "output_index")

    def __init__(self, first: Tokens) -> None:
        self.output_index = first.output_index
        self._deltas = [first]
        self._entries = _entries(first.logprobs)

    def add(self, delta: Tokens) -> bool:
        """Join one more delta; False when the message would become too large."""
        entries = self._entries + _entries(delta.logprobs)
        if entries > MAX_JOINED_ENTRIES:
            return False
        self._entries = entries
        self._deltas.append(delta)
        return True

    def joined(self) -> Tokens:
        """All of them as one."""
        if len(self._deltas) == 1:
            return self._deltas[0]
        return replace(
            self._deltas[0],
            token_ids=tuple(token_id for delta in self._deltas for token_id in delta.token_ids),
            text="".join(delta.text for delta in self._deltas),
            logprobs=tuple(logprob for delta in self._deltas for logprob in delta.logprobs),
        )


def _entries(logprobs: tuple[TokenLogprob, ...]) -> int:
    return sum(1 if one.candidates is None else 1 + len(one.candidates.token_ids) for one in logprobs)
