"""What a plan asks of the KV transports, done; and what is heard of loads, told in the engine's words."""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from triptych.core.errors import (
    Cancelled,
    Internal,
    KvSessionNotFound,
    KvTransferFailed,
    SessionMismatch,
    TriptychError,
    UnsupportedFeature,
)
from triptych.transport.contract import FetchOutcome, Move

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triptych.core.handles import Handle, KvHandle, KvLayout
    from triptych.core.request import Request
    from triptych.core.step import Load, StepPlan, Store
    from triptych.transport.contract import Fetch, Fetcher, FetchResult, Publisher

logger = logging.getLogger(__name__)

_ENDS: dict[FetchOutcome, type[TriptychError]] = {
    FetchOutcome.GONE: KvSessionNotFound,
    FetchOutcome.FAILED: KvTransferFailed,
    FetchOutcome.CANCELLED: Cancelled,
}


class Transfers:
    """Belongs to the engine thread.

    Args:
        publisher: where prompts are stored for other engines; None where none are.
        fetcher: where those of other engines come from; None where none do.
        seconds: how long one load may take.
        loaded: told the number of every load that has ended, and None or why it failed; on any thread.
    """

    def __init__(
        self,
        publisher: Publisher | None,
        fetcher: Fetcher | None,
        seconds: float,
        loaded: Callable[[int, TriptychError | None], None],
    ) -> None:
        self._publisher = publisher
        self._fetcher = fetcher
        self._seconds = seconds
        self._loaded = loaded
        self._fetches: dict[int, Fetch] = {}
        """Those begun, until the engine's thread sees that they have ended."""
        self._ended: deque[int] = deque()
        """Appended to by any thread."""

    @classmethod
    def none(cls) -> Transfers:
        """Those of an engine that moves nothing: ``check`` refuses whatever would."""
        return cls(None, None, 0.0, lambda number, error: None)

    def check(self, request: Request, layout: KvLayout) -> None:
        """Refuse what the transports cannot do; ``layout`` is that of this engine's blocks. From any thread.

        Raises:
            UnsupportedFeature: there is no transport for it.
            SessionMismatch: the session's blocks are not shaped as the engine's.
            InvalidRequest: the session's handle is malformed, or another transport's.
        """
        if request.export is not None and self._publisher is None:
            raise UnsupportedFeature("this engine hands no prompts to others: it was started without a KV transport")
        if request.resume is None:
            return
        if self._fetcher is None:
            raise UnsupportedFeature("this engine takes no KV sessions: it was started without a KV transport")
        differences = ", ".join(layout.differences(request.resume.handle.layout))
        if differences:
            raise SessionMismatch(f"the KV session's blocks differ from this engine's: {differences}")
        self._fetcher.check(request.resume.handle)

    def begin(self, plan: StepPlan) -> None:
        """Withdraw, cancel, and begin loads."""
        if self._publisher is not None:
            for session_id in plan.withdrawals:
                self._publisher.withdraw(session_id)
        while self._ended:
            del self._fetches[self._ended.popleft()]
        for number in plan.cancels:
            if number in self._fetches:
                self._fetches[number].cancel()
        for load in plan.loads:
            self._fetch(load)

    def store(self, stores: Sequence[Store], failures: dict[str, TriptychError]) -> dict[str, KvHandle | None]:
        """Do the stores of requests that did not fail; requests whose stores go wrong join ``failures``.

        Returns what ``StepResult.stored`` says.
        """
        stored: dict[str, KvHandle | None] = {}
        for store in stores:
            if store.request_id in failures:
                continue
            try:
                stored[store.session_id] = hand_on(self._publisher, store)
            except TriptychError as error:
                failures[store.request_id] = error
            except Exception:
                logger.exception("request %s: its KV could not be stored for another engine", store.request_id)
                failures[store.request_id] = Internal("the KV could not be stored for another engine")
        return stored

    def statistics(self) -> dict[str, dict[str, float]]:
        """What each end counts and holds, by ledger name; from any thread, without waiting."""
        ends = {"kv_publisher": self._publisher, "kv_fetcher": self._fetcher}
        return {name: end.statistics() for name, end in ends.items() if end is not None}

    def _fetch(self, load: Load) -> None:
        if self._fetcher is None:
            self._loaded(load.number, Internal("there is no KV transport to load a prompt with"))
            return
        moves = [Move(*move) for move in load.moves]
        self._fetches[load.number] = self._fetcher.fetch(
            load.handle, moves, self._seconds, partial(self._done, load.number)
        )

    def _done(self, number: int, result: FetchResult) -> None:
        kind = _ENDS.get(result.outcome)
        error = None if kind is None else kind(result.reason or f"the KV transfer ended as {result.outcome.value}")
        self._ended.append(number)
        self._loaded(number, error)


def hand_on(publisher: Publisher | None, store: Store) -> Handle[Any] | None:
    """Have a transport offer blocks to other engines; their session's handle once it is sealed. On the engine thread.

    Raises:
        Overloaded: as many sessions are held as may be.
        Draining: the transport is closed.
        Internal: there is none.
    """
    if publisher is None:
        raise Internal("there is no KV transport to store a prompt with")
    if store.opens:
        publisher.open(store.session_id)
    try:
        publisher.publish(store.session_id, store.blocks)
        return publisher.seal(store.session_id) if store.seals else None
    except Exception:
        publisher.withdraw(store.session_id)  # whether the session was opened by this store is known here only
        raise
