"""The HTTP server: a port, uvicorn behind it, and a clean end."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from triptych.core.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.types import ASGIApp

BACKLOG = 2048
"""Connections that wait to be taken."""
REQUEST_SECONDS = 30.0
"""How long a connection may stay without a whole request head; twice that where an answer was sent meanwhile."""
GRACE_SECONDS = 10
"""How long running answers may take to end when the server does."""


class _Protocol(H11Protocol):
    """HTTP/1.1 on one connection, which is closed when it brings no request for a while.

    uvicorn's own keep-alive limit begins after an answer, and ends with the first byte of the next request.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(REQUEST_SECONDS, self._close_if_silent, self.cycle)

    def _close_if_silent(self, seen: object) -> None:
        """``seen`` is the latest request when this was last asked."""
        if self.transport.is_closing():
            return
        answered = self.cycle is not None and self.cycle.response_complete  # perhaps with its body still unread
        if (answered or self.conn.their_state is h11.IDLE) and self.cycle is seen:
            self.transport.close()
        else:
            self.loop.call_later(REQUEST_SECONDS, self._close_if_silent, self.cycle)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to whoever runs the process."""
        yield


@asynccontextmanager
async def serve(app: ASGIApp, host: str, port: int, *, grace: int = GRACE_SECONDS) -> AsyncIterator[str]:
    """Serve while the context is entered. Yields the server's URL; with port 0 the system chooses the port.

    Args:
        app: what answers.
        host: a name or address of this machine.
        port: 0 to 65535.
        grace: seconds that running answers have to end on leaving the context; the rest is cut off.

    Raises:
        StartupError: the address is not one of this machine's, or the port is taken.
    """
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        http=_Protocol,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=grace,
    )
    server = _Server(config)
    up = asyncio.create_task(server.up.wait())
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.wait({up, running}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            raise StartupError("the HTTP server ended while starting")
        yield _url(listener)
    finally:
        up.cancel()
        server.should_exit = True
        await running
        if server.server_state.tasks:  # cut off, and about to say so to their clients and engines
            await asyncio.wait(server.server_state.tasks)


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65_535:
        raise StartupError(f"cannot listen on {host}:{port}: a port is a number up to 65535")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
