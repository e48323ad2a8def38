from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.rpc.scripted_role import ScriptedRole
from triptych.rpc.server import serve_role
from triptych.wire.channel import EngineChannel
from triptych.wire.gen import generation_pb2, openengine_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass
class Served:
    """A scripted role behind a real server, with a plain gRPC client and one of ours."""

    role: ScriptedRole
    address: str
    channel: EngineChannel
    inference: Any
    control: Any

    def generate(
        self, request_id: str = "r", *, metadata: Any = (), timeout: float | None = None, **fields: Any
    ) -> Any:
        """A call for two words, with whatever the test changes."""
        message = generation_pb2.GenerateRequest(
            **({"request_id": request_id, "model": "scripted", "prompt": "hi"} | fields)
        )
        return self.inference.Generate(message, metadata=tuple(metadata), timeout=timeout)


class Serve:
    """Starts servers that the fixture stops."""

    def __init__(self, cleanup: AsyncExitStack) -> None:
        self._cleanup = cleanup

    async def __call__(self, role: ScriptedRole | None = None, **options: Any) -> Served:
        """``options`` are those of ``serve_role``."""
        role = ScriptedRole() if role is None else role
        server = await serve_role(role, "127.0.0.1", 0, **options)
        self._cleanup.push_async_callback(server.stop, None)
        plain = grpc.aio.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)])
        self._cleanup.push_async_callback(plain.close)
        channel = EngineChannel(server.address)
        self._cleanup.push_async_callback(channel.close)
        inference = openengine_pb2_grpc.InferenceStub(plain)
        return Served(role, server.address, channel, inference, openengine_pb2_grpc.ControlStub(plain))


class Foreign:
    """Starts engines of another make, which send what the test says and leave their stream open behind an end."""

    def __init__(self, cleanup: AsyncExitStack) -> None:
        self._cleanup = cleanup

    async def __call__(self, *messages: generation_pb2.GenerateResponse | bytes) -> EngineChannel:
        sent = [message if isinstance(message, bytes) else message.SerializeToString() for message in messages]
        ends = any(isinstance(message, bytes) or message.HasField("finished") for message in messages)

        async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
            for message in sent:
                yield message
            if ends:
                await asyncio.Event().wait()

        server = grpc.aio.server()
        handlers = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("openengine.v1.Inference", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._cleanup.push_async_callback(server.stop, None)
        channel = EngineChannel(f"127.0.0.1:{port}")
        self._cleanup.push_async_callback(channel.close)
        return channel


@pytest.fixture
async def foreign() -> AsyncIterator[Foreign]:
    async with AsyncExitStack() as cleanup:
        yield Foreign(cleanup)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as cleanup:
        yield Serve(cleanup)
