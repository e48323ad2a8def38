"""The engines, which of them gets a request next, and what a set of them can answer together."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from triptych.core.errors import MediaError, TriptychError
from triptych.gateway.abilities import READERS, Kind, Part, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AsyncExitStack

    from triptych.core.media import Modality
    from triptych.core.request import GenerateRequest
    from triptych.gateway.engine import Engine, Events, ServedModel

T = TypeVar("T")

MAX_STRIKES = 2
"""How often one request may fail at one engine before it is not tried there again."""

_LACKING = {
    frozenset({Part.PREFILL}): "decode ",
    frozenset({Part.DECODE}): "prefill ",
    frozenset({Part.PREFILL, Part.DECODE}): "fitting decode ",
}
"""What is missing, by what there is beside encoders."""


class Errand:
    """One request on its way: what it needs, and what it has met."""

    def __init__(self, model: ServedModel, request: GenerateRequest) -> None:
        self.model = model
        self.request = request
        self.wanted = frozenset(map(kind_of, request.media))
        """What an engine must take to read the request."""
        self.failure: TriptychError | None = None
        """The last one after which another engine might have done better."""
        self._strikes: Counter[str] = Counter()

    def strikes(self, engine: Engine) -> int:
        """How often it has failed there."""
        return self._strikes[engine.address]

    def strike(self, *engines: Engine) -> None:
        """It failed once, and each of these may be to blame."""
        self._strikes.update(engine.address for engine in engines)

    def give_up(self, engine: Engine) -> None:
        """It is not tried there again."""
        self._strikes[engine.address] = MAX_STRIKES

    def failed(self, error: TriptychError) -> None:
        """Take note of a failure.

        Raises:
            TriptychError: it, when no other engine would do better.
        """
        if not error.retryable or isinstance(error, MediaError):
            raise error
        self.failure = error


class Pool:
    """Belongs to the event loop."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        self._choices = 0

    def left(self, errand: Errand, part: Part, able: Callable[[Engine], bool] | None = None) -> list[Engine]:
        """Where a request can still be tried, the best first: few strikes, not busy, not lately chosen.

        Args:
            errand: the request.
            part: of the work.
            able: what else is asked of an engine.
        """
        left = [
            engine
            for engine in self._usable(errand.model, part)
            if errand.strikes(engine) < MAX_STRIKES and (able is None or able(engine))
        ]
        return sorted(left, key=lambda e: (errand.strikes(e), e.in_flight, e.last_used))

    def chosen(self, engine: Engine) -> Engine:
        """Take note that an engine gets a request now."""
        self._choices += 1
        engine.last_used = self._choices
        return engine

    def has(self, model: ServedModel, part: Part) -> bool:
        """Whether an engine of the part can be used now."""
        return bool(self._usable(model, part))

    def serving(self, model: ServedModel) -> list[Engine]:
        """The engines that are known to serve a model, in whatever state."""
        return [engine for engine in self.engines if engine.model == model]

    def can_answer(self, model: ServedModel) -> bool:
        """Whether a request without media would find all that it needs."""
        return bool(_readers([engine for engine in self.serving(model) if engine.state.usable]))

    def is_complete(self, model: ServedModel) -> bool:
        """Whether all that the model needs for an answer is known, in whatever state."""
        return bool(_readers(self.serving(model)))

    def modalities(self, model: ServedModel) -> frozenset[Modality]:
        """Of media in requests for a model: what those who read its prompts take, in whatever form and state."""
        return _union(e.abilities.modalities for e in self.serving(model) if e.abilities and e.part in READERS)

    def ways(self, model: ServedModel) -> list[frozenset[Kind]]:
        """What media one request may have, for each reader and for each encoder with a reader, in whatever state."""
        serving = self.serving(model)
        readers = [engine for engine in serving if engine.part in READERS]
        encoders = [engine for engine in serving if engine.part is Part.ENCODE]
        inline = [reader.abilities.media for reader in readers if reader.abilities]
        return [*inline, *(encoder.rows_for(reader) for encoder in encoders for reader in readers)]

    def unreadable(self, model: ServedModel) -> frozenset[Modality]:
        """Of these, what nobody can read now, because an encoder is needed and there is none."""
        usable = [engine for engine in self.serving(model) if engine.state.usable]
        encoders = [engine for engine in usable if engine.part is Part.ENCODE]
        readers = _readers(usable)
        inline = _union(reader.abilities.media for reader in readers if reader.abilities)
        encoded = _union(encoder.rows_for(reader) for encoder in encoders for reader in readers)
        return self.modalities(model).difference(kind.modality for kind in inline | encoded)

    def _usable(self, model: ServedModel, part: Part) -> list[Engine]:
        return [e for e in self.engines if e.model == model and e.part is part and e.state.usable]


def _union(sets: Iterable[frozenset[T]]) -> frozenset[T]:
    return frozenset[T]().union(*sets)


def _readers(engines: Sequence[Engine]) -> list[Engine]:
    """Those that read prompts, and have somebody who goes on from them where they do not answer themselves."""
    decoders = [engine for engine in engines if engine.part is Part.DECODE]
    return [
        engine
        for engine in engines
        if engine.part is Part.WHOLE
        or (engine.part is Part.PREFILL and any(not engine.misfit(decode) for decode in decoders))
    ]


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


def misfits(engines: Sequence[Engine]) -> Iterator[str]:
    """One line for each pair that serves one model and is never used together."""
    for maker in engines:
        for user in engines:
            if maker.model is not None and maker.model == user.model and (why := maker.misfit(user)):
                yield f"{maker.address} and {user.address} do not fit together: {why}"


def reason(engines: Iterable[Engine]) -> str:
    """Why no request can be answered, with the state of each engine."""
    engines = tuple(engines)
    usable = frozenset(engine.part for engine in engines if engine.part and engine.state.usable)
    lacking = _LACKING.get(usable - {Part.ENCODE}, "")
    return "; ".join((f"no {lacking}engine is ready: {_states(engines)}", *misfits(engines)))


def no_encoder(model: ServedModel, engines: Sequence[Engine]) -> str:
    """Why media of requests for a model cannot be read by the engines that serve it."""
    encoders = [engine for engine in engines if engine.part is Part.ENCODE]
    known = _states(encoders) or "none is known, and the other engines take no media themselves"
    return "; ".join((f"no encoder engine for {model.served_name!r} can be used: {known}", *misfits(engines)))


def not_ready(model: ServedModel, engines: Iterable[Engine]) -> str:
    """Why engines that would take the media of a request for a model do not get it."""
    return f"no engine for {model.served_name!r} that takes these media can be used: {_states(engines)}"


def _states(engines: Iterable[Engine]) -> str:
    """Which engines there are, and how they are."""
    return "; ".join(
        f"{e.address}{f', {e.part.value},' if e.part else ''} is {e.state.value}{f' ({e.detail})' if e.detail else ''}"
        for e in engines
    )
