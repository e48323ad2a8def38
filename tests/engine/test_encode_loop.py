"""An encoder engine on its thread, and whoever takes its rows: whatever is aborted, and when, nothing stays held."""

from __future__ import annotations

import logging
import random
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from tests.engine.encode_setup import SPEC, Consumer, Producer, asked, is_picture
from tests.engine.fakes import FakeTower
from tests.engine.test_handoff_loop import until
from tests.engine.test_loop import PATIENCE, Ear
from triptych.core.errors import Draining, DuplicateRequest, Internal, InvalidRequest, Overloaded
from triptych.core.events import Encoded, Failed, Finished, FinishReason, RowsGone
from triptych.engine.loop import EncodeEngine
from triptych.models.contract import TowerModel
from triptych.transport.contract import FetchOutcome, SessionEvent
from triptych.transport.memory import MemoryExchange

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.core.request import EncodeRequest
    from triptych.engine.encode_step import EncodePlan, EncodeResult


class Gate:
    """The runner, which can be held in the middle of a step, and made to break."""

    def __init__(self, producer: Producer) -> None:
        self._runner = producer.runner
        self.open = threading.Event()
        self.open.set()
        self.inside = threading.Event()
        self.error: Exception | None = None

    def check(self, request: EncodeRequest) -> None:
        self._runner.check(request)

    def run(self, plan: EncodePlan) -> EncodeResult:
        self.inside.set()
        assert self.open.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return self._runner.run(plan)

    def statistics(self) -> dict[str, dict[str, float]]:
        return self._runner.statistics()


class Running:
    def __init__(self, tower: FakeTower | None, **changes: int) -> None:
        exchange = MemoryExchange()
        model = TowerModel(tower or FakeTower(), SPEC)
        self.producer = Producer(exchange, self._tell, model, **changes)
        self.tower = self.producer.tower
        self.consumer = Consumer(exchange)
        self.gate = Gate(self.producer)
        self.engine = EncodeEngine(self.producer.scheduler, self.gate, check=True)
        self.ear = Ear()

    def _tell(self, session_id: str, event: SessionEvent) -> None:
        if event is SessionEvent.FREE:
            self.engine.release(session_id)

    def end(self, name: str) -> Encoded | RowsGone | Failed | Finished:
        def find() -> list[object]:
            kinds = (Encoded, RowsGone, Failed, Finished)
            return [e for e in self.ear.events if e.request_id == name and isinstance(e, kinds)]

        self.ear.wait(find)
        (end,) = find()
        return end

    def handle(self, name: str) -> object:
        end = self.end(name)
        assert isinstance(end, Encoded), end
        return end.handle

    def held(self) -> tuple[float, ...]:
        statistics = self.engine.statistics()
        names = ("sessions", "leased_bytes", "held_bytes")
        load = self.engine.load()
        return (
            *(statistics["scheduler"][name] for name in names),
            statistics["encoder_cache"]["held_bytes"],
            load.queued_requests,
            load.running_requests,
            statistics["row_transport"]["sessions"],
        )

    def nothing_is_held(self) -> None:
        until(lambda: not any(self.held()))
        assert self.engine.failure is None


@contextmanager
def running(tower: FakeTower | None = None, **changes: int) -> Iterator[Running]:
    run = Running(tower, **changes)
    run.engine.start(run.ear.hear)
    try:
        yield run
    finally:
        run.gate.open.set()
        run.engine.stop()


def test_rows_of_many_requests_come_over_as_they_are() -> None:
    with running(encoder_items=3) as run:
        for number in range(12):
            run.engine.submit(
                [asked(f"{number} {part}", 3 * number + part, 3 + number) for part in range(1 + number % 3)]
            )
        for number in range(12):
            for part in range(1 + number % 3):
                rows = run.consumer.take(run.handle(f"{number} {part}"), 3 + number)
                assert is_picture(rows, 3 * number + part, 3 + number)
        assert len(run.ear.threads) == 1
        run.nothing_is_held()


def test_what_came_while_a_step_ran_is_encoded_together() -> None:
    with running() as run:
        run.gate.open.clear()
        run.engine.submit([asked("a", 1)])
        assert run.gate.inside.wait(PATIENCE)
        run.engine.submit([asked("b", 2), asked("c", 3)])
        run.engine.submit([asked("d", 4)])
        run.engine.submit([asked("twin", 2)])
        assert run.engine.load().queued_requests == 4
        run.gate.open.set()
        assert is_picture(run.consumer.take(run.handle("twin"), 6), 2)
        assert run.tower.calls == [[1], [2, 3, 4]]


@pytest.mark.parametrize("how", ["taken", "withdrawn"])
def test_requests_wait_for_memory_until_it_comes_back(how: str) -> None:
    with running(blocks=3) as run:
        run.engine.submit([asked("a", 1)])
        handle = run.handle("a")
        run.engine.submit([asked("b", 2)])
        until(lambda: run.engine.load().queued_requests == 1)
        if how == "taken":
            assert is_picture(run.consumer.take(handle, 6), 1)
        else:
            run.engine.withdraw("s a")
        assert is_picture(run.consumer.take(run.handle("b"), 6), 2)
        assert run.consumer.take(handle, 6) is FetchOutcome.GONE
        run.nothing_is_held()


def test_names_are_free_when_their_end_is_heard() -> None:
    with running() as run:
        run.gate.open.clear()
        run.engine.submit([asked("a", 1)])
        with pytest.raises(DuplicateRequest):
            run.engine.submit([asked("b", 2), asked("a", 3)])
        run.gate.open.set()
        run.consumer.take(run.handle("a"), 6)
        run.nothing_is_held()
        run.engine.submit([asked("gone", 9, cached=True)])
        assert isinstance(run.end("gone"), RowsGone)
        run.ear.events.clear()
        run.engine.submit([asked("a", 1, cached=True), asked("gone", 9)])
        assert is_picture(run.consumer.take(run.handle("gone"), 6), 9)
        assert is_picture(run.consumer.take(run.handle("a"), 6), 1)
        assert run.tower.calls == [[1], [9]]


def test_refusals_are_said_at_once_and_take_nothing() -> None:
    with running(blocks=3, max_waiting_requests=2) as run:
        run.engine.submit([asked("a", 1)])
        handle = run.handle("a")
        with pytest.raises(InvalidRequest, match="--encoder-quota"):
            run.engine.submit([asked("b", 2), asked("c", 3)])
        run.engine.submit([asked("d", 2, 1), asked("e", 3, 1)])
        until(lambda: run.engine.load().queued_requests == 2)
        with pytest.raises(Overloaded, match="--max-waiting-requests"):
            run.engine.submit([asked("f", 4, 1)])
        run.consumer.take(handle, 6)
        for name in ("d", "e"):
            run.consumer.take(run.handle(name), 1)
        run.nothing_is_held()


@pytest.mark.parametrize("phase", ["arriving", "waiting", "in flight", "handed over"])
def test_an_abort_at_any_phase_leaves_nothing(phase: str) -> None:
    with running(blocks=6) as run:
        run.engine.submit([asked("first", 1), asked("second", 2)])
        run.handle("second")
        if phase != "waiting":
            for session_id in ("s first", "s second"):
                run.engine.withdraw(session_id)
            run.nothing_is_held()
        if phase in ("arriving", "in flight"):
            run.gate.open.clear()
            run.gate.inside.clear()
        if phase == "arriving":  # behind a step of somebody else's
            run.engine.submit([asked("other", 5, 1)])
            assert run.gate.inside.wait(PATIENCE)
        run.engine.submit([asked("a", 3), asked("b", 4, 1)])
        if phase == "waiting":
            until(lambda: run.engine.load().queued_requests == 2)
        if phase == "in flight":
            assert run.gate.inside.wait(PATIENCE)
        if phase == "handed over":
            run.handle("a")
        run.engine.abort("a")
        run.engine.abort("nobody")
        run.gate.open.set()
        end = run.end("a")
        if phase in ("arriving", "waiting"):
            assert isinstance(end, Finished)
            assert end.reason is FinishReason.CANCELLED
        else:  # too late: what was handed over must be withdrawn, whoever aborts
            assert isinstance(end, Encoded)
        for session_id in ("s first", "s second", "s other", "s a"):
            run.engine.withdraw(session_id)
        assert is_picture(run.consumer.take(run.handle("b"), 1), 4, 1)
        run.nothing_is_held()


def test_a_bad_picture_is_its_owners_end_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL), running(FakeTower(broken={2})) as run:
        run.engine.submit([asked("a", 1), asked("bad", 2), asked("c", 3)])
        assert is_picture(run.consumer.take(run.handle("a"), 6), 1)
        assert is_picture(run.consumer.take(run.handle("c"), 6), 3)
        end = run.end("bad")
        assert isinstance(end, Failed)
        assert isinstance(end.error, Internal)
        run.nothing_is_held()


def test_stopping_ends_what_waits_and_keeps_what_was_handed_over_until_the_transport_closes() -> None:
    with running(blocks=3) as run:
        run.engine.submit([asked("a", 1)])
        handle = run.handle("a")
        run.engine.submit([asked("b", 2)])
        run.engine.stop()
        end = run.end("b")
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.CANCELLED
        with pytest.raises(Draining):
            run.engine.submit([asked("c", 3)])
        assert is_picture(run.consumer.take(handle, 6), 1)
        run.producer.publisher.close()
        assert run.producer.publisher.statistics()["sessions"] == 0
        assert run.engine.failure is None


def test_a_lost_device_ends_the_loop_and_everybody_hears_of_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL), running() as run:
        run.gate.error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        run.engine.submit([asked("a", 1), asked("b", 2)])
        for name in ("a", "b"):
            assert isinstance(run.end(name), Failed)
        assert run.engine.failure is not None
        with pytest.raises(Draining, match="failed"):
            run.engine.submit([asked("c", 3)])


@pytest.mark.parametrize("seed", range(4))
def test_random_clients_leave_nothing_held(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(seed)
    right: list[bool] = []
    ends: list[object] = []

    def client(run: Running, consumer: Consumer, number: int) -> None:
        for turn in range(12):
            made = [
                asked(f"{number} {turn} {part}", draw.randrange(1, 6), 6, cached=draw.random() < 0.2)
                for part in range(draw.randint(1, 3))
            ]
            run.engine.submit(made)
            if draw.random() < 0.4:
                time.sleep(draw.random() / 500)
                for each in made:
                    if draw.random() < 0.7:
                        run.engine.abort(each.request_id)
            for each in made:
                end = run.end(each.request_id)
                ends.append(end)
                if isinstance(end, Encoded) and draw.random() < 0.7:
                    picture = int.from_bytes(each.layout.content_key, "big")
                    right.append(is_picture(consumer.take(end.handle, 6), picture))
                else:
                    run.engine.withdraw(each.export)

    with (
        caplog.at_level(logging.CRITICAL),
        running(FakeTower(broken={5}), blocks=12, encoder_items=2, encoder_cache_bytes=2 * 96) as run,
    ):
        consumers = [Consumer(run.consumer.exchange) for _ in range(4)]
        threads = [threading.Thread(target=client, args=(run, consumer, n)) for n, consumer in enumerate(consumers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        run.nothing_is_held()
    assert len(ends) >= 48
    assert all(right)
    assert len(right) > 15
    assert any(isinstance(end, Failed) for end in ends)
