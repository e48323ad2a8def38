"""An encode scheduler with a runner without tensors, which obeys plans to the letter and checks them on the way.

A row is one byte and a block holds four. What a block holds is the key of its item and which part of the rows it is;
consumers of the test take sessions, and find there what was stored or the test fails.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.requests import MERGE, item, picture_input
from triptych.core.config import SchedulerConfig
from triptych.core.errors import Internal
from triptych.core.events import Encoded, Failed, Finished, RowsGone
from triptych.core.handles import Handle, RowLayout
from triptych.core.request import EncodeRequest
from triptych.engine.encode_scheduler import EncodeScheduler
from triptych.engine.encode_step import EncodePlan, EncodeResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from triptych.core.events import EngineEvent

ROW_BYTES = 1
LAYOUT = RowLayout(4)
ROOMY = SchedulerConfig(encoder_items=8, encoder_tokens=1000, encoder_cache_bytes=1000)
BLOCKS = 64


def asked(
    name: str,
    picture: int,
    rows: int,
    *,
    cached: bool = False,
    cost: int = MERGE,
    arrival: float = 0.0,
    priority: int = 0,
) -> EncodeRequest:
    """One picture of so many rows, each of which costs so many encoder tokens."""
    layout = item(picture, (0, rows), encoder_tokens=rows * cost)
    given = None if cached else picture_input(layout)
    return EncodeRequest(name, layout, given, f"s {name}", arrival, priority)


@dataclass
class Session:
    blocks: tuple[int, ...]
    generations: list[int]
    key: bytes


@dataclass
class SimulatedEncoder:
    scheduler: EncodeScheduler
    config: SchedulerConfig
    rows: dict[bytes, int] = field(default_factory=dict)
    """Bytes by content key."""
    memory: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    freed: list[str] = field(default_factory=list)
    """Sessions that are over, which is told to nobody but the test."""
    bad_pictures: set[bytes] = field(default_factory=set)
    """Keys whose encoding fails."""
    bad_stores: set[str] = field(default_factory=set)
    """Requests whose store fails."""
    plans: list[EncodePlan] = field(default_factory=list)

    def run(self, plan: EncodePlan) -> EncodeResult:
        self.plans.append(plan)
        for key in plan.evictions:
            del self.rows[key]
        for session_id in plan.withdrawals:
            self.end(session_id)
        troubles = self._encode(plan)
        failures = {}
        stored = {}
        for each in plan.items:
            name, session_id = each.request.request_id, each.store.session_id
            key = each.request.layout.content_key
            if key not in self.rows:
                assert key in troubles, "rows are handed on that are not there"
                failures[name] = Internal("a bad picture")
            elif name in self.bad_stores:
                failures[name] = Internal("could not be stored, on purpose")
            else:
                stored[session_id] = self._store(session_id, key, each.store.blocks)
        encoded = [each.request.layout.content_key for each in plan.items if each.encodes]
        return EncodeResult(tuple(key for key in encoded if key not in troubles), failures, stored, 0.25)

    def _encode(self, plan: EncodePlan) -> set[bytes]:
        fresh = [each.request for each in plan.items if each.encodes]
        assert len(fresh) <= self.config.encoder_items
        assert sum(each.layout.encoder_tokens for each in fresh) <= self.config.encoder_tokens or len(fresh) == 1
        troubles = set()
        for each in fresh:
            key = each.layout.content_key
            assert key not in self.rows
            assert each.input is not None
            if key in self.bad_pictures:
                troubles.add(key)
            else:
                self.rows[key] = each.layout.rows * ROW_BYTES
        assert sum(self.rows.values()) <= self.config.encoder_cache_bytes
        return troubles

    def _store(self, session_id: str, key: bytes, blocks: Sequence[int]) -> Handle[RowLayout]:
        assert session_id not in self.sessions
        assert len(blocks) == LAYOUT.blocks(self.rows[key])
        read = {block for session in self.sessions.values() for block in session.blocks}
        assert not read & set(blocks), "blocks that others may read are written to"
        self.memory.update((block, (key, part)) for part, block in enumerate(blocks))
        generations = [int(self.scheduler.generations[block]) for block in blocks]
        self.sessions[session_id] = Session(tuple(blocks), generations, key)
        return Handle(session_id, "simulated", "e", LAYOUT, len(blocks), b"")

    def take(self, session_id: str) -> bytes:
        """A consumer reads a session: the key of the item that is there."""
        session = self.sessions[session_id]
        assert [int(self.scheduler.generations[block]) for block in session.blocks] == session.generations
        assert [self.memory[block] for block in session.blocks] == [
            (session.key, part) for part in range(len(session.blocks))
        ]
        self.end(session_id)
        return session.key

    def end(self, session_id: str) -> None:
        if self.sessions.pop(session_id, None) is not None:
            self.freed.append(session_id)


class Bench:
    """The two, and what was heard."""

    def __init__(self, *, blocks: int = BLOCKS, **changes: float) -> None:
        self.config = dataclasses.replace(ROOMY, **changes)
        self.scheduler = EncodeScheduler(self.config, ROW_BYTES, LAYOUT, blocks)
        self.runner = SimulatedEncoder(self.scheduler, self.config)
        self.ends: dict[str, EngineEvent] = {}
        self.order: list[str] = []
        """Names as their ends were heard."""
        self.taken: dict[str, bytes] = {}

    def add(self, *group: EncodeRequest) -> None:
        self.scheduler.add(group)
        self.scheduler.check_integrity()

    def hear(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ends, "an event after the end"
            assert isinstance(event, Encoded | RowsGone | Failed | Finished)
            self.ends[event.request_id] = event
            self.order.append(event.request_id)

    def step(self, now: float = 0.0) -> list[str]:
        """One step; whose items were encoded in it, in order."""
        plan = self.scheduler.plan(now)
        self.hear(self.scheduler.take_events())
        self.hear(self.scheduler.apply(self.runner.run(plan), now))
        self.scheduler.check_integrity()
        return [each.request.request_id for each in plan.items if each.encodes]

    def run(self) -> int:
        """Steps until nothing can be done; how many."""
        for number in range(2000):
            if not self.scheduler.busy:
                return number
            self.step()
        raise AssertionError("it does not end")

    def abort(self, name: str) -> None:
        self.hear(self.scheduler.abort(name, 0.0))
        self.scheduler.check_integrity()

    def take(self, *names: str) -> None:
        """Consumers have everything, and the scheduler is told."""
        for name in names:
            self.taken[name] = self.runner.take(f"s {name}")
        self.tell()

    def tell(self) -> None:
        """What the transport reads no more."""
        while self.runner.freed:
            self.scheduler.release(self.runner.freed.pop())
        self.scheduler.check_integrity()

    def end(self, name: str, kind: type) -> EngineEvent:
        end = self.ends[name]
        assert isinstance(end, kind), end
        return end

    def error(self, name: str) -> Exception:
        end = self.end(name, Failed)
        assert isinstance(end, Failed)
        return end.error

    def settle(self) -> None:
        """Everything that was handed over is withdrawn, and nothing may be left."""
        for session_id in tuple(self.runner.sessions):
            self.scheduler.withdraw(session_id)
        while self.scheduler.busy or self.runner.freed:
            self.run()
            self.tell()
        statistics = self.scheduler.statistics()
        assert statistics.blocks.held == statistics.held_bytes == statistics.leased_bytes == statistics.sessions == 0
        assert statistics.encoder_cache.held_bytes == 0
        ended = statistics.handed_over + statistics.cancelled + statistics.failed + statistics.gone
        assert statistics.accepted == ended == len(self.ends)
        assert not self.runner.sessions
        load = self.scheduler.load()
        assert load.running_requests == load.queued_requests == load.waiting_tokens == 0


def picture_of(key: bytes) -> int:
    return int.from_bytes(key, "big")
