"""``triptych serve``: the engines of a topology as child processes, and the gateway in this one."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from triptych.cli.child import EngineProcess
from triptych.cli.flags import model_directory, split_address
from triptych.cli.gateway import open_gateway
from triptych.cli.progress import loading_bar

if TYPE_CHECKING:
    from triptych.cli.options import EngineOptions


def run(options: EngineOptions, http: str) -> int:
    """Serve until a signal; returns the exit code."""
    model_directory(options.model)  # a wrong MODEL is said before anything starts
    return asyncio.run(_serve(options, http))


async def _serve(options: EngineOptions, http: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    async with AsyncExitStack() as cleanup:
        engine = await EngineProcess.start(options.flags())
        cleanup.push_async_callback(engine.stop)
        with loading_bar(options.name()) as bar:
            loading = asyncio.create_task(engine.wait_ready(bar))
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            loading.cancel()
            return 0
        loading.result()
        url = await open_gateway(cleanup, [engine.address], *split_address(http))
        print(f"{options.name()} is ready: {url}\nCtrl-C ends it.", flush=True)
        ended = asyncio.create_task(engine.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            print(f"triptych: the engine ended by itself (exit code {ended.result()})", file=sys.stderr)
            return 1
        print("draining ...", flush=True)
    return 0
