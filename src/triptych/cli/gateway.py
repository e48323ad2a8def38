"""``triptych gateway``: OpenAI's HTTP API in front of running engines."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

from triptych.cli.flags import split_address


def run(engines: list[str], http: str) -> int:
    """Serve until a signal; returns the exit code."""
    return asyncio.run(_serve(engines, http))


async def _serve(engines: list[str], http: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as cleanup:
        url = await open_gateway(cleanup, engines, *split_address(http))
        print(f"The gateway is ready: {url}\nCtrl-C ends it.", flush=True)
        await stop.wait()
    return 0
