"""Prometheus metrics of one role and its server: every number of load and ledgers, read at the moment of the scrape."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from triptych.core.errors import StartupError
from triptych.rpc.server import check_address

if TYPE_CHECKING:
    from collections.abc import Iterable
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

    from triptych.roles.contract import Role
    from triptych.rpc.address import Address
    from triptych.rpc.message_bytes import MessageBytes

SCRAPE_SECONDS = 5.0
"""How long a scrape waits for the event loop."""

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


class RoleCollector(Collector):
    """Collects on a thread of the HTTP server; the role is read on its own event loop."""

    def __init__(self, role: Role, messages: MessageBytes, loop: asyncio.AbstractEventLoop) -> None:
        self._role = role
        self._messages = messages
        self._loop = loop

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """One gauge ``triptych_<ledger>_<name>`` for every number."""
        ledgers = asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(SCRAPE_SECONDS)
        for ledger, numbers in ledgers.items():
            for name, number in numbers.items():
                metric = _NOT_IN_NAMES.sub("_", f"triptych_{ledger}_{name}")
                yield GaugeMetricFamily(metric, f"{name} of {ledger}", value=number)

    async def _read(self) -> dict[str, dict[str, float]]:
        own = {"load": asdict(self._role.load()), "messages": self._messages.statistics()}
        return own | self._role.statistics()


class MetricsServer:
    """Answers GET requests on a thread; ``serve_metrics`` makes it."""

    def __init__(self, server: WSGIServer, thread: Thread, address: Address) -> None:
        self._server = server
        self._thread = thread
        self.address = str(address)
        """HOST:PORT with the real port."""

    async def stop(self) -> None:
        """Close the port and end the thread."""
        # Off the loop, for which a scrape in flight may be waiting.
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


async def serve_metrics(
    role: Role, messages: MessageBytes, host: str, port: int, *, allow_plaintext: bool = False
) -> MetricsServer:
    """Listen and serve. Port 0 takes a free one. ``messages`` are those of the role's server.

    Raises:
        StartupError: the address is taken or not ours, or it would carry plaintext between machines.
    """
    address = check_address(host, port, allow_plaintext=allow_plaintext)
    registry = CollectorRegistry()
    registry.register(RoleCollector(role, messages, asyncio.get_running_loop()))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise StartupError(f"cannot listen on {address}: {error.strerror or error}") from error
    return MetricsServer(server, thread, address._replace(port=server.server_port))
