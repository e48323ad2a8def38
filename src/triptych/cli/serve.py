"""``triptych serve``: the engines of a topology as child processes, and the gateway in this one."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from triptych.cli.child import EngineProcess, EngineRefused
from triptych.cli.flags import model_directory, served_name, split_address, split_topology
from triptych.cli.gateway import open_gateway
from triptych.cli.options import SECRET_VARIABLE
from triptych.cli.progress import loading_bars
from triptych.cli.transports import SHARED_DIR, signer_of
from triptych.core.errors import StartupError
from triptych.rpc.server import check_address
from triptych.text.chat import ChatTemplate
from triptych.text.tokenizer import Tokenizer
from triptych.wire.channel import EngineChannel

if TYPE_CHECKING:
    from triptych.cli.media import MediaFlags
    from triptych.cli.options import EncoderOptions, EngineOptions, HandoffOptions

READY_SECONDS = 60.0
"""How long the gateway may take to learn a model from engines that are ready."""


class EngineFlags(NamedTuple):
    """What the engines are started with."""

    options: EngineOptions
    media: MediaFlags
    handoff: HandoffOptions
    encoder: EncoderOptions

    def words(self, role: str, topology: tuple[str, ...]) -> list[str]:
        """As command-line words, for one of the engines of a topology. Each gets those that concern its role.

        Where there are encoders the others have none of their own.
        """
        words = self.options.words() + self.media.words()
        if role == "encoder":
            return words + self.encoder.words()
        words += self.handoff.words()
        if role == "decode":
            return words
        if "encoder" not in topology:
            return words + self.encoder.words()
        taken = replace(self.encoder, encoder_transport=self.encoder.encoder_transport or SHARED_DIR)
        return [*words, *taken.words(), "--requires-handoff"]

    def environment(self) -> dict[str, str]:
        """The secret, which everybody on this machine could read among the words; of this start's own if need be."""
        return {SECRET_VARIABLE: self.handoff.handoff_secret or secrets.token_hex(32)}


def run(model: str, topology: str, flags: EngineFlags, http: str, *, allow_plaintext: bool) -> int:
    """Serve until a signal; returns the exit code."""
    # what is wrong with MODEL or HOST:PORT is said before anything starts
    directory = model_directory(model)
    ChatTemplate.load(directory, Tokenizer.load(directory))
    check_address(*split_address(http), allow_plaintext=allow_plaintext)
    signer_of(flags.handoff)
    try:
        return asyncio.run(_serve(model, split_topology(topology), flags, http))
    except EngineRefused:
        return 1  # its own line said why


async def _serve(model: str, roles: tuple[str, ...], flags: EngineFlags, http: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    environment = flags.environment()
    async with AsyncExitStack() as cleanup:
        engines: list[EngineProcess] = []
        cleanup.push_async_callback(_stop_all, engines)
        for role in roles:
            engine = await EngineProcess.start(role, [model, *flags.words(role, roles)], environment)
            engines.append(engine)
        up = asyncio.create_task(_bring_up(cleanup, engines, model, http))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({up, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            await asyncio.wait({up})
            return 0
        name = served_name(model, flags.options.served_name)
        print(f"{name} is ready: {up.result()}\nCtrl-C ends it.", flush=True)
        ended = {asyncio.create_task(engine.wait()): engine for engine in engines}
        await asyncio.wait({*ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            for task, engine in ended.items():
                if task.done():
                    what = "the engine" if len(engines) == 1 else f"the {engine.role} engine on {engine.address}"
                    print(f"triptych: {what} ended by itself (exit code {task.result()})", file=sys.stderr)
            return 1
        print("draining ...", flush=True)
    return 0


async def _stop_all(engines: list[EngineProcess]) -> None:
    """Together: each may have requests that it still answers."""
    await asyncio.gather(*(engine.stop() for engine in engines))


async def _bring_up(cleanup: AsyncExitStack, engines: list[EngineProcess], model: str, http: str) -> str:
    """Wait for the engines, open the gateway, and wait until a request would be answered; returns the URL."""
    names = [model] if len(engines) == 1 else [f"{model} ({engine.role})" for engine in engines]
    with loading_bars(names) as bars:
        loading = [asyncio.create_task(e.wait_ready(bar)) for e, bar in zip(engines, bars, strict=True)]
        try:
            await asyncio.gather(*loading)
        finally:
            for task in loading:  # one that cannot start ends the others
                task.cancel()
            await asyncio.gather(*loading, return_exceptions=True)
    channels = [EngineChannel(engine.address) for engine in engines]
    opened = await open_gateway(cleanup, channels, *split_address(http))
    try:
        async with asyncio.timeout(READY_SECONDS):
            await opened.router.wait_ready()
    except TimeoutError:
        detail = "; ".join(engine.detail for engine in opened.router.engines if engine.detail)
        raise StartupError(f"the gateway could not use its engines: {detail}") from None
    return opened.url
