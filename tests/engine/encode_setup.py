"""An encoder engine around a fake tower, without its thread, and an engine that takes its rows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from tests.engine.fakes import FakeTower, picture_rows, spec
from tests.requests import item, picture_input
from triptych.core.config import SchedulerConfig
from triptych.core.events import Encoded, Failed, Finished, RowsGone
from triptych.core.handles import RowLayout
from triptych.core.request import EncodeRequest
from triptych.engine.encode_runner import EncodeRunner
from triptych.engine.encode_scheduler import EncodeScheduler
from triptych.engine.row_arena import allocate_rows
from triptych.models.contract import RowSpec, TowerModel
from triptych.transport.contract import BlockMemory, FetchOutcome, Move, SessionEvent
from triptych.transport.memory import MemoryExchange, MemoryFetcher, MemoryPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from triptych.core.events import EngineEvent
    from triptych.core.handles import RowHandle
    from triptych.engine.encode_step import EncodePlan
    from triptych.models.contract import VisionTower
    from triptych.transport.contract import FetchResult

SPEC = spec().rows
LAYOUT = RowLayout(40)
"""Two rows and a half."""
ROOMY = SchedulerConfig(encoder_items=8, encoder_tokens=4096, encoder_cache_bytes=1 << 20)


def asked(
    name: str, picture: int, rows: int = 6, *, cached: bool = False, arrival: float = 0.0, priority: int = 0
) -> EncodeRequest:
    layout = item(picture, (0, rows))
    given = None if cached else picture_input(layout)
    return EncodeRequest(name, layout, given, f"s {name}", arrival, priority)


class Producer:
    """Scheduler, runner, memory and publisher of an encoder engine."""

    def __init__(
        self,
        exchange: MemoryExchange,
        tell: Callable[[str, SessionEvent], None],
        model: TowerModel | None = None,
        blocks: int = 64,
        **changes: int,
    ) -> None:
        self.config = dataclasses.replace(ROOMY, **changes)
        model = model or TowerModel(FakeTower(), SPEC)
        self.tower = model.tower
        self.scheduler = EncodeScheduler(self.config, model.spec.row_bytes, LAYOUT, blocks)
        self.memory = allocate_rows(LAYOUT, self.scheduler.generations)
        self.publisher = MemoryPublisher(self.memory, "e", tell, exchange)
        self.runner = EncodeRunner(model, self.memory, self.publisher)


class Consumer:
    """Takes rows, one item at a time, into memory of its own."""

    def __init__(self, exchange: MemoryExchange, blocks: int = 16, row_spec: RowSpec = SPEC) -> None:
        self.exchange = exchange
        self._spec = row_spec
        self._memory = BlockMemory(
            LAYOUT, np.full((blocks, LAYOUT.block_bytes), 0xEE, np.uint8), np.zeros(blocks, np.int64)
        )
        self._fetcher = MemoryFetcher(self._memory, exchange)

    def take(self, handle: RowHandle, rows: int) -> torch.Tensor | FetchOutcome:
        """[rows, row width], or why they cannot be had."""
        results: list[FetchResult] = []
        self._fetcher.check(handle)
        moves = [Move(index, len(self._memory.memory) - 1 - index) for index in range(handle.blocks)]
        self._fetcher.fetch(handle, moves, 9.0, results.append)
        (result,) = results
        if result.outcome is not FetchOutcome.FINISHED:
            return result.outcome
        flat = np.concatenate([self._memory.memory[move.target] for move in moves])
        size = rows * self._spec.row_bytes
        assert not flat[size:].any(), "bytes of somebody else"
        return torch.from_numpy(flat[:size].copy()).view(self._spec.dtype).reshape(rows, self._spec.row_width)


class EncodeBench(Producer):
    """Both, without threads, and what came out."""

    def __init__(self, tower: VisionTower | None = None, blocks: int = 64, **changes: int) -> None:
        exchange = MemoryExchange()
        self.free: list[str] = []
        model = TowerModel(tower or FakeTower(), SPEC)
        super().__init__(exchange, self._tell, model, blocks, **changes)
        self.consumer = Consumer(exchange)
        self.ends: dict[str, EngineEvent] = {}
        self.plans: list[EncodePlan] = []

    def _tell(self, session_id: str, event: SessionEvent) -> None:
        if event is SessionEvent.FREE:
            self.free.append(session_id)

    def hear(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            assert isinstance(event, Encoded | RowsGone | Failed | Finished)
            assert event.request_id not in self.ends
            self.ends[event.request_id] = event

    def step(self) -> None:
        plan = self.scheduler.plan(0.0)
        self.plans.append(plan)
        self.hear(self.scheduler.take_events())
        self.hear(self.scheduler.apply(self.runner.run(plan), 0.0))
        self.scheduler.check_integrity()

    def run(self, *groups: Iterable[EncodeRequest]) -> None:
        """Add the groups and step until nobody can get on."""
        for group in groups:
            made = list(group)
            for each in made:
                self.runner.check(each)
            self.scheduler.add(made)
        while self.scheduler.busy or self.free:
            while self.free:
                self.scheduler.release(self.free.pop())
            if self.scheduler.busy:
                self.step()

    def take(self, name: str, rows: int = 6) -> torch.Tensor | FetchOutcome:
        end = self.ends[name]
        assert isinstance(end, Encoded), end
        return self.consumer.take(end.handle, rows)

    def error(self, name: str) -> Exception:
        end = self.ends[name]
        assert isinstance(end, Failed), end
        return end.error

    def nothing_is_held(self) -> None:
        statistics = self.scheduler.statistics()
        assert statistics.held_bytes == statistics.sessions == statistics.encoder_cache.held_bytes == 0
        assert self.publisher.statistics()["sessions"] == 0


def is_picture(rows: torch.Tensor | FetchOutcome, picture: int, count: int = 6) -> bool:
    return isinstance(rows, torch.Tensor) and torch.equal(rows, picture_rows(picture, count))
