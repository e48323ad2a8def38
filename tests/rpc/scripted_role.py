"""A role whose answers are written by the test."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from triptych.core.errors import (
    AdapterConflict,
    AdapterNotFound,
    DuplicateRequest,
    KvSessionNotFound,
    ReferenceNotFound,
    RequestNotFound,
    TriptychError,
)
from triptych.core.events import Event, Finished, FinishReason, Span, Tokens, Usage
from triptych.core.media import Modality
from triptych.roles.contract import (
    AbortOutcome,
    EngineDescription,
    HealthCheck,
    HealthState,
    Load,
    ModelDescription,
    RoleName,
    TransferOutcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from triptych.core.adapter import AdapterInfo
    from triptych.core.kv_events import KvBatch
    from triptych.core.request import GenerateRequest

Step = Event | BaseException | asyncio.Event
"""An event to send, an error to raise, or something to wait for."""
Item = TypeVar("Item")

SPANS = (Span("prefill", 1.5e9, 1.5e9 + 1), Span("decode", 1.5e9 + 1, 1.5e9 + 2))


def answer(request: GenerateRequest) -> list[Step]:
    """Two deltas and an end."""
    usage = Usage(prompt_tokens=len(request.prompt), completion_tokens=2, cached_prompt_tokens=0)
    return [
        Tokens(request.request_id, (7,), "he"),
        Tokens(request.request_id, (8,), "llo"),
        Finished(request.request_id, FinishReason.LENGTH, usage, spans=SPANS),
    ]


class Player(Generic[Item]):
    """Plays a script."""

    def __init__(self, script: Iterable[Item | BaseException | asyncio.Event]) -> None:
        self._script = iter(script)
        self.waiting = asyncio.Event()
        self.closed = asyncio.Event()

    async def __anext__(self) -> Item:
        for step in self._script:
            if isinstance(step, asyncio.Event):
                self.waiting.set()
                await step.wait()
            elif isinstance(step, BaseException):
                raise step
            else:
                return step
        raise StopAsyncIteration


class ScriptedAnswer(Player[Event]):
    """Remembers whether and how it was closed."""

    def __init__(self, script: Iterable[Step], close: Callable[[], None]) -> None:
        super().__init__(script)
        self._close = close
        self.close_begun = asyncio.Event()
        self.closing: asyncio.Event | None = None
        """Set by a test to make cleanup wait."""
        self.token_text: Callable[[int], str] | None = None

    def __aiter__(self) -> ScriptedAnswer:
        return self

    async def aclose(self) -> None:
        self.close_begun.set()
        if self.closing is not None:
            await self.closing.wait()
        if not self.closed.is_set():
            self.closed.set()
            self._close()


class ScriptedSubscription(Player["KvBatch"]):
    def __aiter__(self) -> ScriptedSubscription:
        return self

    def close(self) -> None:
        self.closed.set()


@dataclass
class ScriptedRole:
    """Implements ``Role``. ``script`` says what an answer is, ``refusal`` refuses requests and subscriptions."""

    script: Callable[[GenerateRequest], Iterable[Step]] = answer
    refusal: BaseException | None = None
    modalities: tuple[Modality, ...] = (Modality.IMAGE,)
    video_token_id: int | None = None
    checks: tuple[HealthCheck, ...] = (HealthCheck("scheduler", HealthState.READY),)
    requests: list[GenerateRequest] = field(default_factory=list)
    answers: list[ScriptedAnswer] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    undecided: bool = False
    """Whether ``accept`` waits until it is cancelled."""
    deciding: asyncio.Event = field(default_factory=asyncio.Event)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    token_text: Callable[[int], str] | None = None
    description: dict[str, Any] = field(default_factory=dict)
    """What differs from the usual engine."""
    loras: list[AdapterInfo] = field(default_factory=list)
    kv_script: Callable[[], Iterable[KvBatch | BaseException | asyncio.Event]] = tuple
    asked_kv: list[tuple[bool, int]] = field(default_factory=list)
    """Snapshot and start of every subscription."""
    subscriptions: list[ScriptedSubscription] = field(default_factory=list)
    sessions: set[str] = field(default_factory=set)
    """Those that wait for a decode engine."""
    gone: set[str] = field(default_factory=set)
    """Those that were let go."""
    outputs: dict[str, TransferOutcome] = field(default_factory=dict)
    """Of an encoder, and what has become of them."""

    @property
    def model(self) -> ModelDescription:
        return ModelDescription(
            model_id="/models/scripted",
            served_name="scripted",
            tokenizer_source="/models/scripted",
            max_context=4096,
            context_limit="the model's own window",
            modalities=self.modalities,
            image_token_id=42 if self.modalities else None,
            video_token_id=self.video_token_id,
        )

    @property
    def engine(self) -> EngineDescription:
        usual = EngineDescription(
            role=RoleName.AGGREGATED,
            instance_id="instance-1",
            device="cpu",
            dtype="float32",
            block_size=16,
            num_blocks=100,
            max_running_requests=8,
            max_batched_tokens=512,
            max_num_sequences=8,
            guided=True,
            max_loras=2,
            kv_event_buffer=10,
            kv_event_heartbeat=1.5,
        )
        return replace(usual, **self.description)

    async def accept(self, request: GenerateRequest) -> ScriptedAnswer:
        self.requests.append(request)
        if self.undecided:
            self.deciding.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.set()
        if self.refusal is not None:
            raise self.refusal
        if request.request_id in self.live:
            raise DuplicateRequest(f"request id {request.request_id!r} is in use by a live request")
        request_id = request.request_id  # an answer does not keep its request alive
        self.live.add(request_id)
        self.answers.append(ScriptedAnswer(self.script(request), lambda: self._close(request_id)))
        self.answers[-1].token_text = self.token_text if request.detokenize else None
        return self.answers[-1]

    def _close(self, request_id: str) -> None:
        self.live.discard(request_id)
        self.finished.add(request_id)

    async def abort(self, request_id: str) -> AbortOutcome:
        if request_id in self.live:
            return AbortOutcome.ABORTED
        if request_id in self.finished:
            return AbortOutcome.ALREADY_FINISHED
        raise RequestNotFound(f"no request {request_id!r}")

    async def abort_all(self) -> int:
        return len(self.live)

    async def abort_session(self, session_id: str) -> AbortOutcome:
        if session_id in self.sessions:
            self.sessions.remove(session_id)
            self.gone.add(session_id)
            return AbortOutcome.ABORTED
        if session_id in self.gone:
            return AbortOutcome.ALREADY_FINISHED
        raise KvSessionNotFound(f"no KV session {session_id!r}")

    async def abort_rows(self, cache_id: str) -> AbortOutcome:
        waits = self.transfer_outcome(cache_id) is TransferOutcome.NOT_STARTED
        if waits:
            self.outputs[cache_id] = TransferOutcome.FAILED
        return AbortOutcome.ABORTED if waits else AbortOutcome.ALREADY_FINISHED

    def transfer_outcome(self, cache_id: str) -> TransferOutcome:
        if cache_id not in self.outputs:
            raise ReferenceNotFound(f"no encoder output {cache_id!r}")
        return self.outputs[cache_id]

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return tuple(self.loras)

    async def load_adapter(self, info: AdapterInfo) -> bool:
        if info in self.loras:
            return True
        if any(known.name == info.name or known.lora_id == info.lora_id for known in self.loras):
            raise AdapterConflict(f"adapter {info.name!r} or number {info.lora_id} is another one")
        self.loras.append(info)
        return False

    async def unload_adapter(self, name: str) -> AdapterInfo:
        for info in self.loras:
            if info.name == name:
                self.loras.remove(info)
                return info
        raise AdapterNotFound(f"no adapter {name!r} is loaded")

    def subscribe_kv(self, *, snapshot: bool, start: int) -> ScriptedSubscription:
        if self.refusal is not None:
            raise self.refusal
        self.asked_kv.append((snapshot, start))
        self.subscriptions.append(ScriptedSubscription(self.kv_script()))
        return self.subscriptions[-1]

    def load(self) -> Load:
        return Load(
            running_requests=len(self.live),
            queued_requests=2,
            used_blocks=3,
            total_blocks=100,
            running_tokens=40,
            waiting_tokens=50,
            prefill_batch=1,
            decode_batch=0,
        )

    def statistics(self) -> dict[str, dict[str, float]]:
        ledgers = {"blocks": {"used": 3.0, "free": 97.0}, "encoder_cache": {"hit-rate": 0.5}}
        return ledgers | ({"kv_sessions": {"waiting": float(len(self.sessions))}} if self.sessions else {})

    async def health(self, *, probe: bool) -> tuple[HealthCheck, ...]:
        if not probe:
            return self.checks
        return (*self.checks, HealthCheck("inference_probe", HealthState.READY))

    async def drain(self, grace: float) -> None:
        raise TriptychError("the server never drains its role")
