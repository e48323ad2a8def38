"""The HTTP client at the other end: its body read within limits, its going away noticed, answers sent to it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from triptych.core.errors import Cancelled, InvalidRequest, Overloaded
from triptych.gateway.errors import BodyTooLarge

if TYPE_CHECKING:
    from collections.abc import Coroutine, MutableMapping

    from starlette.types import Receive, Scope, Send

    from triptych.gateway.limits import GatewayLimits

Result = TypeVar("Result")


class Gone(Cancelled):
    """Expected. The client has closed the connection, or reads no more; nobody is there to be told."""


class HeldBytes:
    """Bytes of bodies that live requests hold."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    def take(self, size: int) -> None:
        """Count some more.

        Raises:
            Overloaded: they would be too many; they are not counted.
        """
        if self.held + size > self._limit:
            raise Overloaded("the gateway holds too many bytes of other requests; retry later")
        self.held += size

    def give(self, size: int) -> None:
        """Count some less."""
        self.held -= size


class Client:
    """One HTTP exchange. Use it as a context: the body's bytes count as held until it is left."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, limits: GatewayLimits, bytes_held: HeldBytes
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send_event = send
        self._limits = limits
        self._bytes_held = bytes_held
        self._size = 0
        self.answered = False
        """Whether a status was sent."""
        self.finished = False
        """Whether a whole answer was sent."""

    def __enter__(self) -> Client:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Hold the body's bytes no longer."""
        self._bytes_held.give(self._size)
        self._size = 0

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            BodyTooLarge: it has more bytes than are read; the rest is left unread.
            InvalidRequest: it did not come in time.
            Overloaded: other requests hold too much.
            Gone: the client went away.
        """
        limit = self._limits.max_body_bytes
        declared = dict(self._scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLarge(f"the body has {int(declared)} bytes; at most {limit}")
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    event = await self._receive()
                    if event["type"] == "http.disconnect":
                        raise Gone("the client closed the connection")
                    piece: bytes = event.get("body", b"")
                    if self._size + len(piece) > limit:
                        raise BodyTooLarge(f"the body has more than {limit} bytes")
                    self._bytes_held.take(len(piece))
                    self._size += len(piece)
                    pieces.append(piece)
                    if not event.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError:
            raise InvalidRequest(f"the body did not arrive within {self._limits.body_seconds:.0f} s") from None

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The work's result. It is cancelled at once when the client goes away; call it after ``body``.

        Raises:
            Gone: the client went away; the work has ended.
        """
        task = asyncio.create_task(work)
        gone = asyncio.create_task(self._closed())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Gone("the client closed the connection")
        finally:
            gone.cancel()
            task.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _closed(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: dict[str, str]) -> None:
        """Send the status."""
        self.answered = True
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def send(self, data: bytes, *, last: bool) -> None:
        """Send a part of the body.

        Raises:
            Gone: the client reads no more.
        """
        self.finished = last
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def send_json(self, status: int, body: bytes, request_id: str) -> None:
        """Send a whole answer."""
        headers = {"content-type": "application/json", "content-length": str(len(body)), "x-request-id": request_id}
        await self.start(status, headers)
        await self.send(body, last=True)

    async def _send(self, event: MutableMapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._limits.stall_seconds):
                await self._send_event(event)
        except TimeoutError:
            raise Gone("the client reads no more") from None
        except OSError:
            raise Gone("the client closed the connection") from None
