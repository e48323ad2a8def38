from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from tests.engine.fakes import FakeTower, HashModel
from tests.engine.setup import Bench, alone
from tests.requests import group, item, request
from tests.unit.simulation import Mirror
from triptych.core.errors import Draining, DuplicateRequest, Internal, InvalidRequest, Overloaded, PromptTooLong
from triptych.core.events import Failed, Finished, FinishReason, Prompt, Tokens
from triptych.core.logprobs import LogprobOptions
from triptych.core.request import Sampling, Stopping
from triptych.engine.loop import Engine
from triptych.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.core.events import Event
    from triptych.core.kv_events import KvChange
    from triptych.core.step import StepPlan, StepResult

PATIENCE = 30.0
"""Seconds after which a wait has failed; no test needs a fraction of it."""


class Ear:
    """What was delivered, and a way to wait for it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.kv_changes: list[KvChange] = []
        self.threads: set[int] = set()
        self._changed = threading.Condition()

    def hear(self, events: tuple[Event, ...], kv_changes: tuple[KvChange, ...]) -> None:
        assert events or kv_changes
        with self._changed:
            self.events.extend(events)
            self.kv_changes.extend(kv_changes)
            self.threads.add(threading.get_ident())
            self._changed.notify_all()

    def wait(self, what: object) -> None:
        with self._changed:
            assert self._changed.wait_for(what, PATIENCE), f"not heard: {self.events}"

    def end(self, request_id: str) -> Finished | Failed:
        def find() -> list[Event]:
            return [e for e in self.events if e.request_id == request_id and isinstance(e, Finished | Failed)]

        self.wait(find)
        (end,) = find()
        return end

    def tokens(self, request_id: str) -> list[int]:
        return [t for e in self.events if isinstance(e, Tokens) and e.request_id == request_id for t in e.token_ids]


class Gate:
    """A runner that can be held in the middle of a step, and made to break."""

    def __init__(self, bench: Bench) -> None:
        self._runner = bench.runner
        self.open = threading.Event()
        self.open.set()
        self.inside = threading.Event()
        self.error: Exception | None = None
        self.steps = 0

    def check(self, made: object) -> None:
        self._runner.check(made)

    def run(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        self.inside.set()
        assert self.open.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return self._runner.run(plan)

    def statistics(self) -> dict[str, dict[str, float]]:
        return self._runner.statistics()


class Running:
    def __init__(self, **changes: object) -> None:
        self.bench = Bench(**changes)
        self.gate = Gate(self.bench)
        self.ear = Ear()
        spec = self.bench.model.spec
        self.scheduler = Scheduler(self.bench.config, spec.row_width * spec.dtype.itemsize, kv_changes=True)
        self.engine = Engine(self.scheduler, self.gate, check=True)


@contextmanager
def running(**changes: object) -> Iterator[Running]:
    made = Running(**changes)
    made.engine.start(made.ear.hear)
    try:
        yield made
    finally:
        made.gate.open.set()
        made.engine.stop()


def text(name: str, length: int = 5, tokens: int = 6) -> object:
    return request(name, [10 + n % 40 for n in range(length)], stopping=Stopping(max_tokens=tokens, ignore_eos=True))


def shown(name: str, picture: int, rows: int) -> object:
    return request(
        name, [10] * (rows + 5), [item(picture, (2, rows))], stopping=Stopping(max_tokens=6, ignore_eos=True)
    )


def endless(name: str) -> object:
    return text(name, tokens=400)


def test_answers_are_those_given_alone() -> None:
    made = [text(f"r{n}", 3 + n) for n in range(8)]
    made.append(request("p", [10] * 12, [item(1, (2, 6))], stopping=Stopping(max_tokens=6, ignore_eos=True)))
    with running() as run:
        for each in made:
            run.engine.submit([each])
        for each in made:
            assert isinstance(run.ear.end(each.request_id), Finished)
            assert run.ear.tokens(each.request_id) == alone(each)
        assert len(run.ear.threads) == 1
        assert threading.get_ident() not in run.ear.threads


@pytest.mark.parametrize("rows", [0, 40])
def test_four_outputs_are_those_of_four_requests_for_one_prefill(rows: int) -> None:
    leader = request(
        "a",
        [10 + n % 40 for n in range(61)],
        [item(1, (10, rows))] if rows else [],
        sampling=Sampling(seed=2**64 - 1),
        stopping=Stopping(max_tokens=6, ignore_eos=True),
    )
    made = group(leader, 4)
    with running(max_batched_tokens=20) as run:
        run.engine.submit(made)
        for each in made:
            assert isinstance(run.ear.end(each.request_id), Finished)
            assert run.ear.tokens(each.request_id) == alone(each)
        assert run.engine.load().queued_requests == 0
        computed = run.engine.statistics()["scheduler"]["computed_tokens"]
        # the last token of an answer is never computed
        assert computed - 4 * 5 == 61 + 3 * (61 - 48) <= 61 + 3 * run.bench.config.block_size
    assert len({tuple(run.ear.tokens(each.request_id)) for each in made}) == 4


def test_a_group_is_taken_whole_or_not_at_all() -> None:
    with running(max_running_requests=2, max_waiting_requests=3) as run:
        run.engine.submit([endless("b.1")])
        run.ear.wait(lambda: run.ear.tokens("b.1"))
        run.gate.open.clear()
        with pytest.raises(DuplicateRequest, match=r"b\.1"):
            run.engine.submit(group(text("b"), 2))
        with pytest.raises(InvalidRequest, match="num_sequences 3"):
            run.engine.submit(group(text("c"), 3))
        run.engine.submit(group(text("b"), 1))
        run.engine.submit([text("d")])
        with pytest.raises(Overloaded):
            run.engine.submit(group(text("c"), 2))
        with pytest.raises(Overloaded):
            run.engine.check_queue(2)
        run.engine.check_queue(1)
        assert run.engine.load().queued_requests == 2
        run.engine.abort("b.1")
        run.gate.open.set()
        assert isinstance(run.ear.end("b"), Finished)
        assert isinstance(run.ear.end("d"), Finished)
        run.engine.submit(group(text("c"), 2))  # none of its ids was kept
        assert isinstance(run.ear.end("c.1"), Finished)
        run.engine.stop()
        with pytest.raises(Draining):
            run.engine.submit(group(text("e"), 2))


def test_a_group_that_cannot_be_queued_fails_in_all_its_outputs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(requests: object) -> None:
        raise RuntimeError("a bug")

    with caplog.at_level(logging.CRITICAL), running() as run:
        monkeypatch.setattr(run.scheduler, "add", broken)
        run.engine.submit(group(text("a"), 2))
        for name in ("a", "a.1"):
            assert isinstance(run.ear.end(name).error, Internal)
        monkeypatch.undo()
        run.engine.submit(group(text("a"), 2))
        run.ear.wait(lambda: run.ear.tokens("a.1"))
    assert run.engine.failure is None


def test_members_of_a_group_are_aborted_one_by_one() -> None:
    made = group(endless("a"), 3)
    with running() as run:
        run.engine.submit(made)
        run.ear.wait(lambda: all(run.ear.tokens(each.request_id) for each in made))
        run.engine.abort("a")
        assert run.ear.end("a").reason is FinishReason.CANCELLED
        count = len(run.ear.tokens("a.2"))
        run.ear.wait(lambda: len(run.ear.tokens("a.2")) > count)
    assert {run.ear.end(each.request_id).reason for each in made} == {FinishReason.CANCELLED}
    assert run.engine.load().used_blocks == 0


def test_the_urgent_go_first() -> None:
    with running(max_running_requests=1) as run:
        run.gate.open.clear()
        run.engine.submit([text("first")])
        assert run.gate.inside.wait(PATIENCE)
        for priority in (0, 1, -1, 5):
            run.engine.submit(
                [request(f"{priority}", [10], stopping=Stopping(max_tokens=1, ignore_eos=True), priority=priority)]
            )
        run.gate.open.set()
        run.ear.end("-1")
    ends = [event.request_id for event in run.ear.events if isinstance(event, Finished)]
    assert ends == ["first", "5", "1", "0", "-1"]


def test_a_prompt_that_was_said_is_no_end() -> None:
    options = LogprobOptions(prompt=True, output=True)
    made = request("a", [10, 11, 12], stopping=Stopping(max_tokens=400, ignore_eos=True), logprobs=options)
    with running() as run:
        run.engine.submit([made])
        run.ear.wait(lambda: run.ear.tokens("a"))
        with pytest.raises(DuplicateRequest):
            run.engine.submit([text("a")])
    first, second = run.ear.events[:2]
    assert isinstance(first, Prompt)
    assert [each is None for each in first.logprobs] == [True, False, False]
    assert isinstance(second, Tokens)
    assert len(second.logprobs) == 1


def test_what_happens_to_cached_blocks_is_told_as_it_happens() -> None:
    with running(max_batched_tokens=16, num_blocks=8, max_context=128) as run:
        for name in "abc":
            run.engine.submit(
                [request(name, [ord(name) - 60, *range(10, 73)], stopping=Stopping(max_tokens=1), eos=())]
            )
            run.ear.end(name)
        mirror = Mirror(16)
        mirror.take(run.ear.kv_changes)
        assert mirror.findable == set(run.scheduler._roster.pool._block_of)
    assert len(mirror.stored) == 12
    assert len(mirror.findable) == 8


def test_cached_blocks_are_told_of_in_steps_without_events() -> None:
    heard: list[tuple[int, int]] = []
    done = threading.Event()
    made = Running(max_batched_tokens=16)

    def hear(events: tuple[Event, ...], kv_changes: tuple[KvChange, ...]) -> None:
        heard.append((len(events), len(kv_changes)))
        if events:
            done.set()

    made.engine.start(hear)
    made.engine.submit([text("a", 40, tokens=1)])
    assert done.wait(PATIENCE)
    made.engine.stop()
    assert heard == [(0, 1), (0, 1), (2, 0)]


def test_an_idle_engine_makes_no_steps() -> None:
    with running() as run:
        run.engine.submit([text("a")])
        run.ear.end("a")
        run.engine.submit([text("b", tokens=1)])
        run.ear.end("b")
    # six steps for one answer, one for the other, and at most one each to drop their state
    assert run.gate.steps <= 6 + 1 + 2


def test_abort_in_the_middle_of_a_step() -> None:
    with running() as run:
        run.engine.submit([endless("a")])
        run.ear.wait(lambda: run.ear.tokens("a"))
        run.gate.open.clear()
        run.gate.inside.clear()
        assert run.gate.inside.wait(PATIENCE)
        run.engine.abort("a")
        run.gate.open.set()
        assert run.ear.end("a").reason is FinishReason.CANCELLED
    assert run.engine.load().used_blocks == 0
    assert run.engine.failure is None


def test_aborts_of_strangers_and_of_the_finished_do_nothing() -> None:
    with running() as run:
        run.engine.abort("nobody")
        run.engine.submit([text("a")])
        run.ear.end("a")
        run.engine.abort("a")
        run.engine.submit([text("b")])
        assert isinstance(run.ear.end("b"), Finished)


def test_aborts_are_not_requests_that_wait() -> None:
    with running(max_waiting_requests=1) as run:
        run.gate.open.clear()
        run.engine.submit([endless("a")])
        assert run.gate.inside.wait(PATIENCE)
        for name in ("nobody", "a", "a"):
            run.engine.abort(name)
        assert run.engine.load().queued_requests == 0
        run.engine.submit([text("b")])
        assert run.engine.load().queued_requests == 1
        with pytest.raises(Overloaded):
            run.engine.submit([text("c")])
        run.gate.open.set()
        assert run.ear.end("a").reason is FinishReason.CANCELLED
        assert isinstance(run.ear.end("b"), Finished)
        assert run.engine.load().queued_requests == 0


def test_an_abort_of_an_id_that_is_not_live_leaves_no_message() -> None:
    engine = Running().engine
    engine.abort("nobody")
    assert engine._inbox.empty()


def test_an_id_is_free_as_soon_as_its_end_is_heard() -> None:
    heard: list[Event] = []
    done = threading.Event()
    bench = Bench()
    engine = Engine(bench.scheduler, bench.runner)

    def hear(events: tuple[Event, ...], kv_changes: tuple[KvChange, ...]) -> None:
        for event in events:
            if not isinstance(event, Tokens):
                heard.append(event)
                if len(heard) == 1:
                    engine.submit([text("a")])
                else:
                    done.set()

    engine.start(hear)
    engine.submit([text("a")])
    assert done.wait(PATIENCE)
    engine.stop()
    assert all(isinstance(event, Finished) for event in heard)


def test_refusals_are_raised_before_acceptance_and_leave_nothing() -> None:
    with running(max_context=64, max_waiting_requests=1, max_running_requests=1) as run:
        with pytest.raises(PromptTooLong):
            run.engine.submit([text("a", 64)])
        with pytest.raises(InvalidRequest, match="token id 4711"):
            run.engine.submit([request("a", [4711])])
        run.engine.submit([endless("a")])
        with pytest.raises(DuplicateRequest):
            run.engine.submit([text("a")])
        run.ear.wait(lambda: run.ear.tokens("a"))
        run.gate.open.clear()
        run.engine.submit([text("b")])
        with pytest.raises(Overloaded):
            run.engine.submit([text("c")])
        with pytest.raises(Overloaded):
            run.engine.check_queue()
        assert run.engine.load().queued_requests == 1


def test_stop_cancels_what_is_live_and_refuses_what_comes() -> None:
    with running(max_running_requests=1) as run:
        for name in "ab":
            run.engine.submit([endless(name)])
        run.ear.wait(lambda: run.ear.tokens("a"))
        run.engine.stop()
        assert run.ear.end("a").reason is FinishReason.CANCELLED
        assert run.ear.end("b").reason is FinishReason.CANCELLED
        with pytest.raises(Draining):
            run.engine.submit([text("c")])
        run.engine.stop()
    assert run.engine.load().used_blocks == 0


def test_a_broken_loop_fails_everybody_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL), running(max_running_requests=1) as run:
        run.gate.open.clear()
        for name in "ab":
            run.engine.submit([endless(name)])
        run.gate.error = torch.AcceleratorError("device lost, 0xdeadbeef")
        run.gate.open.set()
        for name in "ab":
            end = run.ear.end(name)
            assert isinstance(end, Failed)
            assert isinstance(end.error, Internal)
            assert "deadbeef" not in str(end.error)
        assert isinstance(run.engine.failure, Internal)
        with pytest.raises(Draining, match="failed"):
            run.engine.submit([text("c")])


def test_after_a_failure_the_inbox_is_empty_and_stays_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL), running() as run:
        run.gate.open.clear()
        run.engine.submit([endless("a")])
        assert run.gate.inside.wait(PATIENCE)
        run.engine.submit([endless("b")])
        run.engine.abort("b")
        run.gate.error = RuntimeError("broken")
        run.gate.open.set()
        run.ear.end("b")
        for name in ("a", "b", "nobody"):
            run.engine.abort(name)
        run.engine.stop()
        assert run.engine._inbox.empty()
        # "a" stays in the ledgers of the scheduler that broke, "b" never reached them
        assert run.engine.load().queued_requests == 0


def test_requests_too_large_for_the_memory_end_alone_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    model, tower = HashModel(most_tokens=40), FakeTower(most_rows=12)
    made = [text("a", 9), text("b", 12), shown("picture", 1, 6)]
    with caplog.at_level(logging.CRITICAL), running(model=model, tower=tower) as run:
        run.gate.open.clear()
        for each in (text("long", 41), *made[:2], shown("large", 2, 13), made[2]):
            run.engine.submit([each])
        run.gate.open.set()
        for name, setting in (("long", "--max-batched-tokens"), ("large", "longest_edge")):
            end = run.ear.end(name)
            assert isinstance(end, Failed)
            assert isinstance(end.error, Overloaded)
            assert setting in str(end.error)
        for each in made:
            assert isinstance(run.ear.end(each.request_id), Finished)
            assert run.ear.tokens(each.request_id) == alone(each)
        run.engine.submit([text("later", 9)])
        assert isinstance(run.ear.end("later"), Finished)
    assert run.engine.failure is None
    assert run.engine.load().used_blocks == 0


def test_a_receiver_that_breaks_is_a_failure_of_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    called = threading.Event()

    def hear(events: tuple[Event, ...], kv_changes: tuple[KvChange, ...]) -> None:
        called.set()
        raise RuntimeError("nobody listens")

    bench = Bench()
    engine = Engine(bench.scheduler, bench.runner)
    with caplog.at_level(logging.CRITICAL):
        engine.start(hear)
        engine.submit([text("a")])
        assert called.wait(PATIENCE)
        engine.stop()
    assert engine.failure is not None


def test_load_and_statistics_are_plain_numbers() -> None:
    with running() as run:
        run.engine.submit([text("a", 20)])
        run.ear.end("a")
        statistics = run.engine.statistics()
    assert set(statistics) == {"scheduler", "kv_blocks", "encoder_cache"}
    assert all(isinstance(value, int | float) for ledger in statistics.values() for value in ledger.values())
    assert statistics["scheduler"]["finished"] == 1
    assert statistics["scheduler"]["generated_tokens"] == 6
    assert statistics["kv_blocks"]["held"] == 0


def test_many_threads_submit_and_abort() -> None:
    made = {f"r{n}": text(f"r{n}", 3 + n % 9, 8) for n in range(120)}
    expected = {name: alone(made[name]) for name in list(made)[:9]}
    with running(num_blocks=24, block_size=4, max_running_requests=6) as run:

        def client(names: list[str]) -> None:
            for name in names:
                run.engine.submit([made[name]])
                if int(name[1:]) % 3 == 0:
                    run.engine.abort(name)

        threads = [threading.Thread(target=client, args=(list(made)[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in made:
            end = run.ear.end(name)
            assert isinstance(end, Finished)
            tokens, whole = run.ear.tokens(name), expected[f"r{int(name[1:]) % 9}"]
            assert tokens == whole if end.reason is FinishReason.LENGTH else tokens == whole[: len(tokens)]
    assert run.engine.failure is None
    assert run.engine.load().used_blocks == 0
