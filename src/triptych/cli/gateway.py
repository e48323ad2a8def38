"""``triptych gateway``: OpenAI's HTTP API in front of running engines."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from triptych.cli.flags import split_address
from triptych.gateway.app import Gateway
from triptych.gateway.server import serve
from triptych.rpc.server import check_address
from triptych.wire.channel import EngineChannel

if TYPE_CHECKING:
    from triptych.gateway.route import Router
    from triptych.wire.tls import ChannelTls


def run(engines: list[str], tls: ChannelTls | None, http: str, *, allow_plaintext: bool) -> int:
    """Serve until a signal; returns the exit code. Changes of the engines' states are printed."""
    check_address(*split_address(http), allow_plaintext=allow_plaintext)  # the same rule for every listener
    logging.basicConfig(format="%(message)s")
    logging.getLogger("triptych.gateway").setLevel(logging.INFO)
    return asyncio.run(_serve(engines, tls, http))


async def _serve(engines: list[str], tls: ChannelTls | None, http: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as cleanup:
        opened = await open_gateway(cleanup, [EngineChannel(engine, tls) for engine in engines], *split_address(http))
        print(f"The gateway listens: {opened.url}\nCtrl-C ends it.", flush=True)
        await stop.wait()
        print("draining ...", flush=True)
    return 0


class OpenGateway(NamedTuple):
    """A gateway that listens."""

    url: str
    router: Router


async def open_gateway(cleanup: AsyncExitStack, engines: list[EngineChannel], host: str, port: int) -> OpenGateway:
    """Serve a gateway until ``cleanup`` is closed.

    Raises:
        StartupError: the address cannot be had.
    """
    gateway = await cleanup.enter_async_context(Gateway(engines))
    return OpenGateway(await cleanup.enter_async_context(serve(gateway.app, host, port)), gateway.router)
