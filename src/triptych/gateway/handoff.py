"""One request, two engines: one computes the prompt, another goes on from it.

    prefill    the whole request, as context only       -> a session, sealed: it is handed on unread
    decode     the request without its media, with it   -> the answer

A session is used once. Whoever got none, or whose use of it failed, needs a new one; the prefill engine has the
prompt's blocks still cached then. What was not used is let go where it was made: nobody waits for its time to pass.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import Cancelled, Internal, KvSessionNotFound, KvTransferFailed, Overloaded, TriptychError
from triptych.core.events import Failed, Finished, FinishReason, PrefillReady
from triptych.core.media_options import OptionLayer
from triptych.core.session import SealedSession
from triptych.gateway.abilities import Part
from triptych.gateway.delivery import Delivery
from triptych.gateway.engine import Answer, Measured
from triptych.gateway.pool import start

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from triptych.gateway.delivery import Leg
    from triptych.gateway.encode import Encoders
    from triptych.gateway.engine import Engine
    from triptych.gateway.pool import Errand


class _Prefilled(NamedTuple):
    """A prompt that was computed."""

    engine: Engine
    """Who keeps it."""
    session: SealedSession
    measured: Measured


class Handoff:
    """Belongs to the event loop."""

    def __init__(self, encoders: Encoders) -> None:
        """``encoders`` are for the media."""
        self._encoders = encoders
        self._pool = encoders.pool
        self._aborts = encoders.aborts

    async def begin(self, errand: Errand, held: AsyncExitStack) -> Answer:
        """Have a request answered; returns with its first event. ``held`` ends it, finished or not.

        Raises:
            TriptychError: see ``Router.generate``.
        """
        with Delivery(self._encoders, errand, Part.PREFILL, lambda e: bool(self._decoders(errand, e))) as delivery:
            while True:
                leg = await delivery.next()
                try:
                    prefilled = await self._prefill(leg)
                except TriptychError as error:
                    delivery.failed(leg.reader, error)
                    continue
                before = (*delivery.taken(), prefilled.measured)
                answer: Answer | None = None
                try:
                    answer = await self._decode(errand, prefilled, held)
                finally:
                    if answer is None:
                        self._aborts.tell(prefilled.engine.channel.abort_session(prefilled.session))
                if answer is not None:
                    return answer._replace(before=before)

    def _decoders(self, errand: Errand, prefill: Engine) -> list[Engine]:
        """Where a request can still go on from a prefill engine, the best first."""
        return self._pool.left(errand, Part.DECODE, lambda decode: not prefill.misfit(decode))

    async def _decode(self, errand: Errand, prefilled: _Prefilled, held: AsyncExitStack) -> Answer | None:
        """What follows a prompt; None when its session is of no more use.

        Raises:
            TriptychError: a failure that another prompt would not mend.
        """
        going_on = replace(errand.request, session=prefilled.session, media=(), media_options=OptionLayer())
        while decoders := self._decoders(errand, prefilled.engine):
            decode = self._pool.chosen(decoders[0])
            try:
                events = await start(decode, going_on, held)
            except TriptychError as error:
                errand.failed(error)
                if isinstance(error, (KvSessionNotFound, KvTransferFailed)):  # one of the two is to blame
                    errand.strike(prefilled.engine, decode)
                    return None
                errand.give_up(decode)
                if not isinstance(error, Overloaded):  # for want of room a session is refused unused
                    return None
            else:
                return Answer(f"decode {decode.address}", events)
        return None

    async def _prefill(self, leg: Leg) -> _Prefilled:
        """The prompt's session.

        Raises:
            TriptychError: there is none.
        """
        engine, request = leg
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
            self._aborts.tell(engine.channel.abort(request.request_id))
            raise
        finally:
            engine.left()
