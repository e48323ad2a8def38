"""Which engines answer a request: the least busy ones that serve the model, others when they cannot be reached."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from triptych.core.errors import Draining, ModelNotFound, TriptychError
from triptych.gateway.abilities import Part
from triptych.gateway.aborts import Aborts
from triptych.gateway.delivery import Delivery
from triptych.gateway.encode import Encoders
from triptych.gateway.engine import Answer, Channel, Engine, EngineState, ServedModel
from triptych.gateway.handoff import Handoff
from triptych.gateway.pool import Errand, Pool, reason, start
from triptych.gateway.texts import Texts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from triptych.core.request import GenerateRequest
    from triptych.gateway.limits import GatewayLimits
    from triptych.gateway.workers import Workers

log = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
"""Pause between two looks at one engine, if no request finds it away."""


class Router:
    """Holds the engines and watches them while it is entered. Belongs to the event loop."""

    def __init__(self, channels: Sequence[Channel], workers: Workers, limits: GatewayLimits) -> None:
        self.engines = tuple(Engine(channel) for channel in channels)
        self.pool = Pool(self.engines)
        self.aborts = Aborts()
        self._encoders = Encoders(self.pool, self.aborts, workers, limits.encode_seconds)
        self._handoff = Handoff(self._encoders)
        self._texts = Texts(workers)
        self._watchers: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()

    async def __aenter__(self) -> Router:
        """Begin to watch."""
        self._watchers = [asyncio.create_task(self._watch(engine)) for engine in self.engines]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop watching and disconnect."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self.aborts.settled()
        for engine in self.engines:
            await engine.channel.close()

    async def wait_ready(self) -> None:
        """Wait until requests for one model can be answered, with whatever media they may have."""
        await self._ready.wait()

    def models(self) -> list[ServedModel]:
        """One model for each served name that can be answered for by engines that are known, in their order."""
        found = [engine.model for engine in self.engines if engine.model and self.pool.is_complete(engine.model)]
        by_name = {model.served_name: model for model in reversed(found)}
        return list(reversed(by_name.values()))

    def find(self, name: str) -> ServedModel:
        """The model that a client means.

        Raises:
            ModelNotFound: no engine serves it.
            Draining: no engine that does, or no engine at all, can be used now, or a part of the work has none.
        """
        known = [engine for engine in self.engines if engine.model and name in engine.model.names]
        if not known:
            served = ", ".join(repr(model.served_name) for model in self.models())
            if not served:
                raise Draining(reason(self.engines))
            raise ModelNotFound(f"The model {name!r} does not exist; served here: {served}")
        # the window is that of the engine which answers
        for engine in sorted(known, key=lambda engine: engine.part not in (Part.WHOLE, Part.DECODE)):
            if engine.model and engine.state.usable and self.pool.can_answer(engine.model):
                return engine.model
        raise Draining(reason(known))

    @asynccontextmanager
    async def generate(self, model: ServedModel, request: GenerateRequest) -> AsyncIterator[Answer]:
        """Have a request answered. Leaving the context ends it, finished or not.

        Raises:
            TriptychError: no engine took it, or it failed before its first delta; what another engine may do better
                was tried there.
        """
        begin = self._begin if self.pool.has(model, Part.WHOLE) else self._handoff.begin
        async with AsyncExitStack() as held:
            yield await begin(Errand(model, request), held)

    async def _begin(self, errand: Errand, held: AsyncExitStack) -> Answer:
        """At one engine that does all of it, or all but the encoding."""
        with Delivery(self._encoders, errand, Part.WHOLE) as delivery:
            while True:
                leg = await delivery.next()
                try:
                    events = await start(leg.reader, leg.request, held)
                except TriptychError as error:
                    delivery.failed(leg.reader, error)
                else:
                    return Answer(f"engine {leg.reader.address}", events, delivery.taken())

    async def _watch(self, engine: Engine) -> None:
        while True:
            try:
                await engine.refresh(self._texts)
            except Exception as error:  # a watcher that dies would leave its engine's last state standing for ever
                log.error("looking at engine %s failed: %s", engine.address, type(error).__name__)
                engine.set_state(EngineState.UNUSABLE, "the gateway failed to look at it; its log has details")
            model = engine.model
            if model and self.pool.can_answer(model) and not self.pool.unreadable(model):
                self._ready.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(engine.suspect.wait(), REFRESH_SECONDS)
            engine.suspect.clear()
