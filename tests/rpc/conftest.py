from __future__ import annotations

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

    async def __call__(self, role: ScriptedRole | None = None, stall_seconds: float = 30.0) -> Served:
        role = ScriptedRole() if role is None else role
        server = await serve_role(role, "127.0.0.1", 0, stall_seconds=stall_seconds)
        self._cleanup.push_async_callback(server.stop, None)
        plain = grpc.aio.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)])
        self._cleanup.push_async_callback(plain.close)
        channel = EngineChannel(server.address)
        self._cleanup.push_async_callback(channel.close)
        inference = openengine_pb2_grpc.InferenceStub(plain)
        return Served(role, server.address, channel, inference, openengine_pb2_grpc.ControlStub(plain))


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as cleanup:
        yield Serve(cleanup)
