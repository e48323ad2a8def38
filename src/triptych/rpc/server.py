"""Both services of one role on one listener."""

from __future__ import annotations

import errno
import socket
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
    address = check_address(host, port, allow_plaintext=allow_plaintext)
    inference = Inference(role, stall_seconds)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    inference.add_to(server)
    openengine_pb2_grpc.add_ControlServicer_to_server(Control(role), server)
    try:
        bound = server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise StartupError(f"cannot listen on {address}") from error
    await server.start()
    return RoleServer(server, inference, address._replace(port=bound))


def check_address(host: str, port: int, *, allow_plaintext: bool = False) -> Address:
    """See before a long start whether a server could listen there: bind once, and let go again.

    Raises:
        StartupError: the address is taken or not ours, or it would carry plaintext between machines.
    """
    address = Address(host, port)
    if not (allow_plaintext or address.loopback):
        raise StartupError(
            f"{address} can be reached from other machines and the traffic is not encrypted; "
            "listen on 127.0.0.1 or [::1], or pass --allow-plaintext"
        )
    _refuse_unbindable(address)
    return address


def _refuse_unbindable(address: Address) -> None:
    """Bind ourselves: unlike gRPC, the system says why it cannot be done."""
    failures: list[OSError] = []
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, target in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(target)
                except OSError as error:
                    failures.append(error)
    except OSError as error:  # an unknown host, or a family that this machine lacks
        raise StartupError(f"cannot listen on {address}: {error.strerror}") from error
    # A name may have addresses of a family that is switched off; gRPC needs only one of them.
    if len(failures) == len(found) or any(failure.errno == errno.EADDRINUSE for failure in failures):
        raise StartupError(f"cannot listen on {address}: {failures[0].strerror}") from failures[0]
