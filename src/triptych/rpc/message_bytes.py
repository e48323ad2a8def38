"""Bytes of the messages of Generate, from before they are here until somebody else counts what is kept of them.

    turn      the call may send: its message counts as the largest there can be, since nobody knows its size yet
    arrive    it counts as what it is, while it waits to be read and its request is looked at
    leave     the request is accepted, and its role counts what it keeps; or it is refused, or the call is gone

    what is here leaves no room for one more     who comes is refused, and so is who waits
    what may still arrive leaves none            who comes waits, in order

A call that waits holds no more than HTTP/2 lets a client send unasked, 64 KiB. So whatever they do, there is no more
than the limit, or one message where that is larger; and a message that is the only one is never refused.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from triptych.core.config import GIB
from triptych.core.errors import InvalidRequest, Overloaded
from triptych.wire.limits import MAX_MESSAGE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

MAX_BYTES_HELD = 4 * GIB
"""Of a server's requests."""
LEAST_BYTES_HELD = 2 * MAX_MESSAGE
"""With less, one that is undecided would keep all others out."""
MAX_LINE = 1024
"""Calls that may wait for their turn to send."""
ARRIVAL_SECONDS = 60.0
"""How long a message may take from its turn until it is here."""


class Message:
    """One that is here. It is counted until its call leaves ``MessageBytes.receive``."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = data

    def take(self) -> bytes:
        """Its bytes, once: nobody else holds them any more."""
        data, self._data = self._data, b""
        return data


class MessageBytes:
    """Those of several calls. Belongs to one event loop.

    Args:
        most: bytes of all messages together.
        seconds: that one may take to arrive.
    """

    def __init__(self, most: int = MAX_BYTES_HELD, seconds: float = ARRIVAL_SECONDS) -> None:
        self._most = most
        self._seconds = seconds
        self._held = 0
        """Bytes that are here."""
        self._arriving: set[asyncio.Task[Message]] = set()
        self._abandoned: set[asyncio.Task[Message]] = set()
        """Those of them whose calls are over."""
        self._granted = 0
        """Turns of calls whose message is not here yet."""
        self._line: deque[asyncio.Future[Overloaded | None]] = deque()
        """Those that wait for their turn. It comes as None."""
        self._refused = 0

    @asynccontextmanager
    async def receive(self, context: grpc.aio.ServicerContext) -> AsyncIterator[Message]:
        """Have a call send its message, of which its handler has read nothing, and count it meanwhile.

        Raises:
            Overloaded: too much is here, too many wait, or the message did not arrive in time.
            InvalidRequest: the call ends without a message.
        """
        await self._turn()
        message = await self._arrival(context)
        try:
            yield message
        finally:
            self._leave(message)

    def statistics(self) -> dict[str, float]:
        """Counts as of now."""
        return {
            "held_bytes": self._held,
            "arriving": self._granted,
            "waiting": len(self._line),
            "refused": self._refused,
        }

    async def settled(self) -> None:
        """Wait for what still arrives of calls that are over: soon, as gRPC ends it."""
        while self._arriving:
            await asyncio.wait(self._arriving)

    @property
    def _full(self) -> bool:
        return self._held > 0 and self._held + MAX_MESSAGE > self._most

    @property
    def _room(self) -> bool:
        counted = self._held + self._granted * MAX_MESSAGE
        return not counted or counted + MAX_MESSAGE <= self._most

    async def _turn(self) -> None:
        """Wait until the call may send."""
        if self._full:
            raise self._overloaded()
        if self._room:  # so nobody waits
            self._granted += 1
            return
        if len(self._line) >= MAX_LINE:
            self._refused += 1
            raise Overloaded(f"{len(self._line)} calls already wait to send their messages; retry later")
        turn: asyncio.Future[Overloaded | None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            refusal = await turn
        except asyncio.CancelledError:
            if turn in self._line:
                self._line.remove(turn)
            elif not turn.cancelled() and turn.result() is None:
                self._granted -= 1
                self._serve()
            raise
        if refusal is not None:
            raise refusal

    def _serve(self) -> None:
        while self._line and (self._full or self._room):
            turn = self._line.popleft()
            if turn.done():
                continue  # cancelled, and will soon see it
            if self._full:
                turn.set_result(self._overloaded())
            else:
                self._granted += 1
                turn.set_result(None)

    def _overloaded(self) -> Overloaded:
        self._refused += 1
        return Overloaded(
            f"messages of {self._held} bytes are held for requests that are not accepted yet, and one more may have "
            f"{MAX_MESSAGE}; at most {self._most} (--max-message-bytes-held); retry later"
        )

    async def _arrival(self, context: grpc.aio.ServicerContext) -> Message:
        # A task of its own, which nobody cancels: gRPC holds what has come until the call ends, and so long it counts.
        arriving = asyncio.create_task(self._arrive(context))
        self._arriving.add(arriving)
        arriving.add_done_callback(self._forget)
        left = True
        try:
            await asyncio.wait({arriving}, timeout=self._seconds)
            if not arriving.done():
                self._refused += 1
                raise Overloaded(f"the message did not arrive within {self._seconds:g} s; retry later")
            message = arriving.result()
            left = False
        finally:
            if left:
                self._abandon(arriving)
        return message

    async def _arrive(self, context: grpc.aio.ServicerContext) -> Message:
        size = 0
        try:
            data = await context.read()
            if not isinstance(data, bytes):  # the end of the stream
                raise InvalidRequest("the call has no message")
            size = len(data)
            return Message(data)
        finally:
            self._granted -= 1
            self._held += 0 if asyncio.current_task() in self._abandoned else size
            self._serve()

    def _abandon(self, arriving: asyncio.Task[Message]) -> None:
        if not arriving.done():
            self._abandoned.add(arriving)
        elif not arriving.cancelled() and arriving.exception() is None:
            self._leave(arriving.result())

    def _forget(self, arriving: asyncio.Task[Message]) -> None:
        self._arriving.discard(arriving)
        self._abandoned.discard(arriving)
        if not arriving.cancelled():
            arriving.exception()  # whoever still waits is told; else nobody needs to be

    def _leave(self, message: Message) -> None:
        self._held -= message.size
        self._serve()
