"""What a server sees of the engine behind it, whatever its role."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from triptych.core.errors import ModelNotFound
from triptych.core.load import Load as Load  # noqa: TC001 - handed on to those who see an engine through this file

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.core.adapter import AdapterInfo
    from triptych.core.events import Event
    from triptych.core.kv_events import KvBatch
    from triptych.core.media import Modality
    from triptych.core.request import GenerateRequest


class RoleName(enum.Enum):
    """The role that a process plays. The value is the word of the command line."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODER = "encoder"


class HealthState(enum.IntEnum):
    """``openengine.v1.HealthState`` by its wire numbers."""

    STARTING = 1
    READY = 2
    DEGRADED = 3
    NOT_READY = 4


class TransferOutcome(enum.IntEnum):
    """What has become of an encoder output: ``openengine.v1.TransferOutcome`` by its wire numbers."""

    FINISHED = 1
    """A consumer has all of it."""
    NOT_STARTED = 2
    """It waits, and can be taken."""
    IN_PROGRESS = 3
    """A consumer is taking it."""
    FAILED = 4
    """It was released, has expired, or could not be kept: nobody can take it any more."""


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
    video_token_id: int | None = None
    """The placeholder marker that stands for one video."""

    def check_name(self, name: str) -> None:
        """Refuse a name by which this model is not known: it has its served name and its canonical id.

        Raises:
            ModelNotFound: naming the model that is served.
        """
        if name not in (self.served_name, self.model_id):
            raise ModelNotFound(f"model {name!r} is not served here; {self.served_name!r} is")


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
    max_num_sequences: int
    """Outputs of one request."""
    guided: bool
    """Whether answers can be bound by a grammar: the library is installed and the model has an end of sequence."""
    max_loras: int
    """Adapters that may be loaded at once; 0 when adapters are switched off."""
    kv_event_buffer: int
    """Batches of KV events that can be replayed; 0 when they are switched off."""
    kv_event_heartbeat: float
    """Seconds after which a subscriber hears something even when nothing changed."""
    kv_backend: str = ""
    """The transport that moves KV between this engine and others; empty when there is none."""
    hands_over: bool = False
    """Whether it computes prompts for other engines, and lets go of what waits for them when asked."""
    takes_over: bool = False
    """Whether it goes on from what other engines computed, whose KV it fetches."""
    row_backend: str = ""
    """The transport that moves encoder rows between this engine and others; empty when there is none."""
    encodes: bool = False
    """Whether it encodes media for other engines."""
    takes_rows: bool = False
    """Whether it takes encoder outputs in place of media."""
    requires_rows: bool = False
    """Whether it takes no media but by encoder outputs: it has no tower."""
    fetches: bool = False
    """Whether media are taken by URL: they are fetched here."""
    fingerprint: bytes = b""
    """32 bytes: model revision and processor settings; where rows move, both engines must have the same."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One named part of the engine's health."""

    name: str
    state: HealthState
    message: str = ""


class Answer(Protocol):
    """The events of one accepted request: deltas, then exactly one terminal event, then the end."""

    @property
    def token_text(self) -> Callable[[int], str] | None:
        """What a token adds to a text, from any thread; None where the request wants no text."""
        ...

    def __aiter__(self) -> Answer:
        """Itself."""
        ...

    async def __anext__(self) -> Event:
        """The next event."""
        ...

    async def aclose(self) -> None:
        """Abort the request if it is still running and free its id. Idempotent; needed on every exit."""
        ...


class KvSubscription(Protocol):
    """Batches of KV events, in order and without gaps; it ends only by an error."""

    def __aiter__(self) -> KvSubscription:
        """Itself."""
        ...

    async def __anext__(self) -> KvBatch:
        """The next batch, or a heartbeat.

        Raises:
            Overloaded: the subscriber was too slow and would have missed a batch.
            Draining: the engine is shutting down.
        """
        ...

    def close(self) -> None:
        """Unsubscribe. Idempotent; needed on every exit."""
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
        """End one request; each of its outputs ends with a CANCELLED finish. What waits of it for others ends.

        Raises:
            RequestNotFound: the id is neither live nor remembered as finished.
        """
        ...

    async def abort_all(self) -> int:
        """End every request, and everything that waits for other engines; returns how many there were."""
        ...

    async def abort_session(self, session_id: str) -> AbortOutcome:
        """Let go of a session that waits for a decode engine, soon; one that is being taken is taken whole.

        Raises:
            KvSessionNotFound: the id is neither waiting nor remembered as over.
            UnsupportedFeature: this engine hands nothing over.
        """
        ...

    async def abort_rows(self, cache_id: str) -> AbortOutcome:
        """Let go of an encoder output that waits to be used, soon; one that is being taken is taken whole.

        Raises:
            ReferenceNotFound: the id is neither waiting nor remembered as over.
            UnsupportedFeature: this engine encodes for nobody.
        """
        ...

    def transfer_outcome(self, cache_id: str) -> TransferOutcome:
        """What has become of an encoder output.

        Raises:
            ReferenceNotFound: the id is neither waiting nor remembered as over.
            UnsupportedFeature: this engine encodes for nobody.
        """
        ...

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The loaded LoRA adapters."""
        ...

    async def load_adapter(self, info: AdapterInfo) -> bool:
        """Load a LoRA adapter; returns whether the very same was loaded already.

        Raises:
            AdapterConflict: another adapter has the id or the name.
            InvalidRequest: the directory or the adapter cannot be used.
            Overloaded: as many are loaded as are allowed.
            Draining: the engine is shutting down.
            WrongState: adapters are switched off.
        """
        ...

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Forget a LoRA adapter; requests that already use it keep it.

        Raises:
            AdapterNotFound: none of this name is loaded.
            WrongState: adapters are switched off, or this one is still being loaded.
        """
        ...

    def subscribe_kv(self, *, snapshot: bool, start: int) -> KvSubscription:
        """Follow the cached KV blocks.

        Args:
            snapshot: begin with everything that is cached now, see ``KvBatch``; ``start`` is then not looked at.
            start: replay from the batch of this number; 0 begins with what happens next.

        Raises:
            InvalidRequest: ``start`` is no longer buffered, or lies beyond the next number.
            Overloaded: there are too many subscribers already.
            Draining: the engine is shutting down.
            WrongState: KV events are switched off.
        """
        ...

    def load(self) -> Load:
        """How busy the engine is, at most one step old."""
        ...

    def statistics(self) -> dict[str, dict[str, float]]:
        """Every ledger's counters by ledger name, for metrics."""
        ...

    async def health(self, *, probe: bool) -> tuple[HealthCheck, ...]:
        """Named checks, answered without the engine thread unless ``probe`` asks for a token, or a picture's rows."""
        ...

    async def drain(self, grace: float) -> None:
        """Refuse new requests, wait up to ``grace`` seconds for the live ones, abort the rest, stop. Idempotent."""
        ...
