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

from triptych.cli.assemble import ROLES, LoadedModel, Moves, load
from triptych.cli.flags import split_address
from triptych.cli.progress import loading_bar
from triptych.cli.transports import signer_of, transport_of
from triptych.roles.contract import HealthState, RoleName
from triptych.rpc.metrics import serve_metrics
from triptych.rpc.server import check_address, serve_role

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.cli.options import EngineOptions, HandoffOptions
    from triptych.roles.contract import Role
    from triptych.rpc.tls import TlsFiles
    from triptych.wire.session_signature import SessionSigner

STDIN = 0
DRAIN_SECONDS = 30.0
"""How long live requests may go on after a signal."""
LAST_EVENTS_SECONDS = 2.0
"""How long calls may take to hand over their last event once the role has drained."""
FAILURE_LOOK_SECONDS = 1.0
"""How often the engine is looked at: a failed one serves nobody and had better be seen to be gone."""


class Stop:
    """The one way in which an engine is asked to end: by a signal, by a Shutdown call, by a parent that is gone."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self.grace = DRAIN_SECONDS
        """How long live requests may go on, in seconds."""

    @property
    def asked(self) -> bool:
        """Whether somebody has asked."""
        return self._asked.is_set()

    def ask(self, grace: float | None = None) -> bool:
        """Ask the engine to end; False when somebody has asked before, whose grace then holds."""
        if self._asked.is_set():
            return False
        if grace is not None:
            self.grace = grace
        self._asked.set()
        return True

    async def wait(self) -> None:
        """Until somebody asks."""
        await self._asked.wait()


class Listeners(NamedTuple):
    """Where the engine can be reached."""

    grpc: str
    metrics: str | None
    allow_plaintext: bool
    tls: TlsFiles | None
    """Of the gRPC server."""


class Assignment(NamedTuple):
    """What the engine does, and with whom."""

    role: RoleName
    moves: Moves | None
    """KV that goes to other engines, or comes from them."""
    signer: SessionSigner | None

    @classmethod
    def of(cls, role: RoleName, options: EngineOptions, handoff: HandoffOptions) -> Assignment:
        """As flags say it.

        Raises:
            StartupError: naming the flag.
        """
        transport = transport_of(handoff, needed=role is not RoleName.AGGREGATED, device=options.device)
        moves = None if transport is None else Moves(transport, handoff.session_ttl)
        return cls(role, moves, signer_of(handoff))


def run(model: str, assignment: Assignment, options: EngineOptions, listeners: Listeners, *, announce: bool) -> int:
    """Serve until a signal; returns the exit code.

    With ``announce`` the progress goes to stdout as JSON lines, and the end of stdin ends the engine, so
    that a parent can follow it and never leaves it behind.
    """
    _check(listeners)
    parent = Parent() if announce else None
    tower = assignment.role is not RoleName.DECODE
    if parent is not None:
        loaded = load(model, options, parent.progress(), tower=tower)
    else:
        with loading_bar(model) as bar:
            loaded = load(model, options, bar, tower=tower)
    return asyncio.run(_serve(loaded, assignment, listeners, parent))


def _check(listeners: Listeners) -> None:
    """Say what is wrong before the weights are read."""
    encrypted = listeners.tls is not None
    if listeners.tls is not None:
        listeners.tls.credentials()
    check_address(*split_address(listeners.grpc), allow_plaintext=listeners.allow_plaintext or encrypted)
    if listeners.metrics is not None:
        check_address(*split_address(listeners.metrics), allow_plaintext=listeners.allow_plaintext)


async def _serve(loaded: LoadedModel, assignment: Assignment, listeners: Listeners, parent: Parent | None) -> int:
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.ask)
    async with AsyncExitStack() as cleanup:
        if assignment.moves is not None:
            cleanup.push_async_callback(asyncio.to_thread, assignment.moves.close)
        role = ROLES[assignment.role](loaded, uuid.uuid4().hex, assignment.moves)
        cleanup.push_async_callback(role.drain, DRAIN_SECONDS)
        server = await serve_role(
            role,
            *split_address(listeners.grpc),
            allow_plaintext=listeners.allow_plaintext,
            tls=listeners.tls,
            on_shutdown=stop.ask,
            signer=assignment.signer,
        )
        # Streams end while the role drains; only then does the listener close.
        cleanup.push_async_callback(server.stop, LAST_EVENTS_SECONDS)
        if listeners.metrics is not None:
            where = split_address(listeners.metrics)
            exposition = await serve_metrics(role, *where, allow_plaintext=listeners.allow_plaintext)
            cleanup.push_async_callback(exposition.stop)
        if parent is not None:
            parent.when_gone(lambda: loop.call_soon_threadsafe(stop.ask))
            parent.say(event="ready", grpc=server.address, model=role.model.served_name)
        else:
            kv = role.engine.num_blocks * role.engine.block_size
            print(f"{role.model.served_name} is ready on grpc://{server.address} (KV for {kv} tokens). Ctrl-C ends it.")
        failure = await stopped_or_failed(stop, role)
        if failure is not None:
            print(f"triptych: the engine has failed and ends: {failure}", file=sys.stderr, flush=True)
        elif parent is None:
            print("draining ...", flush=True)
        await role.drain(stop.grace)
    return 0 if failure is None else 1


async def stopped_or_failed(stop: Stop, role: Role) -> str | None:
    """Wait until somebody asks, or for the engine's own end; returns the reason of the latter."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(FAILURE_LOOK_SECONDS):
                await stop.wait()
                return None
        scheduler = (await role.health(probe=False))[0]
        if scheduler.state is HealthState.NOT_READY and not stop.asked:
            return scheduler.message


class Parent:
    """The process that started this one: told on stdout what goes on, as JSON lines; noticed on stdin when it goes.

    It closes our stdin because it wants us to end, or is gone itself. Until ``when_gone`` says what to do then, the
    process ends at once: nothing is served yet. Whatever libraries print goes to stderr from here on.
    """

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._act: Callable[[], object] = lambda: os._exit(1)
        threading.Thread(target=self._watch, daemon=True, name="parent-watch").start()

    def say(self, **message: object) -> None:
        """One line."""
        with suppress(BrokenPipeError):
            print(json.dumps(message), file=self._lines, flush=True)

    def progress(self) -> Callable[[int, int], None]:
        """A callback for loading that says each whole per cent once."""
        last = -1

        def report(done: int, total: int) -> None:
            nonlocal last
            percent = 100 * done // max(total, 1)
            if percent != last:
                last = percent
                self.say(event="loading", done=done, total=total)

        return report

    def when_gone(self, act: Callable[[], object]) -> None:
        """What to do from now on; called on a thread."""
        self._act = act

    def _watch(self) -> None:
        with suppress(OSError):  # no stdin at all: nobody is there
            while os.read(STDIN, 4096):  # not sys.stdin.read: its lock would hold up the interpreter's end
                pass
        with suppress(RuntimeError):  # the loop may be closed already
            self._act()
