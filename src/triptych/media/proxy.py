"""By way of an HTTP proxy, where an operator has named one.

The proxy resolves names and dials: which addresses it may reach is then its rule to keep. Hosts that are addresses, the
list of hosts and the list of ports are still checked here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import h11

from triptych.media.exchange import MAX_HEAD
from triptych.media.fetch_failure import FetchFailure

if TYPE_CHECKING:
    import socket

    from triptych.media.target import Target


async def open_tunnel(proxy: socket.socket, target: Target) -> None:
    """Have the proxy pass bytes on to the target, both ways.

    Args:
        proxy: connected to it; still the caller's afterwards.
        target: an https one.

    Raises:
        FetchFailure: it does not.
    """
    loop = asyncio.get_running_loop()
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
    host = f"[{target.host}]" if ":" in target.host else target.host
    ask = h11.Request(method="CONNECT", target=f"{host}:{target.port}", headers=[("Host", f"{host}:{target.port}")])
    try:
        await loop.sock_sendall(proxy, (http.send(ask) or b"") + (http.send(h11.EndOfMessage()) or b""))
        while not isinstance(event := http.next_event(), h11.Response):
            if event is h11.NEED_DATA:
                data = await loop.sock_recv(proxy, MAX_HEAD)
                if not data:
                    raise ConnectionResetError
                http.receive_data(data)
    except OSError as error:
        raise FetchFailure(f"{target.host}: the proxy went away (--fetch-proxy)", retryable=True) from error
    except h11.RemoteProtocolError as error:
        raise FetchFailure(f"{target.host}: the proxy does not answer in HTTP (--fetch-proxy)") from error
    more = " and more" if http.trailing_data[0] else ""  # than the head, where the client is to speak first
    if event.status_code // 100 != 2 or more:
        raise FetchFailure(f"{target.host}: the proxy answered {event.status_code}{more} (--fetch-proxy)")
