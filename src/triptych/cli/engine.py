"""``triptych engine``: load a model, serve it over gRPC, drain on a signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import uuid
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

from triptych.cli.assemble import LoadedModel, aggregated, load
from triptych.cli.flags import split_address
from triptych.cli.progress import loading_bar
from triptych.rpc.metrics import serve_metrics
from triptych.rpc.server import check_address, serve_role

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.cli.options import EngineOptions

DRAIN_SECONDS = 30.0
"""How long live requests may go on after a signal."""


class Listeners(NamedTuple):
    """Where the engine can be reached."""

    grpc: str
    metrics: str | None
    allow_plaintext: bool


def run(model: str, options: EngineOptions, listeners: Listeners, *, announce: bool) -> int:
    """Serve until a signal; returns the exit code.

    With ``announce`` the progress goes to stdout as JSON lines, and the end of stdin ends the engine, so
    that a parent can follow it and never leaves it behind.
    """
    for address in filter(None, (listeners.grpc, listeners.metrics)):  # said before the weights are read
        check_address(*split_address(address), allow_plaintext=listeners.allow_plaintext)
    if announce:
        parent = ParentWatch()
        loaded = load(model, options, _announce_progress())
    else:
        with loading_bar(model) as bar:
            loaded = load(model, options, bar)
    return asyncio.run(_serve(loaded, listeners, parent if announce else None))


async def _serve(loaded: LoadedModel, listeners: Listeners, parent: ParentWatch | None) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    role = aggregated(loaded, instance_id=uuid.uuid4().hex)
    async with AsyncExitStack() as cleanup:
        cleanup.push_async_callback(role.drain, DRAIN_SECONDS)
        server = await serve_role(role, *split_address(listeners.grpc), allow_plaintext=listeners.allow_plaintext)
        # Streams end while the role drains; only then does the listener close.
        cleanup.push_async_callback(server.stop, None)
        if listeners.metrics is not None:
            where = split_address(listeners.metrics)
            exposition = await serve_metrics(role, *where, allow_plaintext=listeners.allow_plaintext)
            cleanup.push_async_callback(exposition.stop)
        if parent is not None:
            parent.then(lambda: loop.call_soon_threadsafe(stop.set))
            _say(event="ready", grpc=server.address, model=role.model.served_name)
        else:
            kv = role.engine.num_blocks * role.engine.block_size
            print(f"{role.model.served_name} is ready on grpc://{server.address} (KV for {kv} tokens). Ctrl-C ends it.")
        await stop.wait()
        if parent is None:
            print("draining ...", flush=True)
        await role.drain(DRAIN_SECONDS)
    return 0


def _say(**message: object) -> None:
    with suppress(BrokenPipeError):
        print(json.dumps(message), flush=True)


def _announce_progress() -> Callable[[int, int], None]:
    last = -1

    def report(done: int, total: int) -> None:
        nonlocal last
        percent = 100 * done // max(total, 1)
        if percent != last:
            last = percent
            _say(event="loading", done=done, total=total)

    return report


class ParentWatch:
    """Notices on a thread that the parent has closed our stdin, because it wants us to end or is gone itself.

    Until ``then`` says what to do, the process ends at once: nothing is served yet.
    """

    def __init__(self) -> None:
        self._act: Callable[[], object] = lambda: os._exit(1)
        threading.Thread(target=self._watch, daemon=True, name="parent-watch").start()

    def then(self, act: Callable[[], object]) -> None:
        """What to do from now on; called on the thread."""
        self._act = act

    def _watch(self) -> None:
        while os.read(sys.stdin.fileno(), 4096):  # not sys.stdin.read: its lock would hold up the interpreter's end
            pass
        with suppress(RuntimeError):  # the loop may be closed already
            self._act()
