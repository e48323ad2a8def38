"""Two engines on their threads, and KV between them: whatever is aborted, and whenever, nothing is held afterwards."""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.engine.handoff import exported
from tests.engine.setup import Bench, alone
from tests.engine.test_loop import PATIENCE, Ear, text
from tests.requests import group, item, request
from triptych.core.errors import KvTransferFailed
from triptych.core.events import Admitted, Failed, Finished, FinishReason, Prefilled
from triptych.core.request import Request, Resume, Sampling, Stopping
from triptych.engine.kv_pool import transport_pool
from triptych.engine.loop import Engine
from triptych.engine.runner import Runner
from triptych.engine.transfers import Transfers
from triptych.models.contract import Model
from triptych.transport.contract import FetchOutcome, FetchResult, SessionEvent
from triptych.transport.memory import MemoryExchange, MemoryFetcher, MemoryPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from triptych.core.handles import KvHandle
    from triptych.transport.contract import BlockMemory, Move


class SlowFetcher:
    """Moves on a thread of its own, once it is let; what was cancelled by then is moved all the same."""

    def __init__(self, pool: BlockMemory, exchange: MemoryExchange) -> None:
        self._inner = MemoryFetcher(pool, exchange)
        self.open = threading.Event()
        self.open.set()
        self.broken = False
        self.begun = 0
        self.cancelled = 0
        self.threads: list[threading.Thread] = []

    def check(self, handle: KvHandle) -> None:
        self._inner.check(handle)

    def fetch(
        self, handle: KvHandle, moves: Sequence[Move], seconds: float, done: Callable[[FetchResult], None]
    ) -> SlowFetcher:
        self.begun += 1
        self.threads.append(threading.Thread(target=self._move, args=(handle, moves, seconds, done)))
        self.threads[-1].start()
        return self

    def _move(
        self, handle: KvHandle, moves: Sequence[Move], seconds: float, done: Callable[[FetchResult], None]
    ) -> None:
        assert self.open.wait(PATIENCE)
        time.sleep(random.random() / 500)
        if self.broken:
            done(FetchResult(FetchOutcome.FAILED, "the wire broke"))
        else:
            self._inner.fetch(handle, moves, seconds, done)

    def cancel(self) -> None:
        self.cancelled += 1

    def statistics(self) -> dict[str, float]:
        return self._inner.statistics()


def until(condition: Callable[[], object]) -> None:
    """Wait for what no event tells."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < PATIENCE
        time.sleep(0.001)


class Side:
    def __init__(self, exchange: MemoryExchange, name: str, **changes: int) -> None:
        self.bench = Bench(**changes)
        pool = transport_pool(self.bench.kv, self.bench.scheduler.generations)
        self.publisher = MemoryPublisher(pool, name, self._tell, exchange)
        self.fetcher = SlowFetcher(pool, exchange)
        transfers = Transfers(self.publisher, self.fetcher, 9.0, lambda *ended: self.engine.loaded(*ended))
        runner = Runner(Model(self.bench.model, self.bench.tower), self.bench.kv, self.bench.config, transfers)
        self.engine = Engine(self.bench.scheduler, runner, check=True)
        self.ear = Ear()

    def _tell(self, session_id: str, event: SessionEvent) -> None:
        if event is SessionEvent.FREE:
            self.engine.release(session_id)

    def end(self, name: str) -> Finished | Prefilled | Failed:
        def find() -> list[object]:
            kinds = (Finished, Prefilled, Failed)
            return [e for e in self.ear.events if e.request_id == name and isinstance(e, kinds)]

        self.ear.wait(find)
        (end,) = find()
        return end

    def held(self) -> tuple[float, ...]:
        statistics = self.engine.statistics()
        names = ("sessions", "leased_blocks", "loads", "loading_blocks")
        return (statistics["kv_blocks"]["held"], *(statistics["scheduler"][name] for name in names))


class Pair:
    def __init__(self, **changes: int) -> None:
        exchange = MemoryExchange()
        self.prefill = Side(exchange, "p", **changes)
        self.decode = Side(exchange, "d", **changes)

    def compute(self, members: Sequence[Request]) -> list[Request] | None:
        """What goes on from the prompt of some outputs; None if one of them was ended before."""
        self.prefill.engine.submit(exported(members))
        return self.resumed(members)

    def resumed(self, members: Sequence[Request]) -> list[Request] | None:
        ends = [self.prefill.end(each.request_id) for each in members]
        if not all(isinstance(end, Prefilled) for end in ends):
            return None
        handle = ends[0].handle
        return [
            dataclasses.replace(each, inputs=(), resume=Resume(handle, end.first.token_id, end.first.logprob, 0))
            for each, end in zip(members, ends, strict=True)
        ]

    def nothing_is_held(self) -> None:
        for side in (self.prefill, self.decode):
            until(lambda side=side: not any(side.held()) or side.engine.failure is not None)
            assert side.engine.failure is None


@contextmanager
def running(**changes: int) -> Iterator[Pair]:
    pair = Pair(**changes)
    for side in (pair.prefill, pair.decode):
        side.engine.start(side.ear.hear)
    try:
        yield pair
    finally:
        pair.decode.fetcher.open.set()
        for thread in pair.decode.fetcher.threads:
            thread.join()
        for side in (pair.prefill, pair.decode):
            side.engine.stop()


def shown(name: str, picture: int, rows: int) -> Request:
    stopping = Stopping(max_tokens=8, ignore_eos=True)
    return request(
        name, [10] * (rows + 5), [item(picture, (2, rows))], stopping=stopping, sampling=Sampling(seed=picture)
    )


def test_what_the_transports_hold_is_among_the_numbers() -> None:
    made = shown("a", 1, 20)
    with running() as pair:
        (rest,) = pair.compute([made])
        blocks, size = -(-len(made.plan) // 16), pair.prefill.bench.kv.layout.block_bytes
        waiting = pair.prefill.engine.statistics()["kv_publisher"]
        assert (waiting["sessions"], waiting["bytes"]) == (1, blocks * size)
        pair.decode.engine.submit([rest])
        assert isinstance(pair.decode.end("a"), Finished)
        taken = pair.prefill.engine.statistics()["kv_publisher"]
        assert (taken["sessions"], taken["bytes"]) == (0, 0)
        assert pair.decode.engine.statistics()["kv_fetcher"]["moved_bytes"] == blocks * size


def test_answers_are_those_given_alone() -> None:
    made = [group(shown(f"r{n}", n, 5 + 4 * n), 1 + n % 3) for n in range(8)]
    with running(max_batched_tokens=32) as pair:
        for members in made:
            pair.decode.engine.submit(pair.compute(members))
        for each in (each for members in made for each in members):
            assert isinstance(pair.decode.end(each.request_id), Finished)
            assert pair.decode.ear.tokens(each.request_id) == alone(each)
        pair.nothing_is_held()
        assert pair.decode.bench.tower.calls == []


def test_who_waits_for_kv_is_admitted_and_the_engine_sleeps() -> None:
    with running() as pair:
        pair.decode.fetcher.open.clear()
        pair.decode.engine.submit(pair.compute([text("a", 20)]))
        pair.decode.ear.wait(lambda: pair.decode.ear.events)
        assert pair.decode.ear.events == [Admitted("a")]
        until(lambda: pair.decode.engine.statistics()["scheduler"]["steps"] == 1)
        time.sleep(0.05)
        assert pair.decode.engine.statistics()["scheduler"]["steps"] == 1
        assert pair.decode.engine.load().running_requests == 1
        pair.decode.fetcher.open.set()
        assert isinstance(pair.decode.end("a"), Finished)
        assert pair.decode.ear.tokens("a") == alone(text("a", 20))
        pair.nothing_is_held()


def test_an_abort_while_kv_is_on_its_way_is_heard_at_once_and_frees_the_id() -> None:
    with running() as pair:
        pair.decode.fetcher.open.clear()
        pair.decode.engine.submit(pair.compute([text("a", 20)]))
        pair.decode.ear.wait(lambda: pair.decode.ear.events)
        pair.decode.engine.abort("a")
        assert pair.decode.end("a").reason is FinishReason.CANCELLED
        until(lambda: pair.decode.fetcher.cancelled)
        assert pair.decode.held()[3:] == (1, 2)
        pair.decode.ear.events.clear()
        pair.decode.engine.submit([text("a", 9)])
        assert isinstance(pair.decode.end("a"), Finished)
        pair.decode.fetcher.open.set()
        pair.nothing_is_held()


def test_a_transfer_that_breaks_is_the_requests_own_end() -> None:
    with running() as pair:
        pair.decode.fetcher.broken = True
        pair.decode.engine.submit(pair.compute([text("a", 20)]))
        end = pair.decode.end("a")
        assert isinstance(end, Failed)
        assert isinstance(end.error, KvTransferFailed)
        assert str(end.error) == "the wire broke"
        pair.prefill.engine.withdraw("session of a")
        pair.nothing_is_held()


def test_a_session_that_nobody_takes_is_withdrawn() -> None:
    with running() as pair:
        assert pair.compute([text("a", 20)]) is not None
        assert pair.prefill.held() == (2, 1, 2, 0, 0)
        pair.prefill.engine.withdraw("session of a")
        pair.prefill.engine.withdraw("session of nobody")
        pair.nothing_is_held()


def test_messages_about_transfers_after_the_end_are_nobodys() -> None:
    pair = Pair()
    pair.decode.engine.start(pair.decode.ear.hear)
    pair.decode.engine.stop()
    pair.decode.engine.loaded(7, None)
    pair.decode.engine.release("s")
    pair.decode.engine.withdraw("s")
    assert pair.decode.engine._inbox.empty()


def test_stopping_while_kv_is_on_its_way_ends_the_answer() -> None:
    with running() as pair:
        pair.decode.fetcher.open.clear()
        pair.decode.engine.submit(pair.compute([text("a", 20)]))
        pair.decode.ear.wait(lambda: pair.decode.ear.events)
        pair.decode.engine.stop()
        assert pair.decode.end("a").reason is FinishReason.CANCELLED
        assert pair.decode.engine.failure is None


@pytest.mark.parametrize("seed", range(4))
def test_random_aborts_at_every_phase_leave_nothing_held(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(seed)
    made = [group(shown(f"r{n}", n % 23, 3 + n % 23), 1 + n % 3) for n in range(60)]
    aborted: set[str] = set()
    with (
        caplog.at_level(logging.CRITICAL),
        running(max_batched_tokens=16, num_blocks=28, block_size=4, max_running_requests=8) as pair,
    ):

        def abort(side: Side, members: Sequence[Request]) -> None:
            for each in members:
                if draw.random() < 0.7:
                    aborted.add(each.request_id)
                    side.engine.abort(each.request_id)

        def client(groups: list[list[Request]]) -> None:
            for members in groups:
                leader = members[0].request_id
                pair.prefill.engine.submit(exported(members))
                if draw.random() < 0.3:
                    time.sleep(draw.random() / 200)
                    abort(pair.prefill, members)
                resumed = pair.resumed(members)
                if resumed is None or draw.random() < 0.1:
                    pair.prefill.engine.withdraw(f"session of {leader}")
                    aborted.update(each.request_id for each in members)
                    continue
                pair.decode.engine.submit(resumed)
                if draw.random() < 0.4:
                    time.sleep(draw.random() / 200)
                    abort(pair.decode, members)
                ends = [pair.decode.end(each.request_id) for each in members]
                if not any(Admitted(each.request_id) in pair.decode.ear.events for each in members):
                    pair.prefill.engine.withdraw(f"session of {leader}")  # it was not taken: no room, or aborted before
                assert all(isinstance(end, Finished | Failed) for end in ends)

        threads = [threading.Thread(target=client, args=(made[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pair.nothing_is_held()
        finished = 0
        for each in (each for members in made for each in members):
            tokens = pair.decode.ear.tokens(each.request_id)
            assert tokens == alone(each)[: len(tokens)]
            finished += len(tokens) == 8
        assert finished > 20
        assert len(aborted) > 10
