"""Two schedulers with simulated runners: one computes prompts, the other goes on from them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tests.unit.scheduler_bench import Bench
from tests.unit.simulation import Exchange, run_all
from triptych.core.events import Prefilled
from triptych.core.request import Resume

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.request import Request


class Side(Bench):
    """One of the two."""

    def __init__(self, exchange: Exchange, *, kv_changes: bool = False, **changes: float) -> None:
        super().__init__(kv_changes=kv_changes, **changes)
        self.runner.exchange = exchange
        self.runner.generations = self.scheduler.generations

    def exchange_blocks(self, session_id: str) -> list[int]:
        return self.runner.exchange.sessions[session_id].blocks

    @property
    def exchange(self) -> Exchange:
        return self.runner.exchange

    def heard_sessions(self) -> set[str]:
        """Sessions that were handed over."""
        return {
            end.handle.session_id
            for end in self.heard.ends.values()
            if isinstance(end, Prefilled) and end.handle is not None
        }

    def end_loads(self, *, broken: bool = False) -> None:
        """Those under way, the youngest first."""
        for number in sorted(self.runner.loads, reverse=True):
            self.end_load(number, broken=broken)

    def end_load(self, number: int, *, broken: bool = False) -> None:
        error = self.runner.fetch(number, broken=broken)
        self.heard.take(self.scheduler.loaded(number, error, 0.0))
        self.scheduler.check_integrity()

    def release(self, *session_ids: str) -> None:
        for session_id in session_ids:
            self.scheduler.release(session_id)
        self.scheduler.check_integrity()


class Pair:
    """A prefill side and a decode side."""

    def __init__(self, prefill: dict[str, float] | None = None, **decode: float) -> None:
        self.exchange = Exchange()
        self.prefill = Side(self.exchange, **(prefill or {}))
        self.decode = Side(self.exchange, **decode)

    def compute(self, *requests: Request) -> list[Request]:
        """Have the prompt of a group computed; the requests that go on from it."""
        self.prefill.scheduler.add(exported(requests))
        self.prefill.run()
        return self.resumed(requests)

    def resumed(self, requests: Sequence[Request]) -> list[Request]:
        """What goes on from a prompt that is computed, one for each output."""
        ends = [self.prefill.heard.prefilled(each.request_id) for each in requests]
        handle = ends[0].handle
        assert handle is not None
        return [
            dataclasses.replace(
                each,
                inputs=(),
                logprobs=dataclasses.replace(each.logprobs, prompt=False, prompt_candidates=None, prompt_start=0),
                resume=Resume(handle, end.first.token_id, end.first.logprob, ends[0].usage.cached_prompt_tokens),
            )
            for each, end in zip(requests, ends, strict=True)
        ]

    def settle(self) -> None:
        """Both sides hear of blocks that are read no more, and say what they have to."""
        while self.exchange.freed or self.prefill.scheduler.busy or self.decode.scheduler.busy:
            for side in (self.prefill, self.decode):
                run_all(side.scheduler, side.runner, side.heard)
            freed = self.exchange.take_freed()
            self.prefill.release(*freed)
            self.decode.release(*freed)

    def go_on(self, *requests: Request) -> None:
        """The requests on the decode side, to their ends."""
        self.decode.scheduler.add(requests)
        self.decode.run()
        self.decode.end_loads()
        self.decode.run()
        self.settle()

    def nothing_is_held(self) -> None:
        for side in (self.prefill, self.decode):
            statistics = side.scheduler.statistics()
            assert statistics.blocks.held == statistics.leased_blocks == statistics.loading_blocks == 0
            assert statistics.sessions == statistics.loads == statistics.encoder_cache.held_bytes == 0
            assert statistics.accepted == statistics.finished + statistics.cancelled + statistics.failed
            assert not side.runner.known
            assert not side.runner.loads
        assert not self.exchange.sessions


def exported(requests: Sequence[Request]) -> list[Request]:
    """The same outputs, whose prompt is computed for another engine."""
    return [dataclasses.replace(each, export=f"s {requests[0].request_id}") for each in requests]


def check_answer(pair: Pair, made: Request) -> None:
    """What came out on the decode side is what one engine would have said, to the end."""
    name, heard = made.request_id, pair.decode.heard
    whole = pair.decode.alone(made)
    assert heard.tokens.get(name, []) == whole[: len(heard.tokens.get(name, []))]
    assert heard.finish(name).usage.completion_tokens == len(whole)
