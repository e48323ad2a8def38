"""The receiving end of one connection: bytes as they come, no more than a little ahead of who reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

_AHEAD = 256 * 1024
"""Bytes held before the peer is made to wait."""


class Incoming(asyncio.Protocol):
    """One reader. Whoever opened the connection ends it by ``abort``, which waits for nothing."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._pieces: deque[bytes] = deque()
        self._held = 0
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open, and encrypted if it is to be."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Keep it for the reader."""
        self._pieces.append(data)
        self._held += len(data)
        if self._held > _AHEAD and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        """The peer has said all."""
        self._ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over, one way or another."""
        self._ended = True
        self._error = exc
        self._wake()

    def send(self, data: bytes) -> None:
        """Write a little, once the connection is open: it is not waited for."""
        if self._transport is not None:
            self._transport.write(data)

    async def read(self) -> bytes:
        """The next piece, up to 256 KiB; empty at the end.

        Raises:
            OSError: the connection broke.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        piece = self._pieces.popleft()
        self._held -= len(piece)
        if self._held <= _AHEAD and self._transport is not None:
            self._transport.resume_reading()
        return piece

    def abort(self) -> None:
        """Close the connection now, whatever state it is in."""
        if self._transport is not None:
            self._transport.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
