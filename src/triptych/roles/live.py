"""The requests of one engine that are live: accepted, and not yet closed by their callers.

    arriving   refused if the engine ends, the id is taken, or there is no room; else the id is, and an abort finds it
    begin      accepted: a task gets the request into the engine, however impatient the caller is
    prepare    the same once more, for what the engine could not do as it was
    take       the engine's events -> the answers that they are about
    close      the caller has left: the id is free, and what is still computed is ended

The engine knows an output by a serial number of ours, never by the client's id: an event that comes
late for an old request cannot reach a new one that bears the same id.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from triptych.core.errors import (
    Cancelled,
    Draining,
    DuplicateRequest,
    Internal,
    InvalidRequest,
    RequestNotFound,
    TriptychError,
    forget_frames,
)
from triptych.roles.answer import AnswerStream
from triptych.roles.contract import AbortOutcome
from triptych.roles.output import outputs_of
from triptych.roles.visible_text import token_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    from triptych.core.events import EngineEvent
    from triptych.core.request import GenerateRequest
    from triptych.engine.loop import EncodeEngine, Engine
    from triptych.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

REMEMBERED_IDS = 4096
"""Finished ids that an abort still recognises."""


class LiveAnswer(Protocol):
    """What its caller reads of a request, as seen from the other side."""

    @property
    def request_id(self) -> str:
        """The client's."""
        ...

    @property
    def serials(self) -> tuple[str, ...]:
        """The engine's names for its outputs, or media items."""
        ...

    @property
    def ended(self) -> bool:
        """Whether a terminal event was pushed."""
        ...

    def push(self, event: EngineEvent) -> None:
        """Take an event of the engine."""
        ...

    def fail(self, error: TriptychError) -> None:
        """End it by an error, unless it has ended."""
        ...

    def cancel(self) -> None:
        """End it before the engine has it."""
        ...

    def leave_engine(self) -> None:
        """Have the engine end what it still computes; more than once is no error."""
        ...

    def close(self) -> None:
        """The caller has left."""
        ...


class Place(Protocol):
    """A request's place in line for what is done before the engine has it."""

    def give_up(self) -> None:
        """Nobody wants it any more, at whatever moment. Idempotent."""
        ...


class _Preparation(NamedTuple):
    """What gets a request into the engine."""

    task: asyncio.Task[None]
    ticket: Place | None


class Arrival:
    """A request that is looked at and not accepted yet."""

    def __init__(self, live: LiveRequests, outputs: int) -> None:
        self.outputs = outputs
        """As many places in the engine's queue are meant for it."""
        self._live = live
        self._aborted = False

    def abort(self) -> AbortOutcome:
        """It shall not be accepted."""
        self._aborted = True
        return AbortOutcome.ABORTED

    def go_on(self) -> None:
        """Ask once it was looked at, before it is accepted.

        Raises:
            Cancelled: an abort came meanwhile.
            Draining: the engine is shutting down or has failed.
        """
        self._live.refuse_if_closed()
        if self._aborted:
            raise Cancelled("the request was aborted before it was accepted")


class LiveRequests:
    """Belongs to the event loop.

    Args:
        engine: what computes them.
        tokenizer: of their texts.
        max_outputs: of one request.
    """

    def __init__(self, engine: Engine | EncodeEngine, tokenizer: Tokenizer, max_outputs: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._token_text = token_texts(tokenizer)
        self._max_outputs = max_outputs
        self._numbers = itertools.count()
        self._by_id: dict[str, LiveAnswer] = {}
        """Every answer that was accepted and not closed, by the client's id."""
        self._by_serial: dict[str, LiveAnswer] = {}
        """The same answers, by each of their outputs."""
        self._arriving: dict[str, Arrival] = {}
        """What is not accepted yet, by the client's id."""
        self._preparing: dict[LiveAnswer, _Preparation] = {}
        self._finished_ids: OrderedDict[str, None] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        """Whether nothing new is accepted any more."""

    def serials(self, outputs: int) -> tuple[str, ...]:
        """Names for the outputs of a new request, which nothing else in the engine ever has."""
        number = next(self._numbers)
        return tuple(f"{number}.{index}" for index in range(outputs))

    def token_text(self, request: GenerateRequest) -> Callable[[int], str] | None:
        """See ``Answer.token_text``."""
        return self._token_text if request.detokenize else None

    @property
    def preparing(self) -> int:
        """Outputs that the engine does not have yet."""
        arriving = sum(arrival.outputs for arrival in self._arriving.values())
        return arriving + sum(len(answer.serials) for answer in self._preparing)

    def client_id(self, serial: str) -> str:
        """The client's name for a live request, by the engine's; empty where there is none."""
        answer = self._by_serial.get(serial)
        return "" if answer is None else answer.request_id

    # -- acceptance ------------------------------------------------------------------------------

    def refuse_if_closed(self) -> None:
        """Nothing is begun while the engine ends.

        Raises:
            Draining: it does, or it has failed.
        """
        if self._engine.failure is not None:
            raise Draining("the engine has failed; see Health")
        if self.draining:
            raise Draining("the engine is shutting down")

    @contextmanager
    def arriving(self, request: GenerateRequest, items: int = 0) -> Iterator[Arrival]:
        """While a request is looked at: from here on its id is taken. What is accepted begins inside.

        Args:
            request: the client's.
            items: as many requests of the engine come of it; 0: one for each of its outputs.

        Raises:
            Draining: the engine is shutting down or has failed.
            DuplicateRequest: the id is in use.
            InvalidRequest: more outputs than one request may have.
            Overloaded: the engine's queue is full.
        """
        self.refuse_if_closed()
        request_id, outputs = request.request_id, request.num_sequences
        if request_id in self._by_id or request_id in self._arriving:
            raise DuplicateRequest(f"request id {request_id!r} is in use by a live request")
        if outputs > self._max_outputs:
            raise InvalidRequest(
                f"num_sequences is {outputs}; one request can have at most {self._max_outputs} outputs here"
            )
        places = items or outputs
        self._engine.check_queue(places, before=self.preparing)
        arrival = self._arriving[request_id] = Arrival(self, places)
        self._idle.clear()
        try:
            yield arrival
        finally:
            del self._arriving[request_id]
            self._settle()

    def answer(self, request: GenerateRequest) -> AnswerStream:
        """A new answer to the request, not yet begun."""
        return AnswerStream(
            request.request_id,
            outputs_of(request, self.serials(request.num_sequences), self._tokenizer),
            token_text=self.token_text(request),
            abort=self._engine.abort,
            on_close=self.close,
        )

    def begin(self, answer: LiveAnswer, ticket: Place | None, submit: Coroutine[object, object, None]) -> None:
        """Take the answer's id and get it into the engine; see ``prepare``."""
        self._by_id[answer.request_id] = answer
        self._by_serial.update(dict.fromkeys(answer.serials, answer))
        self._idle.clear()
        self.prepare(answer, ticket, submit)

    def prepare(self, answer: LiveAnswer, ticket: Place | None, submit: Coroutine[object, object, None]) -> None:
        """In a task of its own, get a request into the engine, where nothing of it is.

        The task is never cancelled: a permit inside must last as long as the worker that it stands for.

        Args:
            answer: what goes wrong from here on ends it.
            ticket: the place in line that ``submit`` waits in.
            submit: prepares the request and submits it.
        """
        task = asyncio.create_task(self._prepare(answer, submit), name=f"prepare {answer.serials[0]}")
        self._preparing[answer] = _Preparation(task, ticket)

    async def _prepare(self, answer: LiveAnswer, submit: Coroutine[object, object, None]) -> None:
        try:
            await submit
        except TriptychError as error:
            forget_frames(error)
            answer.fail(error)
        except Exception as error:
            log.exception("preparing a request failed")
            forget_frames(error)
            answer.fail(Internal("preparing the request failed; the engine's log has details"))
        finally:
            del self._preparing[answer]

    # -- while they run --------------------------------------------------------------------------

    def take(self, events: Iterable[EngineEvent]) -> None:
        """Hand the engine's events on; those about requests that nobody waits for are dropped."""
        for event in events:
            answer = self._by_serial.get(event.request_id)
            if answer is None:
                continue
            try:
                answer.push(event)
            except Exception:
                log.exception("an event of a request could not be read")
                answer.fail(Internal("reading the answer failed; the engine's log has details"))

    def abort(self, request_id: str) -> AbortOutcome:
        """End one request; see ``Role.abort``."""
        answer = self._by_id.get(request_id)
        if answer is None:
            if request_id in self._arriving:
                return self._arriving[request_id].abort()
            if request_id in self._finished_ids:
                return AbortOutcome.ALREADY_FINISHED
            raise RequestNotFound(f"no request {request_id!r}")
        return self._abort(answer)

    def abort_all(self) -> int:
        """End every request; returns how many were live."""
        outcomes = [arrival.abort() for arrival in self._arriving.values()]
        outcomes += [self._abort(answer) for answer in list(self._by_id.values())]
        return outcomes.count(AbortOutcome.ABORTED)

    def _abort(self, answer: LiveAnswer) -> AbortOutcome:
        if answer.ended:
            return AbortOutcome.ALREADY_FINISHED
        if answer in self._preparing:
            answer.cancel()
        self._drop(answer)
        return AbortOutcome.ABORTED

    def _drop(self, answer: LiveAnswer) -> None:
        """Nobody wants the rest: leave the queue for media, and end in the engine. Both may have happened already."""
        preparation = self._preparing.get(answer)
        if preparation is not None and preparation.ticket is not None:
            preparation.ticket.give_up()
        answer.leave_engine()

    # -- the end ---------------------------------------------------------------------------------

    def close(self, answer: LiveAnswer) -> None:
        """The caller has left: the id is free, and what is still computed is of no use. Idempotent."""
        request_id = answer.request_id
        if self._by_id.get(request_id) is not answer:
            return  # it left before
        del self._by_id[request_id]
        for serial in answer.serials:
            del self._by_serial[serial]
        answer.close()
        self._drop(answer)
        self._finished_ids[request_id] = None
        self._finished_ids.move_to_end(request_id)
        while len(self._finished_ids) > REMEMBERED_IDS:
            self._finished_ids.popitem(last=False)
        self._settle()

    def _settle(self) -> None:
        if not self._by_id and not self._arriving:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until every answer is closed."""
        await self._idle.wait()

    def fail_all(self, error: TriptychError) -> None:
        """End every request by an error."""
        for answer in list(self._by_id.values()):
            answer.fail(error)
            self._drop(answer)

    async def settled(self) -> None:
        """Wait for the tasks that prepare requests; there must be no new ones."""
        await asyncio.gather(*(preparation.task for preparation in self._preparing.values()), return_exceptions=True)
