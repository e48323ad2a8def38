"""The thread on which an engine lives: plan, run, apply, deliver, until there is nothing to do; then sleep.

Others reach it by messages through one queue (submit, abort, stop; withdraw and release of sessions; loaded), and
hear from it by one callback.
What they may read at any time are counters. An error of the loop itself ends it: every live request is failed,
new ones are refused, and ``failure`` says why. Of cached blocks nothing more is said then: none can be used again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from triptych.core.errors import Draining, DuplicateRequest, Internal, TriptychError
from triptych.core.events import Encoded, Failed, Finished, Prefilled, RowsGone
from triptych.core.request import EncodeRequest, Request
from triptych.core.step import StepPlan, StepResult
from triptych.engine.contract import Work
from triptych.engine.encode_step import EncodePlan, EncodeResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triptych.core.events import EngineEvent
    from triptych.core.kv_events import KvChange
    from triptych.core.load import Load
    from triptych.engine.contract import StepRunner, StepScheduler

logger = logging.getLogger(__name__)

TERMINAL = (Finished, Prefilled, Encoded, RowsGone, Failed)
"""Events after which nothing more is said of a request."""


@dataclass(frozen=True, slots=True, eq=False)
class _Submit:
    requests: tuple[Any, ...]
    """A group; what the scheduler takes."""


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


@dataclass(frozen=True, slots=True)
class _Withdraw:
    session_id: str


@dataclass(frozen=True, slots=True)
class _Release:
    session_id: str


@dataclass(frozen=True, slots=True)
class _Loaded:
    number: int
    error: TriptychError | None


_Message = _Submit | _Abort | _Stop | _Withdraw | _Release | _Loaded


W = TypeVar("W", bound=Work)
P = TypeVar("P")
R = TypeVar("R")


class EngineLoop(Generic[W, P, R]):
    """One scheduler and one runner on one thread: of requests W, plans P, results R.

    Args:
        scheduler: owned by the engine thread from ``start`` on.
        runner: likewise.
        clock: monotonic seconds; the same that stamped ``Request.arrival``.
        check: compare the ledgers whenever the engine falls idle.
    """

    def __init__(
        self,
        scheduler: StepScheduler[W, P, R],
        runner: StepRunner[W, P, R],
        *,
        clock: Callable[[], float] = time.monotonic,
        check: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._check = check
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._live: set[str] = set()
        """Ids that were accepted and have no terminal event yet.

        Guarded by ``_lock``, as are ``_closed``, ``_arriving`` and every put into the inbox.
        """
        self._arriving = 0
        """Requests in the inbox."""
        self._deliver: Callable[[tuple[EngineEvent, ...], tuple[KvChange, ...]], None] = _to_nobody
        self._lock = threading.Lock()
        self._closed = False
        self._failure: TriptychError | None = None
        self._thread: threading.Thread | None = None

    def start(self, deliver: Callable[[tuple[EngineEvent, ...], tuple[KvChange, ...]], None]) -> None:
        """Begin, once.

        ``deliver`` is called on the engine thread with the events of a step and with what the step did to cached
        blocks (see ``Scheduler.take_kv_changes``), when there is either; it must not block.
        """
        self._deliver = deliver
        self._thread = threading.Thread(target=self._main, name="triptych-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[W]) -> None:
        """Accept a group: outputs that share one prompt, usually one, or items; from any thread. All of it or nothing.

        The events of each follow, the last one terminal.

        Raises:
            Draining: the engine is stopping or has failed.
            DuplicateRequest: an id is live.
            Overloaded: the queue is full.
            InvalidRequest: the request could never run here.
        """
        self._scheduler.check(requests)
        for request in requests:
            self._runner.check(request)
        with self._lock:
            if self._closed:
                raise Draining("the engine has failed" if self._failure else "the engine is shutting down")
            for request in requests:
                if request.request_id in self._live:
                    raise DuplicateRequest(f"request {request.request_id!r} is live")
            self.check_queue(len(requests))
            self._live.update(request.request_id for request in requests)
            self._arriving += len(requests)
            self._inbox.put(_Submit(tuple(requests)))

    def check_queue(self, count: int = 1, *, before: int = 0) -> None:
        """Refuse what ``submit`` would refuse for want of room for ``count`` outputs or items; from any thread.

        Args:
            count: of one client's request.
            before: of others that are about to be submitted.

        Raises:
            Overloaded: the queue is full.
            InvalidRequest: there is never room for so many.
        """
        self._scheduler.check_queue(self._arriving + before, count)

    def abort(self, request_id: str) -> None:
        """End a request soon; from any thread. An id that is not live is no error."""
        with self._lock:
            if request_id in self._live:
                self._inbox.put(_Abort(request_id))

    def withdraw(self, session_id: str) -> None:
        """Have nobody take this session any more, soon; from any thread. One that is not known is no error."""
        self._put(_Withdraw(session_id))

    def release(self, session_id: str) -> None:
        """The transport reads the session's blocks no more; from any thread."""
        self._put(_Release(session_id))

    def loaded(self, number: int, error: TriptychError | None) -> None:
        """A load of a plan has ended, well or with an error, and nothing writes to its blocks; from any thread."""
        self._put(_Loaded(number, error))

    def _put(self, message: _Message) -> None:
        with self._lock:
            if not self._closed:  # or nobody would read it
                self._inbox.put(message)

    def stop(self) -> None:
        """Refuse new requests, end the live ones as cancelled, and wait for the thread. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(_Stop())
        if self._thread is not None:
            self._thread.join()

    @property
    def failure(self) -> TriptychError | None:
        """Why the loop ended, if it did so by itself."""
        return self._failure

    def load(self) -> Load:
        """How busy the engine is, at most one step old; from any thread, without waiting."""
        load = self._scheduler.load()
        return replace(load, queued_requests=load.queued_requests + self._arriving)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Every ledger's counters by ledger name; from any thread, without waiting."""
        return self._scheduler.statistics().ledgers() | self._runner.statistics()

    # -- engine thread -------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while self._receive():
                if self._scheduler.busy:
                    self._step()
            self._end_all()
        except Exception as error:
            logger.exception("the engine loop failed")
            self._fail(error)

    def _receive(self) -> bool:
        """Take all messages, sleeping for the first one when there is nothing to compute; False to stop."""
        if not self._scheduler.busy and self._inbox.empty():
            if self._check:
                self._scheduler.check_integrity()
            if not self._accept(self._inbox.get()):
                return False
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return True
            if not self._accept(message):
                return False

    def _accept(self, message: _Message) -> bool:
        match message:
            case _Submit(requests):
                self._queue(requests)
            case _Abort(request_id):
                self._send(self._scheduler.abort(request_id, self._clock()))
            case _Withdraw(session_id):
                self._scheduler.withdraw(session_id)
            case _Release(session_id):
                self._scheduler.release(session_id)
            case _Loaded(number, error):
                self._send(self._scheduler.loaded(number, error, self._clock()))
            case _Stop():
                return False
        return True

    def _queue(self, requests: tuple[W, ...]) -> None:
        with self._lock:
            self._arriving -= len(requests)
        error: TriptychError
        try:
            self._scheduler.add(requests)
            return
        except TriptychError as refusal:
            error = refusal
        except Exception:
            logger.exception("request %s could not be queued", requests[0].request_id)
            error = Internal("the request could not be queued")
        self._send(tuple(Failed(request.request_id, error) for request in requests))

    def _step(self) -> None:
        plan = self._scheduler.plan(self._clock())
        self._send(self._scheduler.take_events())
        result = self._runner.run(plan)
        events = self._scheduler.apply(result, self._clock())
        self._send(events, self._scheduler.take_kv_changes())

    def _send(self, events: tuple[EngineEvent, ...], kv_changes: tuple[KvChange, ...] = ()) -> None:
        if not events and not kv_changes:
            return
        ended = [event.request_id for event in events if isinstance(event, TERMINAL)]
        if ended:
            with self._lock:
                # Before delivery: whoever hears of the end may submit the id again at once.
                self._live.difference_update(ended)
        self._deliver(events, kv_changes)

    def _end_all(self) -> None:
        """Cancel what is live, let the runner drop its state, and look whether anything is still held."""
        now = self._clock()
        while True:
            try:
                self._accept(self._inbox.get_nowait())
            except queue.Empty:
                break
        with self._lock:
            ids = list(self._live)
        for request_id in ids:
            self._send(self._scheduler.abort(request_id, now))
        if self._scheduler.busy:
            self._step()
        if self._check:
            self._scheduler.check_integrity()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failure = (
                error if isinstance(error, TriptychError) else Internal("the engine loop failed; see its log")
            )
            self._closed = True
            ids = sorted(self._live)
            self._live.clear()
            # Nothing is put into the inbox from here on, and nobody reads what is left in it.
            self._inbox = queue.SimpleQueue()
            self._arriving = 0
        try:
            if ids:
                self._deliver(tuple(Failed(request_id, self._failure) for request_id in ids), ())
        except Exception:
            logger.exception("the end of %d request(s) could not be delivered", len(ids))


def _to_nobody(events: tuple[EngineEvent, ...], kv_changes: tuple[KvChange, ...]) -> None:
    """The receiver before ``start``; nothing is ever sent to it."""
    raise Internal(f"{len(events)} event(s) and {len(kv_changes)} change(s) of an engine that was not started")


Engine = EngineLoop[Request, StepPlan, StepResult]
"""One that computes prompts and answers: a ``Scheduler`` and a ``Runner``."""
EncodeEngine = EngineLoop[EncodeRequest, EncodePlan, EncodeResult]
"""One that encodes: an ``EncodeScheduler`` and an ``EncodeRunner``."""
