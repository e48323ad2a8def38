"""Which engines answer a request: the least busy ones that serve the model, others when they cannot be reached."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from triptych.core.errors import Draining, ModelNotFound, TriptychError
from triptych.gateway.engine import Answer, Channel, Engine, EngineState, Part, ServedModel
from triptych.gateway.handoff import Handoff
from triptych.gateway.pool import MAX_STRIKES, Pool, may_go_elsewhere, reason, start

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from triptych.core.request import GenerateRequest
    from triptych.gateway.texts import Texts

log = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
"""Pause between two looks at one engine."""


class Router:
    """Holds the engines and watches them while it is entered. Belongs to the event loop."""

    def __init__(self, channels: Sequence[Channel], texts: Texts) -> None:
        self.engines = tuple(Engine(channel) for channel in channels)
        self.pool = Pool(self.engines)
        self.handoff = Handoff(self.pool)
        self._texts = texts
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
        await self.handoff.settled()
        for engine in self.engines:
            await engine.channel.close()

    async def wait_ready(self) -> None:
        """Wait until requests for one model can be answered."""
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
        for engine in sorted(known, key=lambda engine: engine.part is Part.PREFILL):
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
        begin = self._begin if self.pool.has(model, Part.WHOLE) else self.handoff.begin
        async with AsyncExitStack() as held:
            yield await begin(model, request, held)

    async def _begin(self, model: ServedModel, request: GenerateRequest, held: AsyncExitStack) -> Answer:
        """At one engine that does all of it."""
        strikes: Counter[str] = Counter()
        failure: TriptychError | None = None
        while engine := self.pool.choose(model, Part.WHOLE, strikes):
            try:
                return Answer(f"engine {engine.address}", await start(engine, request, held))
            except TriptychError as error:
                if not may_go_elsewhere(error):
                    raise
                failure = error
                strikes[engine.address] = MAX_STRIKES
        raise failure or Draining(reason(self.engines))

    async def _watch(self, engine: Engine) -> None:
        while True:
            try:
                await engine.refresh(self._texts)
            except Exception as error:  # a watcher that dies would leave its engine's last state standing for ever
                log.error("looking at engine %s failed: %s", engine.address, type(error).__name__)
                engine.set_state(EngineState.UNUSABLE, "the gateway failed to look at it; its log has details")
            if engine.model and self.pool.can_answer(engine.model):
                self._ready.set()
            await asyncio.sleep(REFRESH_SECONDS)
