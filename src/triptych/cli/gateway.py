"""``triptych gateway``: OpenAI's HTTP API in front of running engines."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from triptych.cli.flags import split_address
from triptych.core.errors import StartupError
from triptych.gateway.app import Gateway
from triptych.gateway.server import check_listen, serve
from triptych.rpc.address import Address
from triptych.wire.channel import EngineChannel

if TYPE_CHECKING:
    from triptych.gateway.route import Router


def run(engines: list[str], http: str, *, allow_plaintext: bool) -> int:
    """Serve until a signal; returns the exit code. Changes of the engines' states are printed."""
    check_http(http, allow_plaintext=allow_plaintext)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("triptych.gateway").setLevel(logging.INFO)
    return asyncio.run(_serve(engines, http))


async def _serve(engines: list[str], http: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as cleanup:
        opened = await open_gateway(cleanup, engines, *split_address(http))
        print(f"The gateway listens: {opened.url}\nCtrl-C ends it.", flush=True)
        await stop.wait()
        print("draining ...", flush=True)
    return 0


def check_http(http: str, *, allow_plaintext: bool) -> None:
    """Refuse an address that cannot be had, or that other machines could reach unencrypted.

    Raises:
        StartupError: naming the address, or the flag.
    """
    address = Address(*split_address(http))
    if not (allow_plaintext or address.loopback):
        raise StartupError(
            f"{address} can be reached from other machines and the traffic is not encrypted; "
            "listen on 127.0.0.1 or [::1], or pass --allow-plaintext"
        )
    check_listen(address.host, address.port)


class OpenGateway(NamedTuple):
    """A gateway that listens."""

    url: str
    router: Router


async def open_gateway(cleanup: AsyncExitStack, engines: list[str], host: str, port: int) -> OpenGateway:
    """Serve a gateway until ``cleanup`` is closed.

    Raises:
        StartupError: the address cannot be had.
    """
    gateway = await cleanup.enter_async_context(Gateway([EngineChannel(engine) for engine in engines]))
    return OpenGateway(await cleanup.enter_async_context(serve(gateway.app, host, port)), gateway.router)
