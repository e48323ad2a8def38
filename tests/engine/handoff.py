"""A prefill and a decode engine in one process, without their threads: KV goes through the memory transport."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tests.engine.setup import Bench
from triptych.core.request import Request, Resume
from triptych.engine.kv_pool import transport_pool
from triptych.engine.runner import Runner
from triptych.engine.transfers import Transfers
from triptych.models.contract import Model
from triptych.transport.contract import SessionEvent
from triptych.transport.memory import MemoryExchange, MemoryFetcher, MemoryPublisher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.errors import TriptychError


class Side(Bench):
    """An engine that can store prompts and load them."""

    def __init__(
        self, exchange: MemoryExchange, name: str, model: object = None, tower: object = None, **changes: int
    ) -> None:
        super().__init__(model, tower, **changes)
        self.free: list[str] = []
        self.loaded: list[tuple[int, TriptychError | None]] = []
        pool = transport_pool(self.kv, self.scheduler.generations)
        self.publisher = MemoryPublisher(pool, name, self._tell, exchange)
        self.fetcher = MemoryFetcher(pool, exchange)
        transfers = Transfers(
            self.publisher, self.fetcher, 9.0, lambda number, error: self.loaded.append((number, error))
        )
        self.runner = Runner(Model(self.model, self.tower), self.kv, self.config, transfers)

    def _tell(self, session_id: str, event: SessionEvent) -> None:
        if event is SessionEvent.FREE:
            self.free.append(session_id)

    def settle(self) -> None:
        """Step, and hear of transfers, until nothing is left to do."""
        while self.scheduler.busy or self.free or self.loaded:
            while self.free:
                self.scheduler.release(self.free.pop())
            while self.loaded:
                self.hear(self.scheduler.loaded(*self.loaded.pop(), 0.0))
                self.scheduler.check_integrity()
            if self.scheduler.busy:
                self.step()


class Pair:
    """Both of them. Changes whose names begin with ``p_`` are the prefill engine's alone, with ``d_`` the other's."""

    def __init__(self, models: tuple[object, object] = (None, None), tower: object = None, **changes: int) -> None:
        exchange = MemoryExchange()
        both = {name: value for name, value in changes.items() if name[:2] not in ("p_", "d_")}
        own = [
            {name[2:]: value for name, value in changes.items() if name.startswith(prefix)} for prefix in ("p_", "d_")
        ]
        self.prefill = Side(exchange, "p", models[0], tower, **(both | own[0]))
        self.decode = Side(exchange, "d", models[1], **(both | own[1]))

    def compute(self, members: Sequence[Request]) -> list[Request]:
        """The prompt of one request's outputs; what goes on from it."""
        self.prefill.scheduler.add([self._checked(self.prefill, each) for each in exported(members)])
        self.prefill.settle()
        return self.resumed(members)

    def resumed(self, members: Sequence[Request]) -> list[Request]:
        """What goes on from a prompt that is computed; to be read once."""
        ends = [self.prefill.ends[each.request_id] for each in members]
        handle = ends[0].handle
        assert handle is not None
        return [
            self._checked(
                self.decode,
                dataclasses.replace(
                    each,
                    inputs=(),
                    logprobs=dataclasses.replace(each.logprobs, prompt=False, prompt_candidates=None, prompt_start=0),
                    resume=Resume(handle, end.first.token_id, end.first.logprob, ends[0].usage.cached_prompt_tokens),
                ),
            )
            for each, end in zip(members, ends, strict=True)
        ]

    @staticmethod
    def _checked(side: Side, made: Request) -> Request:
        side.runner.check(made)
        return made

    def run(self, *groups: Sequence[Request]) -> dict[str, list[int]]:
        """All prompts on one engine, then all answers on the other; the tokens of each."""
        resumed = [self.compute(members) for members in groups]
        for members in resumed:
            self.decode.scheduler.add(members)
        self.settle()
        return self.decode.tokens

    def settle(self) -> None:
        while any(side.scheduler.busy or side.free or side.loaded for side in (self.prefill, self.decode)):
            self.prefill.settle()
            self.decode.settle()

    def nothing_is_held(self) -> None:
        for side in (self.prefill, self.decode):
            statistics = side.scheduler.statistics()
            assert statistics.blocks.held == statistics.encoder_cache.held_bytes == 0
            assert statistics.sessions == statistics.loads == 0
            assert side.publisher.statistics()["sessions"] == 0


def exported(members: Sequence[Request]) -> list[Request]:
    """The same outputs, whose prompt is computed for another engine."""
    return [dataclasses.replace(each, export=f"session of {members[0].request_id}") for each in members]
