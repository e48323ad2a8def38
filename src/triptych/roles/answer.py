"""One live request's events on their way to its caller: tokens become text, stop strings are found."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.events import Event, Failed, Finished, FinishReason, Span, StopText, Tokens
from triptych.text.detokenize import Detokenizer
from triptych.text.stop import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.core.request import GenerateRequest, Stopping
    from triptych.media.admission import Ticket
    from triptych.text.tokenizer import Tokenizer


class AnswerStream:
    """Belongs to the event loop. ``push`` on one side, iteration on the other."""

    def __init__(
        self,
        serial: str,
        request: GenerateRequest,
        tokenizer: Tokenizer,
        *,
        on_stop: Callable[[AnswerStream], None],
        on_close: Callable[[AnswerStream], None],
    ) -> None:
        self.serial = serial
        """The engine's name for the request."""
        self.request_id = request.request_id
        self.ended = False
        """Whether a terminal event was pushed."""
        self.closed = False
        """Whether the caller has left."""
        self.ticket: Ticket | None = None
        """The place in line for media preparation."""
        self.prepared: Span | None = None
        """The time before the engine had the request, in monotonic seconds."""
        self._on_stop = on_stop
        self._on_close = on_close
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._text = VisibleText(tokenizer, request.stopping) if request.detokenize else None
        self._stop: StopText | None = None

    def wanted(self) -> bool:
        """Whether an answer can still reach somebody; from any thread."""
        return not (self.ended or self.closed)

    def push(self, event: Event) -> None:
        """Take one event of the engine; after a terminal one nothing more is taken."""
        if self.ended:
            return
        match event:
            case Tokens():
                self._push_tokens(event)
            case Finished():
                self.ended = True
                self._push_finish(event)
            case Failed():
                self.ended = True
                self._put(Failed(self.request_id, event.error))

    def _push_tokens(self, event: Tokens) -> None:
        if self._stop is not None:
            return  # computed between the match and the abort
        if self._text is None:
            self._put(Tokens(self.request_id, event.token_ids))
            return
        delta = self._text.feed(event.token_ids)
        self._put(Tokens(self.request_id, delta.token_ids, delta.text))
        if delta.stop is not None:
            self._stop = delta.stop
            self._on_stop(self)

    def _push_finish(self, event: Finished) -> None:
        spans = event.spans if self.prepared is None else (self.prepared, *event.spans)
        finish = replace(event, request_id=self.request_id, spans=tuple(map(_to_unix, spans)))
        if self._text is not None:
            if self._stop is None:
                tail = self._text.finish()
                self._stop = tail.stop
                if tail.text:
                    self._put(Tokens(self.request_id, (), tail.text))
            else:
                finish = replace(finish, usage=replace(event.usage, completion_tokens=self._text.tokens))
            if self._stop is not None:
                finish = replace(finish, reason=FinishReason.STOP, stop=self._stop)
        self._put(finish)

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    def __aiter__(self) -> AnswerStream:
        """Itself."""
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event; deltas that have piled up come as one."""
        while not self._events:
            if self.ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Tokens):
            deltas = [event]
            while self._events and isinstance(self._events[0], Tokens):
                deltas.append(self._events.popleft())  # type: ignore[arg-type]
            if len(deltas) > 1:
                ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
                event = Tokens(event.request_id, ids, "".join(delta.text for delta in deltas))
        return event

    async def aclose(self) -> None:
        """Abort if need be and free the id. Never waits, so it cannot be cancelled half-way."""
        self._on_close(self)


class Delta(NamedTuple):
    """What a few new tokens add to the visible answer."""

    token_ids: tuple[int, ...]
    text: str
    stop: StopText | None


class VisibleText:
    """Detokenising and stop strings of one answer."""

    def __init__(self, tokenizer: Tokenizer, stopping: Stopping) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stopping.stop_strings, include_stop=stopping.include_stop_in_output)
        self._min_tokens = stopping.min_tokens
        self.tokens = 0
        """Tokens fed so far, up to and with the one that completed a stop string."""

    def feed(self, token_ids: tuple[int, ...]) -> Delta:
        """Turn new tokens into text that may be shown; tokens behind a completed stop string are dropped."""
        shown: list[str] = []
        for index, token_id in enumerate(token_ids):
            self.tokens += 1
            step = self._matcher.feed(self._detokenizer.feed(token_id), armed=self.tokens >= self._min_tokens)
            shown.append(step.text)
            if step.stop is not None:
                return Delta(token_ids[: index + 1], "".join(shown), StopText(step.stop))
        return Delta(token_ids, "".join(shown), None)

    def finish(self) -> Delta:
        """What was held back, once nothing more can come; its last bytes may still complete a stop string."""
        step = self._matcher.finish(self._detokenizer.finish(), armed=self.tokens >= self._min_tokens)
        return Delta((), step.text, None if step.stop is None else StopText(step.stop))


_UNIX_MINUS_MONOTONIC = time.time() - time.monotonic()


def _to_unix(span: Span) -> Span:
    return Span(span.name, span.start + _UNIX_MINUS_MONOTONIC, span.end + _UNIX_MINUS_MONOTONIC)
