"""A server of this machine for processes that are not to reach it, or only as they may: it counts who calls."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 10.0


class Site(socketserver.ThreadingTCPServer):
    """Behind every address of this machine, on one port. Answers by path with the bytes that stand there."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    request_queue_size = 128

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        """Whole answers, as they go over the wire; none for a path that is not here."""
        self.pauses: dict[str, float] = {}
        """Seconds before each next hundred bytes of a page; none for one that comes at once."""
        self.calls = 0
        """Connections."""
        self.asked: list[str] = []
        """Paths, with their queries."""
        super().__init__(("", 0), _Answer)
        self.port: int = self.server_address[1]

    def server_bind(self) -> None:
        if self.address_family is socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def verify_request(self, request: object, client_address: object) -> bool:
        self.calls += 1
        return True

    def url(self, path: str) -> str:
        """Of a page, by the machine's own address."""
        return f"http://127.0.0.1:{self.port}{path}"


class _Answer(socketserver.StreamRequestHandler):
    timeout = SECONDS
    server: Site

    def handle(self) -> None:
        path = self.rfile.readline().split(b" ")[1].decode()
        while self.rfile.readline().strip():
            pass
        self.server.asked.append(path)
        name = path.partition("?")[0]
        page, pause = self.server.pages.get(name, b""), self.server.pauses.get(name)
        if pause is None:
            self.wfile.write(page)
            return
        with suppress(OSError):  # who gives up closes
            for start in range(0, len(page), 100):
                time.sleep(pause)
                self.wfile.write(page[start : start + 100])


@contextmanager
def site() -> Iterator[Site]:
    """One that listens."""
    with Site() as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield one
        finally:
            one.shutdown()
            thread.join()
