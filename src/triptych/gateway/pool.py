"""The engines, and which of them gets the next request: the least busy one of the part that is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.errors import MediaError, TriptychError
from triptych.gateway.engine import Engine, Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AsyncExitStack

    from triptych.core.request import GenerateRequest
    from triptych.gateway.engine import Events, ServedModel

MAX_STRIKES = 2
"""How often one request may fail at one engine before it is not tried there again."""


class Pool:
    """Belongs to the event loop."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self._choices = 0

    def choose(self, model: ServedModel, part: Part, strikes: Mapping[str, int]) -> Engine | None:
        """An engine for one request, or None if there is none left.

        Args:
            model: what it must serve.
            part: of the work.
            strikes: how often this request has failed at each address.
        """
        left = [engine for engine in self._usable(model, part) if strikes.get(engine.address, 0) < MAX_STRIKES]
        engine = min(left, key=lambda e: (strikes.get(e.address, 0), e.in_flight, e.last_used), default=None)
        if engine is not None:
            self._choices += 1
            engine.last_used = self._choices
        return engine

    def has(self, model: ServedModel, part: Part) -> bool:
        """Whether an engine of the part can be used now."""
        return bool(self._usable(model, part))

    def can_answer(self, model: ServedModel) -> bool:
        """Whether a request for the model would find all that it needs."""
        return _whole({engine.part for engine in self.engines if engine.model == model and engine.state.usable})

    def is_complete(self, model: ServedModel) -> bool:
        """Whether all that the model needs is known, in whatever state."""
        return _whole({engine.part for engine in self.engines if engine.model == model})

    def _usable(self, model: ServedModel, part: Part) -> list[Engine]:
        return [e for e in self.engines if e.model == model and e.part is part and e.state.usable]


async def start(engine: Engine, request: GenerateRequest, held: AsyncExitStack) -> Events:
    """Start a request at an engine; ``held`` ends it, finished or not.

    Raises:
        TriptychError: it was refused, or failed before its first delta; nothing is held.
    """
    engine.in_flight += 1
    try:
        events = await engine.generate(request)
    except BaseException:
        engine.in_flight -= 1
        raise
    held.callback(engine.left)
    held.push_async_callback(events.aclose)
    return events


def may_go_elsewhere(error: TriptychError) -> bool:
    """Whether another engine may do better."""
    return error.retryable and not isinstance(error, MediaError)


def _whole(parts: set[Part | None]) -> bool:
    return Part.WHOLE in parts or {Part.PREFILL, Part.DECODE} <= parts


def reason(engines: Iterable[Engine]) -> str:
    """Why no request can be answered, with the state of each engine."""
    engines = tuple(engines)
    usable = {engine.part for engine in engines if engine.state.usable}
    lacking = "decode " if usable == {Part.PREFILL} else "prefill " if usable == {Part.DECODE} else ""
    states = "; ".join(
        f"{e.address}{f', {e.part.value},' if e.part else ''} is {e.state.value}{f' ({e.detail})' if e.detail else ''}"
        for e in engines
    )
    return f"no {lacking}engine is ready: {states}"
