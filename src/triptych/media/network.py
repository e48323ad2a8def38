"""What fetching needs of the world: names to addresses, addresses to sockets, and time. Tests bring their own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from triptych.media.addresses import IpAddress


class Network(Protocol):
    """Knows no policy: whoever calls it has decided that it may."""

    async def resolve(self, host: str) -> list[str]:
        """All addresses of a name, in the order to try them.

        Raises:
            OSError: there is none, or nobody could tell.
        """

    async def dial(self, address: IpAddress, port: int) -> socket.socket:
        """A connected socket that does not block; the caller closes it.

        Raises:
            OSError: nobody answers there.
        """

    async def pause(self, seconds: float) -> None:
        """Let time pass."""

    def deadline(self, seconds: float) -> asyncio.Timeout:
        """A context that ends with TimeoutError once the time is over."""


class SystemNetwork:
    """The machine's own resolver and sockets; for one event loop.

    Args:
        lookups: names asked for at once. The resolver's calls cannot be ended, so each has a thread of its own and
            keeps its place until it returns, whether anybody still waits for it or not.
    """

    def __init__(self, lookups: int) -> None:
        self._places = asyncio.Semaphore(lookups)

    async def resolve(self, host: str) -> list[str]:
        """See ``Network``."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[str]] = loop.create_future()

        def finish(addresses: list[str], error: OSError | None) -> None:
            self._places.release()
            if found.done():
                return  # who asked has left
            if error is None:
                found.set_result(addresses)
            else:
                found.set_exception(error)

        def look_up() -> None:
            addresses, trouble = [], None
            try:
                entries = socket.getaddrinfo(host.encode(), None, type=socket.SOCK_STREAM)
                addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
            except OSError as error:
                trouble = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(finish, addresses, trouble)

        await self._places.acquire()
        try:
            threading.Thread(target=look_up, name="resolve", daemon=True).start()
        except RuntimeError as error:
            self._places.release()
            raise OSError("no thread can be started") from error
        return await found

    async def dial(self, address: IpAddress, port: int) -> socket.socket:
        """See ``Network``."""
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        dialled = socket.socket(family, socket.SOCK_STREAM)
        try:
            dialled.setblocking(False)
            await asyncio.get_running_loop().sock_connect(dialled, (str(address), port))
        except BaseException:
            dialled.close()
            raise
        return dialled

    async def pause(self, seconds: float) -> None:
        """See ``Network``."""
        await asyncio.sleep(seconds)

    def deadline(self, seconds: float) -> asyncio.Timeout:
        """See ``Network``."""
        return asyncio.timeout(seconds)
