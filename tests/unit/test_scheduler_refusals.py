"""What is refused, and which bugs are told apart from trouble."""

from __future__ import annotations

import pytest

from tests.unit.scheduler_bench import Bench, pictures, text
from triptych.core.errors import (
    DuplicateRequest,
    IntegrityError,
    Internal,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    StartupError,
)
from triptych.core.events import Failed
from triptych.core.request import Sampling
from triptych.core.step import StepResult


@pytest.mark.parametrize("limits", [{"max_context": 16}, {"num_blocks": 4}])
def test_a_prompt_that_never_fits_is_refused_without_naming_a_flag(limits: dict[str, int]) -> None:
    with pytest.raises(PromptTooLong, match=r"16 tokens.*of 16 tokens") as refused:
        Bench(**limits).add(text("a", 16))
    assert "--" not in str(refused.value)


def test_an_item_above_the_encoder_cache_is_refused_with_its_index_and_the_flag() -> None:
    with pytest.raises(InvalidRequest, match=r"media item 1: .*--encoder-cache-bytes 6$"):
        Bench(encoder_cache_bytes=5).add(pictures("a", 5, 6))
    Bench(encoder_cache_bytes=6).add(pictures("a", 5, 6))


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_priority_seconds_are_a_finite_number(seconds: float) -> None:
    with pytest.raises(StartupError, match="priority_seconds"):
        Bench(priority_seconds=seconds)


def test_live_ids_are_refused() -> None:
    bench = Bench()
    bench.add(text("a", 4))
    with pytest.raises(DuplicateRequest):
        bench.add(text("a", 4))


def test_a_full_queue_is_overload_and_counts_those_on_their_way() -> None:
    bench = Bench(max_waiting_requests=2)
    bench.add(text("a", 4))
    bench.scheduler.check_queue(arriving=0)
    with pytest.raises(Overloaded, match="--max-waiting-requests"):
        bench.scheduler.check_queue(arriving=1)


def test_sampling_without_a_seed_is_a_bug_of_the_caller() -> None:
    with pytest.raises(Internal, match="seed"):
        Bench().add(text("a", 4, sampling=Sampling(temperature=1.0)))


def test_a_step_without_its_result_and_a_result_without_its_step_are_bugs() -> None:
    bench = Bench()
    bench.add(text("a", 4))
    bench.scheduler.plan(0.0)
    with pytest.raises(IntegrityError, match="in flight"):
        bench.scheduler.plan(0.0)
    bench.scheduler.apply(StepResult({"a": 5}), 0.0)
    with pytest.raises(IntegrityError, match="in flight"):
        bench.scheduler.apply(StepResult(), 0.0)


def test_a_missing_token_fails_the_request_and_nothing_else() -> None:
    bench = Bench()
    bench.add(text("a", 4), text("b", 4, first=11))
    bench.scheduler.plan(0.0)
    bench.heard.take(bench.scheduler.apply(StepResult({"b": 5}), 0.0))
    assert isinstance(bench.heard.ends["a"], Failed)
    assert bench.heard.tokens["b"] == [5]


def test_the_watchdog_names_who_cannot_get_on() -> None:
    bench = Bench(num_blocks=4)
    bench.add(text("stuck", 4))
    # somebody outside the roster took the whole pool: a bug by construction
    bench.scheduler._roster.pool.allocate(4)
    with pytest.raises(IntegrityError, match=r"'stuck'.*4 of 4 blocks"):
        bench.scheduler.plan(0.0)
