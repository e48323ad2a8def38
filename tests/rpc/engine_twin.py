"""An engine in memory, behind the same methods as ``wire.channel.EngineChannel``; its answers are scripted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from triptych.core.errors import Draining, ModelNotFound
from triptych.core.events import EosToken, Event, Failed, Finished, FinishReason, Span, Tokens, Usage
from triptych.wire.gen import generation_pb2, lifecycle_pb2, model_pb2, server_pb2
from triptych.wire.modality import VIDEO_MARKER

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from triptych.core.encoded import SealedReference
    from triptych.core.errors import TriptychError
    from triptych.core.request import GenerateRequest
    from triptych.core.session import SealedSession

Step = Event | asyncio.Event
"""An event to send, or something to wait for."""

USAGE = Usage(prompt_tokens=12, completion_tokens=3, cached_prompt_tokens=8)
SPANS = (Span("prefill", 1.0, 2.0), Span("decode", 2.0, 3.0))


def finished(reason: FinishReason = FinishReason.STOP) -> Finished:
    """The usual end."""
    return Finished("any", reason, USAGE, EosToken(1), SPANS)


class EngineTwin:
    """Serves one model that ``directory`` describes."""

    def __init__(self, directory: Path, address: str = "twin:1", name: str = "tiny") -> None:
        self.address = address
        self.directory = directory
        self.name = name
        self.max_context = 256
        self.modalities = [generation_pb2.MODALITY_IMAGE]
        self.image_token_id: int | None = None
        self.video_token_id: int | None = None
        self.sources = [generation_pb2.MEDIA_SOURCE_TYPE_DATA_URI, generation_pb2.MEDIA_SOURCE_TYPE_RAW_BYTES]
        self.role = server_pb2.ENGINE_ROLE_AGGREGATED
        self.instance_id = "one"
        self.state = lifecycle_pb2.HEALTH_STATE_READY
        self.down: TriptychError | None = None
        """Raised by every call while set."""
        self.refusal: TriptychError | None = None
        """Raised by Generate while set."""
        self.script: list[Step] = [Tokens("any", (1,), "It is"), Tokens("any", (2,), " red"), finished()]
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        """Names of requests, sessions and encoder outputs."""
        self.waiting = asyncio.Event()
        """Set when an answer waits for a step of its script."""
        self.ended = asyncio.Event()
        """Set when an answer has ended or was given up."""
        self.closed = False

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Play the script, from its first event on."""
        self._answer_if_up()
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        script = list(self.script)
        try:
            while isinstance(script[0], asyncio.Event):
                await self._wait(script.pop(0))
        except asyncio.CancelledError:
            self.ended.set()
            raise
        if isinstance(script[0], Failed):
            self.ended.set()
            raise script[0].error
        events = self._play(script)
        await anext(events)
        return events

    async def _play(self, script: list[Step]) -> AsyncGenerator[Event, None]:
        try:
            yield finished()  # consumed by generate, so that closing the generator runs the cleanup
            for step in script:
                if isinstance(step, asyncio.Event):
                    await self._wait(step)
                else:
                    yield step
        finally:
            self.ended.set()

    async def _wait(self, step: Step) -> None:
        assert isinstance(step, asyncio.Event)
        self.waiting.set()
        await step.wait()

    async def get_server_info(self) -> server_pb2.ServerInfo:
        """As its fields say."""
        self._answer_if_up()
        return server_pb2.ServerInfo(
            instance_id=self.instance_id, engine_role=self.role, supported_models=[self.name] if self.name else []
        )

    async def get_model_info(self, model: str) -> model_pb2.ModelInfo:
        """As its fields say."""
        self._answer_if_up()
        if model != self.name:
            raise ModelNotFound(model)
        info = model_pb2.ModelInfo(
            model_id=f"models/{self.name}",
            served_model_name=self.name,
            served_model_aliases=[f"{self.name}-alias"],
            max_context_length=self.max_context,
            tokenizer=model_pb2.TokenizerInfo(source=str(self.directory)),
            multimodal_capabilities=model_pb2.MultimodalCapabilities(
                aggregate_modalities=self.modalities,
                source_types=self.sources,
                routing_image_token_id=self.image_token_id,
            ),
        )
        if self.video_token_id is not None:
            info.extra.update({VIDEO_MARKER: self.video_token_id})
        return info

    async def health(self) -> lifecycle_pb2.HealthResponse:
        """As its fields say."""
        self._answer_if_up()
        return lifecycle_pb2.HealthResponse(state=self.state)

    async def abort(self, request_id: str) -> None:
        """Take note."""
        self.aborted.append(request_id)

    async def abort_session(self, session: SealedSession) -> None:
        """Take note."""
        self.aborted.append(session.session_id)

    async def abort_reference(self, reference: SealedReference) -> None:
        """Take note."""
        self.aborted.append(reference.cache_id)

    async def close(self) -> None:
        """Take note."""
        self.closed = True

    def kill(self) -> None:
        """Answer nothing from now on."""
        self.down = Draining(f"{self.address}: connection refused")

    def _answer_if_up(self) -> None:
        if self.down is not None:
            raise self.down
