"""Both services of one role on one listener."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from triptych.core.errors import StartupError
from triptych.rpc.address import Address
from triptych.rpc.control import Control
from triptych.rpc.inference import STALL_SECONDS, Inference
from triptych.wire.channel import MAX_MESSAGE
from triptych.wire.gen import openengine_pb2_grpc

if TYPE_CHECKING:
    from triptych.roles.contract import Role

SERVER_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    # A second server on a taken port must fail, not share it.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Clients may ping as often as we do, also while their calls are quiet.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


class RoleServer:
    """A server that answers calls; ``serve_role`` makes it."""

    def __init__(self, server: grpc.aio.Server, inference: Inference, address: Address) -> None:
        self._server = server
        self._inference = inference
        self.address = str(address)
        """HOST:PORT with the real port."""

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls, give live ones ``grace`` seconds, end the rest and wait for their cleanup."""
        await self._server.stop(grace)
        await self._inference.settled()


async def serve_role(
    role: Role, host: str, port: int, *, allow_plaintext: bool = False, stall_seconds: float = STALL_SECONDS
) -> RoleServer:
    """Listen and serve on the running event loop. Port 0 takes a free one.

    Raises:
        StartupError: the address is taken or not ours, or it would carry plaintext between machines.
    """
    address = Address(host, port)
    if not (allow_plaintext or address.loopback):
        raise StartupError(
            f"{address} can be reached from other machines and the traffic is not encrypted; "
            "listen on 127.0.0.1 or [::1], or pass --allow-plaintext"
        )
    inference = Inference(role, stall_seconds)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    openengine_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    openengine_pb2_grpc.add_ControlServicer_to_server(Control(role), server)
    try:
        bound = server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise StartupError(f"cannot listen on {address}: the port is taken or the host is not ours") from error
    await server.start()
    return RoleServer(server, inference, address._replace(port=bound))
