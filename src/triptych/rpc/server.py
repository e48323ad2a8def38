"""Both services of one role on one listener."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

import grpc

from triptych.core.errors import StartupError
from triptych.rpc.address import Address
from triptych.rpc.control import Control, OnShutdown
from triptych.rpc.inference import Inference
from triptych.rpc.kv_events import KvEvents
from triptych.rpc.message_bytes import MessageBytes
from triptych.rpc.watchdog import STALL_SECONDS
from triptych.wire.codec_reference import ReferenceCodec
from triptych.wire.codec_session import Endpoint, SessionCodec
from triptych.wire.limits import MAX_MESSAGE

if TYPE_CHECKING:
    from triptych.roles.contract import Role
    from triptych.rpc.tls import TlsFiles
    from triptych.wire.handoff_signature import HandoffSigner

SERVER_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    # A second server on a taken port must fail, not share it.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Clients may ping as often as we do, also while their calls are quiet.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # A call of which nothing is read stores 64 KiB. With this on, each would store what the network carries at a time:
    # many MiB. A message that is being read comes up to 1 MiB a round trip either way.
    ("grpc.http2.bdp_probe", 0),
)

GRPC = "grpc"
"""The protocol of a session's or a reference's endpoint: there its engine answers Control."""


class RoleServer:
    """A server that answers calls; ``serve_role`` makes it."""

    def __init__(self, server: grpc.aio.Server, inference: Inference, messages: MessageBytes, address: Address) -> None:
        self._server = server
        self._inference = inference
        self._messages = messages
        self.address = str(address)
        """HOST:PORT with the real port."""

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls, give live ones ``grace`` seconds, end the rest and wait for their cleanup."""
        await self._server.stop(grace)
        await self._inference.settled()
        await self._messages.settled()


async def serve_role(
    role: Role,
    host: str,
    port: int,
    *,
    allow_plaintext: bool = False,
    tls: TlsFiles | None = None,
    on_shutdown: OnShutdown | None = None,
    signer: HandoffSigner | None = None,
    messages: MessageBytes | None = None,
    stall_seconds: float = STALL_SECONDS,
) -> RoleServer:
    """Listen and serve on the running event loop. Port 0 takes a free one.

    Args:
        role: what is served.
        host: an address or a name of this machine's.
        port: where.
        allow_plaintext: whether traffic between machines may go unencrypted.
        tls: encrypt it; any address will do then.
        on_shutdown: begins to end the process; without it ``Control.Shutdown`` is not offered.
        signer: signs the sessions and references that leave, and proves those that come; None: neither.
        messages: counts those of requests; None: of its own, with the usual limit.
        stall_seconds: how long a consumer may leave one event unread.

    Raises:
        StartupError: the address is taken or not ours, a file of ``tls`` is not usable, or plaintext would go between
            machines.
    """
    address = check_address(host, port, allow_plaintext=allow_plaintext or tls is not None)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    try:
        if tls is None:
            bound = server.add_insecure_port(str(address))
        else:
            bound = server.add_secure_port(str(address), tls.credentials())
    except RuntimeError as error:
        raise StartupError(f"cannot listen on {address}") from error
    address = address._replace(port=bound)
    endpoints = (Endpoint(*address.connectable, GRPC),)
    sessions, references = SessionCodec(endpoints, signer), ReferenceCodec(endpoints, signer)
    messages = MessageBytes() if messages is None else messages
    inference = Inference(role, sessions, references, messages, stall_seconds)
    inference.add_to(server)
    kv_events = KvEvents(role, address, stall_seconds)
    kv_events.add_to(server)
    Control(role, kv_events, sessions, references, on_shutdown).add_to(server)
    await server.start()
    return RoleServer(server, inference, messages, address)


def check_address(host: str, port: int, *, allow_plaintext: bool = False) -> Address:
    """See before a long start whether a server could listen there: bind once, and let go again.

    Raises:
        StartupError: the address is taken or not ours, or it would carry plaintext between machines.
    """
    address = Address(host, port)
    if not (allow_plaintext or address.loopback):
        raise StartupError(
            f"{address} can be reached from other machines and the traffic is not encrypted; "
            "listen on 127.0.0.1 or [::1], or pass --allow-plaintext; gRPC can be encrypted with --tls-certificate"
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
