"""One engine as the gateway knows it: whether it can be used, and for which model."""

from __future__ import annotations

import asyncio
import enum
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from triptych.core.errors import Draining, DuplicateRequest, Internal, TriptychError
from triptych.gateway.abilities import Abilities, Kind, Part, kinds
from triptych.wire.gen import lifecycle_pb2
from triptych.wire.modality import read_markers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from triptych.core.encoded import SealedReference
    from triptych.core.events import Event, Span
    from triptych.core.media import Modality
    from triptych.core.request import GenerateRequest
    from triptych.core.session import SealedSession
    from triptych.gateway.texts import ModelText, Texts
    from triptych.wire.gen import model_pb2, server_pb2

log = logging.getLogger(__name__)


class Events(Protocol):
    """The events of one request: deltas, then exactly one terminal event."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Itself."""
        ...

    async def __anext__(self) -> Event:
        """The next event."""
        ...

    async def aclose(self) -> None:
        """Cancel the request unless it has ended."""
        ...


class Measured(NamedTuple):
    """What one process has measured."""

    process: str
    spans: tuple[Span, ...]


class Answer(NamedTuple):
    """A request that an engine has accepted."""

    process: str
    """What the engine does, and its address."""
    events: Events
    before: tuple[Measured, ...] = ()
    """By the engines that worked on it earlier."""


class Channel(Protocol):
    """The part of ``wire.channel.EngineChannel`` in use here; see there."""

    @property
    def address(self) -> str:
        """HOST:PORT."""
        ...

    async def generate(self, request: GenerateRequest) -> Events:
        """Start a request; returns once its first event is there, raises when that is a failure."""
        ...

    async def get_server_info(self) -> server_pb2.ServerInfo:
        """What the engine is."""
        ...

    async def get_model_info(self, model: str) -> model_pb2.ModelInfo:
        """What the model accepts."""
        ...

    async def health(self) -> lifecycle_pb2.HealthResponse:
        """Named checks."""
        ...

    async def abort(self, request_id: str) -> object:
        """End a request, and the session or the encoder outputs that it has left."""
        ...

    async def abort_session(self, session: SealedSession) -> object:
        """Let go of a session that waits for a decode engine."""
        ...

    async def abort_reference(self, reference: SealedReference) -> object:
        """Let go of an encoder output that waits to be used."""
        ...

    async def close(self) -> None:
        """Cancel what is running and disconnect."""
        ...


class EngineState(enum.Enum):
    """What the last look at an engine found."""

    UNKNOWN = "not reached yet"
    UNREACHABLE = "unreachable"
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    NOT_READY = "not ready"
    UNUSABLE = "unusable"
    """It answers, but this gateway cannot work with it."""

    @property
    def usable(self) -> bool:
        """Whether requests may go there."""
        return self in (EngineState.READY, EngineState.DEGRADED)


_STATES = {
    lifecycle_pb2.HEALTH_STATE_STARTING: EngineState.STARTING,
    lifecycle_pb2.HEALTH_STATE_READY: EngineState.READY,
    lifecycle_pb2.HEALTH_STATE_DEGRADED: EngineState.DEGRADED,
}
"""Whatever else an engine says is NOT_READY."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as an engine describes it. Engines with equal ones are interchangeable."""

    served_name: str
    names: frozenset[str]
    """All names that clients may use: served name, aliases, model id."""
    model_id: str
    max_context: int = field(compare=False)
    """Prompt and answer together, in tokens; encoders have none. Engines with less room are no other model."""
    markers: Mapping[Modality, int] = field(compare=False)
    """The token that stands for one item, for each modality of which the engine says it."""
    text: ModelText


class Engine:
    """Belongs to the event loop."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.address = channel.address
        self.state = EngineState.UNKNOWN
        self.detail = ""
        """One line about the state."""
        self.model: ServedModel | None = None
        """The last one known, kept while the engine is away."""
        self.abilities: Abilities | None = None
        """Likewise."""
        self.in_flight = 0
        """Requests of this gateway's that run there; at an encoder, media items."""
        self.last_used = 0
        """When it was last chosen, in choices of the router's."""
        self.suspect = asyncio.Event()
        """Set when a request has found it away: perhaps one call was broken, and no more. The next look decides, at
        once."""
        self._instance_id = ""

    @property
    def part(self) -> Part | None:
        """What it does of a request; None before it was reached."""
        return self.abilities.part if self.abilities else None

    def misfit(self, user: Engine) -> str:
        """Why the user of what this engine makes cannot take it; empty when it can, or never would."""
        return self.abilities.misfit(user.abilities) if self.abilities and user.abilities else ""

    def rows_for(self, reader: Engine) -> frozenset[Kind]:
        """Of media that this encoder can encode for the reader; empty when the two do not fit together."""
        made, taken = self.abilities and self.abilities.rows, reader.abilities and reader.abilities.rows
        if not self.abilities or not made or not taken or self.misfit(reader):
            return frozenset()
        return kinds(made.modalities & taken.modalities, self.abilities.sources)

    async def refresh(self, texts: Texts) -> None:
        """Look at the engine once, and learn its model when it has been started anew. Troubles become its state."""
        try:
            info = await self.channel.get_server_info()
            if self.model is None or info.instance_id != self._instance_id:
                await self._learn(info, texts)
                self._instance_id = info.instance_id
            health = await self.channel.health()
        except TriptychError as error:
            self.set_state(EngineState.UNREACHABLE if isinstance(error, Draining) else EngineState.UNUSABLE, str(error))
        else:
            troubles = [f"{check.name}: {check.message}" for check in health.checks if check.state != health.state]
            self.set_state(_STATES.get(health.state, EngineState.NOT_READY), "; ".join(troubles))

    async def generate(self, request: GenerateRequest) -> Events:
        """Start a request; returns once its first event is there.

        Raises:
            TriptychError: it was refused, or that event is its failure.
        """
        try:
            return await self.channel.generate(request)
        except Draining:
            self.suspect.set()
            raise
        except DuplicateRequest as error:
            # The id is the gateway's own, so it is no fault of the client's; whoever asks ends the twin.
            raise Draining(f"{self.address}: the call came twice on its way: {error}") from error

    def left(self, count: int = 1) -> None:
        """So many requests or items less run there."""
        self.in_flight -= count

    def set_state(self, state: EngineState, detail: str) -> None:
        """Take note of what was found; a change is logged."""
        if state is not self.state:
            log.info("engine %s is %s%s", self.address, state.value, f": {detail}" if detail else "")
        self.state, self.detail = state, detail

    async def _learn(self, info: server_pb2.ServerInfo, texts: Texts) -> None:
        """Ask for the model that this start serves, and what it does with it."""
        if not info.supported_models:
            raise Internal("the engine names no model")
        model = await self.channel.get_model_info(info.supported_models[0])
        abilities = Abilities.read(info, model)
        if not model.max_context_length and abilities.part is not Part.ENCODE:
            raise Internal("the engine names no context length")
        markers = read_markers(model)
        if not markers and abilities.part is Part.ENCODE:
            raise Internal("an encoder engine that names no token for what it encodes")
        self.model = ServedModel(
            served_name=model.served_model_name,
            names=frozenset((model.served_model_name, model.model_id, *model.served_model_aliases)) - {""},
            model_id=model.model_id,
            max_context=model.max_context_length,
            markers=markers,
            text=await texts.load(model.tokenizer.source),
        )
        self.abilities = abilities
