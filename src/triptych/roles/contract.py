"""What a server sees of the engine behind it, whatever its role."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from triptych.core.load import Load as Load  # noqa: TC001 - handed on to those who see an engine through this file

if TYPE_CHECKING:
    from triptych.core.events import Event
    from triptych.core.media import Modality
    from triptych.core.request import GenerateRequest


class RoleName(enum.Enum):
    """The role that a process plays. The value is the word of the command line."""

    AGGREGATED = "aggregated"


class HealthState(enum.IntEnum):
    """``openengine.v1.HealthState`` by its wire numbers."""

    STARTING = 1
    READY = 2
    DEGRADED = 3
    NOT_READY = 4


class AbortOutcome(enum.Enum):
    """What an abort found."""

    ABORTED = "aborted"
    ALREADY_FINISHED = "already finished"


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The served model as clients see it."""

    model_id: str
    """Canonical source: the directory's path, or ``demo``."""
    served_name: str
    tokenizer_source: str
    """Directory with tokenizer.json and the chat template."""
    max_context: int
    """Prompt and answer together, in tokens; what the KV pool can hold counts too."""
    context_limit: str
    """What sets ``max_context``: the flag to change, or words that say there is none."""
    modalities: tuple[Modality, ...]
    """Media the model accepts; empty for a text-only model."""
    image_token_id: int | None
    """The placeholder marker that stands for one picture."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """The engine process as clients see it; fixed for its lifetime."""

    role: RoleName
    instance_id: str
    """Fresh for every start: the process incarnation."""
    device: str
    dtype: str
    block_size: int
    num_blocks: int
    max_running_requests: int
    max_batched_tokens: int


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One named part of the engine's health."""

    name: str
    state: HealthState
    message: str = ""


class Answer(Protocol):
    """The events of one accepted request: deltas, then exactly one Finished or Failed, then the end."""

    def __aiter__(self) -> Answer:
        """Itself."""
        ...

    async def __anext__(self) -> Event:
        """The next event."""
        ...

    async def aclose(self) -> None:
        """Abort the request if it is still running and free its id. Idempotent; needed on every exit."""
        ...


class Role(Protocol):
    """An engine in one role. All methods belong to the event loop that serves the network."""

    @property
    def model(self) -> ModelDescription:
        """The served model."""
        ...

    @property
    def engine(self) -> EngineDescription:
        """The process."""
        ...

    async def accept(self, request: GenerateRequest) -> Answer:
        """Validate and admit a request; the id is taken until the answer is closed.

        Raises:
            TriptychError: the request was not accepted and nothing is held.
        """
        ...

    async def abort(self, request_id: str) -> AbortOutcome:
        """End one request; its stream ends with a CANCELLED finish.

        Raises:
            RequestNotFound: the id is neither live nor remembered as finished.
        """
        ...

    async def abort_all(self) -> int:
        """End every request; returns how many were live."""
        ...

    def load(self) -> Load:
        """How busy the engine is, at most one step old."""
        ...

    def statistics(self) -> dict[str, dict[str, float]]:
        """Every ledger's counters by ledger name, for metrics."""
        ...

    async def health(self, *, probe: bool) -> tuple[HealthCheck, ...]:
        """Named checks, answered without the engine thread unless ``probe`` asks for one real token."""
        ...

    async def drain(self, grace: float) -> None:
        """Refuse new requests, wait up to ``grace`` seconds for the live ones, abort the rest, stop. Idempotent."""
        ...
