"""A plain gRPC client of prefill and decode engines."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc

from tests.drawings import shape_png
from triptych.wire.gen import generation_pb2, lifecycle_pb2, openengine_pb2_grpc, server_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from triptych.wire.gen import kv_pb2

SECONDS = 60.0
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


class Client:
    """A plain gRPC client of one engine."""

    def __init__(self, channel: Any) -> None:
        self.inference = openengine_pb2_grpc.InferenceStub(channel)
        self.control = openengine_pb2_grpc.ControlStub(channel)

    async def generate(self, **fields: Any) -> list[generation_pb2.GenerateResponse]:
        asked: dict[str, Any] = {"model": "demo", "sampling": generation_pb2.SamplingParams(temperature=0)}
        call = self.inference.Generate(generation_pb2.GenerateRequest(**(asked | fields)), timeout=SECONDS)
        return [event async for event in call]

    async def prefill(self, request_id: str) -> kv_pb2.KvSessionRef:
        """The session of a prompt with a picture."""
        request = generation_pb2.GenerateRequest(
            request_id=request_id,
            model="demo",
            prompt=f"{PICTURE}what colour is the circle?",
            media=[picture()],
            sampling=generation_pb2.SamplingParams(temperature=0),  # the first token is sampled there
        )
        request.extra.update({"request_type": "context_only"})
        events = [event async for event in self.inference.Generate(request, timeout=SECONDS)]
        assert [event.WhichOneof("event") for event in events] == ["prefill_ready"]
        return events[-1].prefill_ready.kv_session

    async def decode(self, request_id: str, session: kv_pb2.KvSessionRef) -> str:
        """The answer from then on."""
        events = await self._go_on(request_id, session)
        assert events[-1].WhichOneof("event") == "finished", events[-1]
        return "".join(event.token.text for event in events if event.WhichOneof("event") == "token")

    async def fails(self, request_id: str, session: kv_pb2.KvSessionRef) -> int:
        """The code of the error, which is all that comes."""
        (event,) = await self._go_on(request_id, session)
        return int(event.error.code)

    async def _go_on(self, request_id: str, session: kv_pb2.KvSessionRef) -> list[generation_pb2.GenerateResponse]:
        kv = generation_pb2.KvOptions(session=session)
        return await self.generate(request_id=request_id, prompt=f"{PICTURE}what colour is the circle?", kv=kv)

    async def abort(self, session: kv_pb2.KvSessionRef) -> int:
        response = await self.control.Abort(lifecycle_pb2.AbortRequest(kv_session=session), timeout=SECONDS)
        return int(response.status)

    async def load(self) -> server_pb2.LoadInfo:
        load: server_pb2.LoadInfo = await self.control.GetLoad(server_pb2.GetLoadRequest(), timeout=SECONDS)
        return load


def picture() -> generation_pb2.MediaItem:
    return generation_pb2.MediaItem(modality=generation_pb2.MODALITY_IMAGE, raw_bytes=shape_png("circle", "red"))


@asynccontextmanager
async def client(address: str) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield Client(channel)


async def idle(address: str) -> None:
    """Wait until an engine holds nothing for anybody."""
    async with client(address) as one, asyncio.timeout(SECONDS):
        while True:
            load = await one.load()
            if not (load.running_requests or load.queued_requests or load.active_kv_sessions or load.used_kv_blocks):
                return
            await asyncio.sleep(0.05)
