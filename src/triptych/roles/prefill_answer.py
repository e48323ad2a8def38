"""The answer of a request that ends with its prompt: perhaps the prompt's log probabilities, then one ``PrefillReady``.

    running    the engine computes
    ready      the session is there, and its lease runs; nobody has read of it
    ended      it was read, or the request has failed or was cancelled

Until it is read a session can be taken back: who leaves or aborts before that leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from triptych.core.events import (
    EngineEvent,
    Event,
    Failed,
    Finished,
    FinishReason,
    Prefilled,
    PrefillReady,
    Prompt,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.core.errors import TriptychError

_NOTHING = Usage(0, 0, 0)


class Handoff(Protocol):
    """One prompt's way to another engine."""

    def hand_over(self, outputs: tuple[Prefilled, ...]) -> PrefillReady:
        """Make the session, of all outputs in order, and begin its lease."""
        ...

    def withdraw(self) -> None:
        """Nobody shall take the session, whether there is one by now or not."""
        ...


class PrefillAnswer:
    """Belongs to the event loop. ``push`` on one side, iteration on the other.

    Args:
        request_id: the client's.
        serials: the engine's names for the outputs, in the order of their numbers.
        handoff: what becomes of the prompt.
        token_text: see ``Answer.token_text``.
        abort: ends a request of the engine by its serial; one that is over, or was never begun, is no error.
        on_close: called when the caller leaves.
    """

    def __init__(
        self,
        request_id: str,
        serials: tuple[str, ...],
        handoff: Handoff,
        *,
        token_text: Callable[[int], str] | None,
        abort: Callable[[str], None],
        on_close: Callable[[PrefillAnswer], None],
    ) -> None:
        self.request_id = request_id
        self.serials = serials
        """The engine's names for the outputs."""
        self.token_text = token_text
        self.ended = False
        """Whether its end is certain: a session that nobody has read of can still be taken back."""
        self._handoff = handoff
        self._abort = abort
        self._on_close = on_close
        self._given_up = False
        self._outputs: dict[str, Prefilled | Finished] = {}
        """How they ended, by serial; those that have."""
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def wanted(self) -> bool:
        """Whether an answer can still reach somebody; from any thread."""
        return not self.ended

    def push(self, event: EngineEvent) -> None:
        """Take one event of the engine about one of the outputs; after the end nothing more is taken."""
        if self.ended or event.request_id in self._outputs:
            return
        match event:
            case Prompt():
                self._put(Prompt(self.request_id, event.token_ids, event.logprobs))
            case Prefilled() | Finished():
                self._outputs[event.request_id] = event
                if len(self._outputs) == len(self.serials):
                    self._complete()
            case Failed():
                self.fail(event.error)

    def fail(self, error: TriptychError) -> None:
        """End the request by an error."""
        if not self.ended:
            self._end(Failed(self.request_id, error))

    def cancel(self) -> None:
        """End every output."""
        if not self.ended:
            last = len(self.serials) - 1
            self._end(
                *(
                    Finished(
                        self.request_id,
                        FinishReason.CANCELLED,
                        self._usage() if index == last else None,
                        output_index=index,
                    )
                    for index in range(len(self.serials))
                )
            )

    def leave_engine(self) -> None:
        """Have the engine end what it still computes; the ends follow as events.

        There will be no session, and one that nobody has read of is taken back.
        """
        self._given_up = True
        self._leave_engine()
        if len(self._outputs) == len(self.serials):
            self.cancel()

    def close(self) -> None:
        """The caller has left; whoever still waits for an event waits in vain."""
        if not self.ended:
            self._end()

    def _complete(self) -> None:
        outputs = tuple(self._outputs[serial] for serial in self.serials)
        prefilled = tuple(output for output in outputs if isinstance(output, Prefilled))
        if len(prefilled) == len(outputs) and not self._given_up:
            self._put(self._handoff.hand_over(prefilled))
        else:
            self.cancel()

    def _end(self, *events: Event) -> None:
        """Anything but a session: one that is ready is taken back."""
        self.ended = True
        if self._events and isinstance(self._events[-1], PrefillReady):
            self._events.pop()
        self._leave_engine()  # before the session goes: the engine may still add to it
        self._handoff.withdraw()
        self._events += events
        self._arrived.set()

    def _leave_engine(self) -> None:
        for serial in self.serials:
            if serial not in self._outputs:
                self._abort(serial)

    def _usage(self) -> Usage:
        """Of all outputs: the prompt was computed once, by the first."""
        usages = {serial: output.usage or _NOTHING for serial, output in self._outputs.items()}
        leader = usages.get(self.serials[0], _NOTHING)
        completion = sum(usage.completion_tokens for usage in usages.values())
        return Usage(leader.prompt_tokens, completion, leader.cached_prompt_tokens)

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    def __aiter__(self) -> PrefillAnswer:
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
        if isinstance(event, PrefillReady):
            self.ended = True
        return event

    async def aclose(self) -> None:
        """Take the session back if nobody has read of it, and free the id. Never waits."""
        self._on_close(self)
