"""Which engine answers a request: the least busy one that serves the model, another one when it cannot be reached."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import Draining, MediaError, ModelNotFound, TriptychError
from triptych.gateway.engine import Channel, Engine, EngineState, Events, ServedModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from triptych.core.request import GenerateRequest
    from triptych.gateway.texts import Texts

log = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
"""Pause between two looks at one engine."""


class Answer(NamedTuple):
    """A request that an engine has accepted."""

    address: str
    """The engine's."""
    events: Events


class Router:
    """Holds the engines and watches them while it is entered. Belongs to the event loop."""

    def __init__(self, channels: Sequence[Channel], texts: Texts) -> None:
        self.engines = tuple(Engine(channel) for channel in channels)
        self._texts = texts
        self._watchers: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()
        self._choices = 0

    async def __aenter__(self) -> Router:
        """Begin to watch."""
        self._watchers = [asyncio.create_task(self._watch(engine)) for engine in self.engines]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop watching and disconnect."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for engine in self.engines:
            await engine.channel.close()

    async def wait_ready(self) -> None:
        """Wait until one engine can be used."""
        await self._ready.wait()

    def models(self) -> list[ServedModel]:
        """One model for each served name that is known, in the order of the engines."""
        by_name = {engine.model.served_name: engine.model for engine in reversed(self.engines) if engine.model}
        return list(reversed(by_name.values()))

    def find(self, name: str) -> ServedModel:
        """The model that a client means.

        Raises:
            ModelNotFound: no engine serves it.
            Draining: no engine that does, or no engine at all, can be used now.
        """
        known = [engine for engine in self.engines if engine.model and name in engine.model.names]
        if not known:
            served = ", ".join(repr(model.served_name) for model in self.models())
            if not served:
                raise Draining(_reason(self.engines))
            raise ModelNotFound(f"The model {name!r} does not exist; served here: {served}")
        for engine in known:
            if engine.model and engine.state.usable:
                return engine.model
        raise Draining(_reason(known))

    @asynccontextmanager
    async def generate(self, model: ServedModel, request: GenerateRequest) -> AsyncIterator[Answer]:
        """Have a request answered. Leaving the context ends it, finished or not.

        Raises:
            TriptychError: no engine took it, or it failed before its first delta; what another engine may do better
                was tried there.
        """
        tried: set[str] = set()
        failure: TriptychError | None = None
        while engine := self._choose(model, tried):
            tried.add(engine.address)
            engine.in_flight += 1
            try:
                try:
                    events = await engine.channel.generate(request)
                except TriptychError as error:
                    if not error.retryable or isinstance(error, MediaError):
                        raise
                    if isinstance(error, Draining):
                        engine.set_state(EngineState.UNREACHABLE, str(error))
                    failure = error
                    continue
                try:
                    yield Answer(engine.address, events)
                finally:
                    await events.aclose()
                return
            finally:
                engine.in_flight -= 1
        raise failure or Draining(_reason(self.engines))

    def _choose(self, model: ServedModel, tried: set[str]) -> Engine | None:
        """The least busy engine left, the one longest unused among equals; None if there is none."""
        left = [e for e in self.engines if e.model == model and e.state.usable and e.address not in tried]
        engine = min(left, key=lambda e: (e.in_flight, e.last_used), default=None)
        if engine is not None:
            self._choices += 1
            engine.last_used = self._choices
        return engine

    async def _watch(self, engine: Engine) -> None:
        while True:
            try:
                await engine.refresh(self._texts)
            except Exception as error:  # a watcher that dies would leave its engine's last state standing for ever
                log.error("looking at engine %s failed: %s", engine.address, type(error).__name__)
                engine.set_state(EngineState.UNUSABLE, "the gateway failed to look at it; its log has details")
            if engine.state.usable:
                self._ready.set()
            await asyncio.sleep(REFRESH_SECONDS)


def _reason(engines: Iterable[Engine]) -> str:
    states = "; ".join(f"{e.address} is {e.state.value}{f' ({e.detail})' if e.detail else ''}" for e in engines)
    return f"no engine is ready: {states}"
