"""``triptych engine``: load a model, serve it over gRPC, drain on a signal."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import threading
import uuid
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from triptych.cli.assemble import ROLES, Moves, Rows, encoder
from triptych.cli.flags import split_address
from triptych.cli.loaded import load, load_encoder
from triptych.cli.progress import loading_bar
from triptych.cli.transports import check_flags, row_transport_of, signer_of, transport_of
from triptych.core.config import MIB
from triptych.core.errors import StartupError
from triptych.engine.row_arena import ROW_LAYOUT, count_row_blocks
from triptych.roles.contract import HealthState, RoleName
from triptych.rpc.message_bytes import LEAST_BYTES_HELD, MAX_BYTES_HELD, MessageBytes
from triptych.rpc.metrics import serve_metrics
from triptych.rpc.server import check_address, serve_role

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.cli.media import MediaFlags
    from triptych.cli.options import EncoderOptions, EngineOptions, HandoffOptions
    from triptych.roles.contract import EngineDescription, Role
    from triptych.roles.desk import Desk
    from triptych.rpc.tls import TlsFiles
    from triptych.wire.handoff_signature import HandoffSigner

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
    """Where the engine can be reached, and how much may come in there."""

    grpc: str
    metrics: str | None
    allow_plaintext: bool
    tls: TlsFiles | None
    """Of the gRPC server."""
    max_message_bytes_held: int = MAX_BYTES_HELD


class Assignment(NamedTuple):
    """What the engine does, and with whom."""

    role: RoleName
    moves: Moves | None
    """KV that goes to other engines, or comes from them."""
    rows: Rows | None
    """Encoded pictures that do."""
    signer: HandoffSigner | None

    @classmethod
    def of(
        cls,
        role: RoleName,
        options: EngineOptions,
        handoff: HandoffOptions,
        encoding: EncoderOptions,
        *,
        requires_handoff: bool,
    ) -> Assignment:
        """As flags say it.

        Raises:
            StartupError: naming the flag.
        """
        check_flags(role, handoff, encoding, requires_handoff=requires_handoff)
        kv = transport_of(handoff, needed=role in (RoleName.PREFILL, RoleName.DECODE), device=options.device)
        moves = None if kv is None else Moves(kv, handoff.session_ttl)
        way = row_transport_of(encoding, handoff.handoff_secret, needed=role is RoleName.ENCODER)
        rows = None if way is None else Rows(Moves(way, encoding.encoder_ttl), encoding.encoder_quota, requires_handoff)
        return cls(role, moves, rows, signer_of(handoff))

    def load(
        self, model: str, options: EngineOptions, media: MediaFlags, progress: Callable[[int, int], None]
    ) -> Callable[[str], Desk]:
        """Read what the role needs of a model. What comes back starts the engine, under its instance id.

        Raises:
            StartupError: one line that names the file, the tensor or the flag.
        """
        if self.rows is not None:
            count_row_blocks(ROW_LAYOUT, self.rows.quota)
        if self.rows is not None and self.role is RoleName.ENCODER:
            return partial(encoder, load_encoder(model, options, progress, media), rows=self.rows)
        tower = self.role is not RoleName.DECODE and not (self.rows is not None and self.rows.required)
        loaded = load(model, options, progress, media, tower=tower)
        return partial(ROLES[self.role], loaded, moves=self.moves, rows=self.rows)

    def close(self) -> None:
        """Once the engine has stopped; see ``Moves.close``."""
        for moves in (self.moves, self.rows and self.rows.moves):
            if moves is not None:
                moves.close()


def run(
    model: str,
    assignment: Assignment,
    options: EngineOptions,
    media: MediaFlags,
    listeners: Listeners,
    *,
    announce: bool,
) -> int:
    """Serve until a signal; returns the exit code.

    With ``announce`` the progress goes to stdout as JSON lines, and the end of stdin ends the engine, so
    that a parent can follow it and never leaves it behind.
    """
    _check(listeners)
    parent = Parent() if announce else None
    if parent is not None:
        start = assignment.load(model, options, media, parent.progress())
    else:
        with loading_bar(model) as bar:
            start = assignment.load(model, options, media, bar)
    gc.collect()
    gc.freeze()  # to walk all that is loaded once more would hold the event loop for a quarter of a second
    try:
        return asyncio.run(_serve(start, assignment, listeners, parent))
    finally:
        gc.unfreeze()  # some libraries complain at the exit of what nobody has collected


def _check(listeners: Listeners) -> None:
    """Say what is wrong before the weights are read."""
    if listeners.max_message_bytes_held < LEAST_BYTES_HELD:
        raise StartupError(
            f"--max-message-bytes-held must be at least {LEAST_BYTES_HELD // MIB}MiB, the size of two messages, not "
            f"{listeners.max_message_bytes_held} bytes"
        )
    encrypted = listeners.tls is not None
    if listeners.tls is not None:
        listeners.tls.credentials()
    check_address(*split_address(listeners.grpc), allow_plaintext=listeners.allow_plaintext or encrypted)
    if listeners.metrics is not None:
        check_address(*split_address(listeners.metrics), allow_plaintext=listeners.allow_plaintext)


async def _serve(
    start: Callable[[str], Desk], assignment: Assignment, listeners: Listeners, parent: Parent | None
) -> int:
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.ask)
    async with AsyncExitStack() as cleanup:
        cleanup.push_async_callback(asyncio.to_thread, assignment.close)
        role = start(uuid.uuid4().hex)
        cleanup.push_async_callback(role.drain, DRAIN_SECONDS)
        await role.warm_up()
        messages = MessageBytes(listeners.max_message_bytes_held)
        server = await serve_role(
            role,
            *split_address(listeners.grpc),
            allow_plaintext=listeners.allow_plaintext,
            tls=listeners.tls,
            on_shutdown=stop.ask,
            signer=assignment.signer,
            messages=messages,
        )
        # Streams end while the role drains; only then does the listener close.
        cleanup.push_async_callback(server.stop, LAST_EVENTS_SECONDS)
        metrics = None
        if listeners.metrics is not None:
            where = split_address(listeners.metrics)
            exposition = await serve_metrics(role, messages, *where, allow_plaintext=listeners.allow_plaintext)
            cleanup.push_async_callback(exposition.stop)
            metrics = exposition.address
        if parent is not None:
            parent.when_gone(lambda: loop.call_soon_threadsafe(stop.ask))
            parent.say(event="ready", grpc=server.address, metrics=metrics, model=role.model.served_name)
        else:
            name, room = role.model.served_name, _room(role.engine)
            print(f"{name} is ready on grpc://{server.address} ({room}). Ctrl-C ends it.")
        failure = await stopped_or_failed(stop, role)
        if failure is not None:
            print(f"triptych: the engine has failed and ends: {failure}", file=sys.stderr, flush=True)
        elif parent is None:
            print("draining ...", flush=True)
        await role.drain(stop.grace)
    return 0 if failure is None else 1


def _room(engine: EngineDescription) -> str:
    if engine.role is RoleName.ENCODER:
        return "an encoder"
    return f"KV for {engine.num_blocks * engine.block_size} tokens"


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
