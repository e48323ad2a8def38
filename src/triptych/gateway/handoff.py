"""One request, two engines: one computes the prompt, another goes on from it.

    prefill    the whole request, as context only       -> a session, sealed: it is handed on unread
    decode     the request without its media, with it   -> the answer

A session is used once. Whoever got none, or whose use of it failed, needs a new one; the prefill engine has the
prompt's blocks still cached then. What was not used is let go where it was made: nobody waits for its time to pass.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from triptych.core.errors import (
    Cancelled,
    Draining,
    Internal,
    KvSessionNotFound,
    KvTransferFailed,
    Overloaded,
    TriptychError,
)
from triptych.core.events import Failed, Finished, FinishReason, PrefillReady
from triptych.core.session import SealedSession
from triptych.gateway.engine import Answer, Measured, Part
from triptych.gateway.pool import MAX_STRIKES, may_go_elsewhere, reason, start

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from contextlib import AsyncExitStack

    from triptych.core.request import GenerateRequest
    from triptych.gateway.engine import Engine, ServedModel
    from triptych.gateway.pool import Pool


class _Prefilled(NamedTuple):
    """A prompt that was computed."""

    engine: Engine
    """Who keeps it."""
    session: SealedSession
    measured: Measured


class Handoff:
    """Belongs to the event loop."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def aborting(self) -> int:
        """Sessions that engines are being told to let go."""
        return len(self._aborts)

    async def settled(self) -> None:
        """Wait until the engines were told to let go of what was left behind."""
        while self._aborts:
            await asyncio.wait(self._aborts)

    async def begin(self, model: ServedModel, request: GenerateRequest, held: AsyncExitStack) -> Answer:
        """Have a request answered; returns with its first event. ``held`` ends it, finished or not.

        Raises:
            TriptychError: see ``Router.generate``.
        """
        strikes: Counter[str] = Counter()
        failure: TriptychError | None = None
        prefilled: _Prefilled | None = None
        try:
            while True:
                if prefilled is None:
                    engine = self._choose(model, Part.PREFILL, strikes, failure)
                    try:
                        prefilled = await self._prefill(engine, request)
                    except TriptychError as error:
                        failure = _or_raise(error)
                        strikes[engine.address] = MAX_STRIKES
                        continue
                decode = self._choose(model, Part.DECODE, strikes, failure)
                going_on = replace(request, session=prefilled.session, media=())
                try:
                    events = await start(decode, going_on, held)
                except TriptychError as error:
                    failure = _or_raise(error)
                    if isinstance(error, (KvSessionNotFound, KvTransferFailed)):  # one of the two is to blame
                        strikes.update((prefilled.engine.address, decode.address))
                    else:
                        strikes[decode.address] = MAX_STRIKES
                    if not isinstance(error, Overloaded):  # for want of room a session is refused unused
                        self._let_go(prefilled)
                        prefilled = None
                else:
                    measured, prefilled = prefilled.measured, None
                    return Answer(f"decode {decode.address}", events, (measured,))
        finally:
            if prefilled is not None:
                self._let_go(prefilled)

    def _choose(self, model: ServedModel, part: Part, strikes: Counter[str], failure: TriptychError | None) -> Engine:
        engine = self._pool.choose(model, part, strikes)
        if engine is None:
            raise failure or Draining(reason(e for e in self._pool.engines if e.model == model))
        return engine

    async def _prefill(self, engine: Engine, request: GenerateRequest) -> _Prefilled:
        """The prompt's session.

        Raises:
            TriptychError: there is none.
        """
        engine.in_flight += 1
        try:
            events = await engine.generate(replace(request, handoff=True))
            try:
                async for event in events:
                    match event:
                        case PrefillReady(session=SealedSession() as session, spans=spans):
                            return _Prefilled(engine, session, Measured(f"prefill {engine.address}", spans))
                        case Failed(error=error):
                            raise error
                        case Finished(reason=FinishReason.CANCELLED):
                            raise Cancelled("the prefill engine was told to end this request")
                        case Finished():
                            break
                raise Internal(f"{engine.address} computed the prompt and handed nothing over")
            finally:
                await events.aclose()
        except asyncio.CancelledError:
            # the session may be on its way here
            self._tell(engine.channel.abort(request.request_id))
            raise
        finally:
            engine.left()

    def _let_go(self, prefilled: _Prefilled) -> None:
        self._tell(prefilled.engine.channel.abort_session(prefilled.session))

    def _tell(self, call: Coroutine[Any, Any, object]) -> None:
        """In a task of its own: whoever leaves does not wait for it."""
        task = asyncio.create_task(_try(call))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


def _or_raise(error: TriptychError) -> TriptychError:
    """An error after which another engine may do better."""
    if not may_go_elsewhere(error):
        raise error
    return error


async def _try(call: Coroutine[Any, Any, object]) -> None:
    with suppress(TriptychError):  # it is over already, or the engine is gone, and the session with it
        await call
