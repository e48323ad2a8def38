"""``triptych serve``: the engines of a topology as child processes, and the gateway in this one."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from triptych.cli.child import EngineProcess, EngineRefused
from triptych.cli.flags import model_directory, served_name, split_address
from triptych.cli.gateway import open_gateway
from triptych.cli.progress import loading_bar
from triptych.core.errors import StartupError
from triptych.rpc.server import check_address
from triptych.text.chat import ChatTemplate
from triptych.text.tokenizer import Tokenizer
from triptych.wire.channel import EngineChannel

if TYPE_CHECKING:
    from triptych.cli.options import EngineOptions


READY_SECONDS = 60.0
"""How long the gateway may take to learn a model from engines that are ready."""


TOPOLOGIES = {"aggregated": "aggregated"}
"""The role of the engine that each topology starts."""


def run(model: str, topology: str, options: EngineOptions, http: str, *, allow_plaintext: bool) -> int:
    """Serve until a signal; returns the exit code."""
    # what is wrong with MODEL or HOST:PORT is said before anything starts
    directory = model_directory(model)
    ChatTemplate.load(directory, Tokenizer.load(directory))
    check_address(*split_address(http), allow_plaintext=allow_plaintext)
    try:
        return asyncio.run(_serve(model, TOPOLOGIES[topology], options, http))
    except EngineRefused:
        return 1  # its own line said why


async def _serve(model: str, role: str, options: EngineOptions, http: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as cleanup:
        engine = await EngineProcess.start([model, "--role", role, *options.words()])
        cleanup.push_async_callback(engine.stop)
        up = asyncio.create_task(_bring_up(cleanup, engine, model, http))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({up, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            await asyncio.wait({up})
            return 0
        print(f"{served_name(model, options.served_name)} is ready: {up.result()}\nCtrl-C ends it.", flush=True)
        ended = asyncio.create_task(engine.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            print(f"triptych: the engine ended by itself (exit code {ended.result()})", file=sys.stderr)
            return 1
        print("draining ...", flush=True)
    return 0


async def _bring_up(cleanup: AsyncExitStack, engine: EngineProcess, model: str, http: str) -> str:
    """Wait for the engine, open the gateway, and wait until a request would be answered; returns the URL."""
    with loading_bar(model) as bar:
        await engine.wait_ready(bar)
    opened = await open_gateway(cleanup, [EngineChannel(engine.address)], *split_address(http))
    try:
        async with asyncio.timeout(READY_SECONDS):
            await opened.router.wait_ready()
    except TimeoutError:
        raise StartupError(f"the gateway could not use its engine: {opened.router.engines[0].detail}") from None
    return opened.url
