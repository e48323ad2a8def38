"""The answer of a request that other engines go on from: perhaps the prompt's log probabilities, then one event.

    running    the engine computes the request's parts: outputs of a prompt, or media items
    ready      what is handed over is there, and its lease runs; nobody has read of it
    ended      it was read, or the request has failed or was cancelled

Until it is read it can be taken back: who leaves or aborts before that leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from triptych.core.events import (
    Encoded,
    EncoderReady,
    EngineEvent,
    Event,
    Failed,
    Finished,
    FinishReason,
    Prefilled,
    PrefillReady,
    Prompt,
    RowsGone,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.core.errors import TriptychError

_NOTHING = Usage(0, 0, 0)

Part = Prefilled | Encoded | RowsGone
"""How a part of a request ends when nothing went wrong."""
Ready = PrefillReady | EncoderReady


class Handover(Protocol):
    """One request's way to another engine."""

    def hand_over(self, parts: tuple[Part, ...]) -> Ready | None:
        """What the request ends with, once all of its parts have ended, in their order; the leases begin.

        None: not all is there. Its parts are computed again, and end again.
        """
        ...

    def withdraw(self) -> None:
        """Nobody shall take anything of it, whether there is anything by now or not."""
        ...

    def reason(self, failed: Failed) -> TriptychError:
        """Why a part has failed, in words that tell which one it is."""
        ...


class HandoverAnswer:
    """Belongs to the event loop. ``push`` on one side, iteration on the other.

    Args:
        request_id: the client's.
        serials: the engine's names for the parts, in their order.
        handover: what becomes of them.
        outputs: how many ends there are when it is cancelled.
        token_text: see ``Answer.token_text``.
        abort: ends a request of the engine by its serial; one that is over, or was never begun, is no error.
        on_close: called when the caller leaves.
    """

    def __init__(
        self,
        request_id: str,
        serials: tuple[str, ...],
        handover: Handover,
        *,
        outputs: int,
        token_text: Callable[[int], str] | None,
        abort: Callable[[str], None],
        on_close: Callable[[HandoverAnswer], None],
    ) -> None:
        self.request_id = request_id
        self.serials = serials
        """The engine's names for the parts."""
        self.token_text = token_text
        self.ended = False
        """Whether its end is certain: what nobody has read of can still be taken back."""
        self._handover = handover
        self._outputs = outputs
        self._abort = abort
        self._on_close = on_close
        self._given_up = False
        self._parts: dict[str, Part | Finished] = {}
        """How they ended, by serial; those that have."""
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def wanted(self) -> bool:
        """Whether an answer can still reach somebody; from any thread."""
        return not self.ended

    def push(self, event: EngineEvent) -> None:
        """Take one event of the engine about one of the parts; after the end nothing more is taken."""
        if self.ended or event.request_id in self._parts:
            return
        match event:
            case Prompt():
                self._put(Prompt(self.request_id, event.token_ids, event.logprobs))
            case Prefilled() | Encoded() | RowsGone() | Finished():
                self._parts[event.request_id] = event
                if len(self._parts) == len(self.serials):
                    self._complete()
            case Failed():
                self.fail(self._handover.reason(event))

    def fail(self, error: TriptychError) -> None:
        """End the request by an error."""
        if not self.ended:
            self._end(Failed(self.request_id, error))

    def cancel(self) -> None:
        """End every output."""
        if not self.ended:
            last = self._outputs - 1
            self._end(
                *(
                    Finished(
                        self.request_id,
                        FinishReason.CANCELLED,
                        self._usage() if index == last else None,
                        output_index=index,
                    )
                    for index in range(self._outputs)
                )
            )

    def leave_engine(self) -> None:
        """Have the engine end what it still computes; the ends follow as events.

        Nothing will be handed over, and what nobody has read of is taken back.
        """
        self._given_up = True
        self._leave_engine()
        if len(self._parts) == len(self.serials):
            self.cancel()

    def close(self) -> None:
        """The caller has left; whoever still waits for an event waits in vain."""
        if not self.ended:
            self._end()

    def _complete(self) -> None:
        ends = [self._parts[serial] for serial in self.serials]
        parts = tuple(end for end in ends if not isinstance(end, Finished))
        if len(parts) < len(ends) or self._given_up:
            self.cancel()
            return
        ready = self._handover.hand_over(parts)
        if ready is None:
            self._parts.clear()
        else:
            self._put(ready)

    def _end(self, *events: Event) -> None:
        """Anything but a hand-over: one that is ready is taken back."""
        self.ended = True
        if self._events and isinstance(self._events[-1], Ready):
            self._events.pop()
        self._leave_engine()  # before the rest goes: the engine may still add to it
        self._handover.withdraw()
        self._events += events
        self._arrived.set()

    def _leave_engine(self) -> None:
        for serial in self.serials:
            if serial not in self._parts:
                self._abort(serial)

    def _usage(self) -> Usage:
        """Of all outputs: the prompt was computed once, by the first. Media that are encoded use no tokens."""
        usages = {
            serial: end.usage or _NOTHING
            for serial, end in self._parts.items()
            if isinstance(end, Prefilled | Finished)
        }
        leader = usages.get(self.serials[0], _NOTHING)
        completion = sum(usage.completion_tokens for usage in usages.values())
        return Usage(leader.prompt_tokens, completion, leader.cached_prompt_tokens)

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    def __aiter__(self) -> HandoverAnswer:
        """Itself."""
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event."""
        while not self._events:
            if self.ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Ready):
            self.ended = True
        return event

    async def aclose(self) -> None:
        """Take back what nobody has read of, and free the id. Never waits."""
        self._on_close(self)
