from __future__ import annotations

import dataclasses

import pytest

from tests.requests import EOS, content_key, item, request
from tests.unit.simulation import ROW_BYTES, Heard, SimulatedRunner, answer_alone, run_all, step
from triptych.core.config import SchedulerConfig
from triptych.core.errors import (
    DuplicateRequest,
    IntegrityError,
    Internal,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
)
from triptych.core.events import EosToken, Failed, FinishReason, Span, StopToken, Tokens
from triptych.core.request import CacheOptions, Sampling, Stopping
from triptych.core.step import StepResult
from triptych.engine.scheduler import Scheduler

ROOMY = SchedulerConfig(
    max_batched_tokens=64,
    max_running_requests=8,
    max_context=256,
    block_size=4,
    num_blocks=64,
    encoder_items=8,
    encoder_tokens=1000,
    encoder_cache_bytes=1000,
)


class Bench:
    """A scheduler with a simulated runner and what was heard."""

    def __init__(self, **changes: int) -> None:
        self.config = dataclasses.replace(ROOMY, **changes)
        self.scheduler = Scheduler(self.config, ROW_BYTES)
        self.runner = SimulatedRunner(self.config)
        self.heard = Heard()

    def add(self, *requests: object) -> None:
        for each in requests:
            self.scheduler.add(each)

    def step(self, now: float = 0.0) -> object:
        return step(self.scheduler, self.runner, self.heard, now)

    def lengths(self) -> dict[str, int]:
        """What one more step computes."""
        return {piece.request_id: piece.length for piece in self.step().tokens}

    def run(self) -> int:
        return run_all(self.scheduler, self.runner, self.heard)

    def alone(self, made: object) -> list[int]:
        return answer_alone(made, min(self.config.max_context, self.config.num_blocks * self.config.block_size))


def text(name: str, length: int, tokens: int = 8, *, first: int = 10, **options: object) -> object:
    return request(
        name,
        [first, *range(20, 19 + length)],
        stopping=Stopping(max_tokens=tokens, ignore_eos=True),
        **options,
    )


def pictures(
    name: str, *rows: int, gap: int = 1, tail: int = 2, tokens: int = 3, start: int = 100, cost: int = 4
) -> object:
    """Pictures start, start + 1, ... of so many rows, with ``gap`` text tokens before each."""
    items, at = [], 0
    for number, count in enumerate(rows):
        at += gap
        items.append(item(start + number, (at, count), encoder_tokens=count * cost))
        at += count
    return request(name, [10] * (at + tail), items, stopping=Stopping(max_tokens=tokens, ignore_eos=True))


# -- budgets and order ----------------------------------------------------------------------------


def test_decodes_come_first_then_running_prefills_then_the_queue() -> None:
    bench = Bench(max_batched_tokens=8)
    bench.add(text("a", 4))
    bench.step()
    bench.add(text("b", 12, first=11), text("c", 3, first=12))
    assert bench.lengths() == {"a": 1, "b": 7}
    assert bench.lengths() == {"a": 1, "b": 5, "c": 2}
    assert bench.lengths() == {"a": 1, "b": 1, "c": 1}


def test_a_head_that_cannot_start_blocks_those_behind_it() -> None:
    bench = Bench(num_blocks=8)
    bench.add(text("a", 16, 12), text("big", 20), text("small", 2, first=11))
    assert bench.lengths() == {"a": 16}
    assert bench.scheduler.load().queued_requests == 2


def test_admission_leaves_a_block_for_each_running_answer() -> None:
    # eight blocks: "a" fills four, and will need a fifth; "b" would fill the other four
    bench = Bench(num_blocks=8)
    bench.add(text("a", 16, 4), text("b", 13, first=11))
    assert bench.lengths() == {"a": 16}
    bench.run()
    assert bench.scheduler.statistics().preemptions == 0


def test_no_more_than_max_running_requests_run() -> None:
    bench = Bench(max_running_requests=2)
    bench.add(*(text(name, 3, 2, first=ord(name)) for name in "abc"))
    assert set(bench.lengths()) == {"a", "b"}
    assert set(bench.lengths()) == {"a", "b"}  # they end here
    assert set(bench.lengths()) == {"c"}


def test_the_load_counts_what_is_there() -> None:
    bench = Bench(max_batched_tokens=8)
    bench.add(text("a", 4))
    bench.step()
    bench.add(text("b", 12, first=11), text("c", 5, first=12))
    bench.step()
    load = bench.scheduler.load()
    assert (load.running_requests, load.queued_requests) == (2, 1)
    assert (load.running_tokens, load.waiting_tokens) == (5 + 7, 5)
    assert (load.used_blocks, load.total_blocks) == (2 + 3, 64)
    assert (load.prefill_batch, load.decode_batch) == (1, 1)


# -- the encoder ----------------------------------------------------------------------------------


def encoded(plan: object) -> list[tuple[str, int]]:
    return [(task.request_id, task.item) for task in plan.encode]


def test_items_are_packed_in_order_and_a_cheaper_later_one_may_not_jump_ahead() -> None:
    bench = Bench(encoder_items=2, encoder_tokens=1000, max_batched_tokens=200)
    bench.add(pictures("a", 6, 5, 4, cost=100))
    assert encoded(bench.step()) == [("a", 0)]
    plan = bench.step()
    assert encoded(plan) == [("a", 1), ("a", 2)]
    assert plan.tokens[0].samples


def test_the_item_budget_counts_too() -> None:
    bench = Bench(encoder_items=2)
    bench.add(pictures("a", 1, 1, 1))
    assert [encoded(bench.step()) for _ in range(2)] == [[("a", 0), ("a", 1)], [("a", 2)]]


def test_left_over_budget_goes_to_another_request() -> None:
    bench = Bench(encoder_tokens=100)
    bench.add(pictures("a", 15, 15), pictures("b", 5, start=200))
    assert encoded(bench.step()) == [("a", 0), ("b", 0)]


def test_an_item_above_the_token_budget_runs_alone() -> None:
    bench = Bench(encoder_tokens=10)
    bench.add(pictures("small", 2), pictures("huge", 5, start=200), pictures("other", 2, start=300))
    assert encoded(bench.step()) == [("small", 0)]
    assert encoded(bench.step()) == [("huge", 0)]
    assert encoded(bench.step()) == [("other", 0)]


def test_the_same_picture_of_two_requests_is_encoded_once() -> None:
    bench = Bench()
    bench.add(pictures("a", 5), request("b", [11] * 9, [item(100, (2, 5), encoder_tokens=20)]))
    assert encoded(bench.step()) == [("a", 0)]
    assert bench.scheduler.statistics().encoder_cache.reservation_hits == 1
    bench.run()
    assert bench.scheduler.statistics().encoded_items == 1


def test_only_items_that_overlap_the_chunk_are_encoded() -> None:
    bench = Bench(max_batched_tokens=8)
    bench.add(pictures("a", 6, 6))
    assert encoded(bench.step()) == [("a", 0)]  # tokens 0..8: a gap, six rows, a gap
    assert encoded(bench.step()) == [("a", 1)]


def test_a_chunk_ends_before_the_first_item_that_cannot_be_had() -> None:
    bench = Bench(encoder_cache_bytes=8)
    bench.add(pictures("a", 6, 6, gap=3))
    assert bench.lengths() == {"a": 12}  # gap, item, gap: the second item waits for the space of the first
    assert bench.lengths() == {"a": 8}


def test_rows_stay_while_the_item_is_partly_computed_and_go_when_it_is_passed() -> None:
    bench = Bench(max_batched_tokens=4)
    bench.add(pictures("a", 6, gap=2))
    held = []
    for _ in range(3):
        bench.step()
        held.append(bench.scheduler.statistics().encoder_cache.held_bytes)
    assert held == [6, 0, 0]


def test_two_half_encoded_requests_and_a_tight_cache_finish() -> None:
    bench = Bench(encoder_cache_bytes=10, max_batched_tokens=8, encoder_items=1)
    made = [pictures("a", 6, 6), pictures("b", 6, 6, start=200)]
    bench.add(*made)
    bench.run()
    assert [bench.heard.tokens[name] for name in "ab"] == [bench.alone(each) for each in made]


def test_the_oldest_gets_space_that_younger_ones_keep_asking_for() -> None:
    # "whole" needs the cache for itself. Six tokens a step leave a younger request in the middle of its picture
    # after every step, if younger ones may begin new pictures while it waits.
    bench = Bench(encoder_cache_bytes=12, max_batched_tokens=6)
    bench.add(pictures("first", 5, gap=3, tail=1, tokens=1))
    bench.step()
    bench.add(pictures("whole", 12, tokens=1, start=200))
    for number in range(20):
        bench.add(pictures(f"s{number}", 5, gap=0, tail=1, tokens=1, start=300 + number))
    while "whole" not in bench.heard.ends:
        bench.step()
    assert not any(f"s{number}" in bench.heard.ends for number in range(1, 20))


def test_an_item_behind_a_reused_prefix_is_neither_encoded_nor_held() -> None:
    bench = Bench(encoder_cache_bytes=6)
    bench.add(pictures("a", 6, gap=2, tail=6))
    bench.run()
    bench.add(pictures("hog", 5, start=300))
    bench.run()  # the rows of the picture are gone, its KV is not
    bench.add(pictures("again", 6, gap=2, tail=6))
    assert encoded(bench.step()) == []
    bench.run()
    assert bench.heard.tokens["again"] == bench.heard.tokens["a"]


def test_a_bad_picture_fails_its_owner_and_followers_only() -> None:
    bench = Bench()
    bench.runner.bad_pictures = {content_key(100)}
    follower = request("follower", [11] * 9, [item(100, (2, 5), encoder_tokens=20)])
    bench.add(pictures("owner", 5), follower, pictures("other", 5, start=200), text("text", 3, first=50))
    bench.step()
    assert {name for name, end in bench.heard.ends.items() if isinstance(end, Failed)} == {"owner", "follower"}
    bench.run()
    assert bench.heard.finish("other").usage.completion_tokens == 3
    assert bench.heard.finish("text").usage.completion_tokens == 8


# -- blocks, prefixes, preemption -----------------------------------------------------------------


def test_equal_prompts_reuse_all_full_blocks_but_compute_the_last_token() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.add(text(name, 16))
        bench.run()
    assert bench.heard.finish("a").usage.cached_prompt_tokens == 0
    assert bench.heard.finish("b").usage.cached_prompt_tokens == 12
    assert bench.heard.tokens["a"] == bench.heard.tokens["b"]


def test_a_picture_is_reused_with_its_own_kv_only() -> None:
    bench = Bench()
    for name, start in (("a", 100), ("same", 100), ("other", 101)):
        bench.add(pictures(name, 8, gap=5, tail=4, start=start))
        bench.run()
    cached = {name: bench.heard.finish(name).usage.cached_prompt_tokens for name in ("a", "same", "other")}
    assert cached == {"a": 0, "same": 16, "other": 4}
    assert bench.heard.tokens["same"] == bench.heard.tokens["a"] != bench.heard.tokens["other"]


def test_generated_tokens_are_reused_too() -> None:
    bench = Bench()
    bench.add(text("a", 8, 8))
    bench.run()
    whole = [10, *range(20, 27), *bench.heard.tokens["a"]]
    bench.add(request("b", [*whole, 50], stopping=Stopping(max_tokens=1)))
    bench.run()
    assert bench.heard.finish("b").usage.cached_prompt_tokens == 12  # the last generated token was never computed


@pytest.mark.parametrize("cache", [CacheOptions(bypass_prefix_cache=True), CacheOptions(salt="mine")])
def test_bypass_and_salt_reuse_nothing_of_others(cache: CacheOptions) -> None:
    bench = Bench()
    for name, options in (("a", CacheOptions()), ("b", cache)):
        bench.add(text(name, 16, cache=options))
        bench.run()
    assert bench.heard.finish("b").usage.cached_prompt_tokens == 0
    assert bench.heard.tokens["a"] == bench.heard.tokens["b"]


def test_what_a_bypassing_request_computed_can_be_reused() -> None:
    bench = Bench()
    for name, bypass in (("a", True), ("b", False)):
        bench.add(text(name, 16, cache=CacheOptions(bypass_prefix_cache=bypass)))
        bench.run()
    assert bench.heard.finish("b").usage.cached_prompt_tokens == 12


def test_the_youngest_gives_way_when_blocks_run_out_and_answers_do_not_change() -> None:
    bench = Bench(num_blocks=10)
    made = [text(name, 6, 18, first=number) for number, name in enumerate("abc", start=50)]
    bench.add(*made)
    bench.run()
    assert bench.scheduler.statistics().preemptions > 0
    assert list(bench.heard.ends) == ["a", "b", "c"]
    assert [bench.heard.tokens[each.request_id] for each in made] == [bench.alone(each) for each in made]


def test_preemption_keeps_pictures() -> None:
    bench = Bench(num_blocks=8, encoder_cache_bytes=6)
    made = [pictures("a", 5, tokens=16), pictures("b", 5, tokens=16, start=200)]
    bench.add(*made)
    bench.run()
    assert bench.scheduler.statistics().preemptions > 0
    assert [bench.heard.tokens[each.request_id] for each in made] == [bench.alone(each) for each in made]


def test_usage_reports_the_hits_of_the_first_admission() -> None:
    bench = Bench(num_blocks=8)
    bench.add(text("a", 4, 24), text("b", 8, 20, first=11))
    bench.run()
    assert bench.scheduler.statistics().preemptions > 0
    assert bench.heard.finish("b").usage.cached_prompt_tokens == 0


def test_a_failed_request_leaves_nothing_in_the_prefix_cache() -> None:
    bench = Bench(max_batched_tokens=8)
    bench.add(text("a", 16))
    bench.step()
    bench.runner.bad_requests = {"a"}
    bench.step()
    assert isinstance(bench.heard.ends["a"], Failed)
    bench.runner.bad_requests = set()
    bench.add(text("b", 16))
    bench.run()
    assert bench.heard.finish("b").usage.cached_prompt_tokens == 0


# -- how answers end ------------------------------------------------------------------------------


def answer(sampled: list[int], *, stopping: Stopping, max_context: int = 256) -> tuple[list[int], object]:
    """The visible tokens and the end of a request for which the model says ``sampled``."""
    scheduler = Scheduler(dataclasses.replace(ROOMY, max_context=max_context), ROW_BYTES)
    scheduler.add(request("r", [10, 11, 12], stopping=stopping))
    shown: list[int] = []
    for token in sampled:
        plan = scheduler.plan(0.0)
        assert [piece.request_id for piece in plan.tokens] == ["r"]
        for event in scheduler.apply(StepResult({"r": token}), 0.0):
            if isinstance(event, Tokens):
                shown.extend(event.token_ids)
            else:
                return shown, event
    return shown, None


def test_an_eos_ends_the_answer_is_not_shown_and_counts() -> None:
    shown, end = answer([5, EOS], stopping=Stopping(max_tokens=8))
    assert (shown, end.reason, end.stop) == ([5], FinishReason.STOP, EosToken(EOS))
    assert end.usage.completion_tokens == 2


def test_a_stop_id_is_shown_only_when_asked_for() -> None:
    shown, end = answer([5, 7], stopping=Stopping(max_tokens=8, stop_token_ids=(7,)))
    assert (shown, end.stop) == ([5], StopToken(7))
    shown, end = answer([5, 7], stopping=Stopping(max_tokens=8, stop_token_ids=(7,), include_stop_in_output=True))
    assert (shown, end.stop) == ([5, 7], StopToken(7))


def test_an_eos_is_never_shown_even_when_stops_are() -> None:
    shown, _ = answer([5, EOS], stopping=Stopping(max_tokens=8, include_stop_in_output=True))
    assert shown == [5]


def test_ignore_eos_goes_on_and_shows_it() -> None:
    shown, end = answer([EOS, 5], stopping=Stopping(max_tokens=2, ignore_eos=True))
    assert (shown, end.reason, end.stop) == ([EOS, 5], FinishReason.LENGTH, None)


def test_nothing_stops_before_min_tokens() -> None:
    shown, end = answer([EOS, 7, EOS], stopping=Stopping(max_tokens=8, min_tokens=2, stop_token_ids=(7,)))
    assert (shown, end.stop) == ([EOS, 7], EosToken(EOS))


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    _, end = answer([5, EOS], stopping=Stopping(max_tokens=2))
    assert end.reason is FinishReason.STOP


@pytest.mark.parametrize("limits", [{"max_context": 8}, {"num_blocks": 2}])
def test_an_answer_that_fills_context_or_pool_ends_by_length(limits: dict[str, int]) -> None:
    bench = Bench(**limits)
    bench.add(text("a", 3, 100))
    bench.run()
    assert bench.heard.finish("a").reason is FinishReason.LENGTH
    assert bench.heard.finish("a").usage.completion_tokens == 5


def test_the_stages_of_a_request_are_timed() -> None:
    bench = Bench(max_batched_tokens=7)
    made = dataclasses.replace(pictures("a", 6, tail=3, tokens=2), arrival=1.0)
    bench.add(made)
    for now in (2.0, 3.0, 4.0):
        bench.step(now)
    assert bench.heard.finish("a").spans == (
        Span("queue", 1.0, 2.0),
        Span("encode", 2.0, 2.25),
        Span("prefill", 2.0, 3.0),
        Span("decode", 3.0, 4.0),
    )


# -- aborts ---------------------------------------------------------------------------------------


def test_abort_while_waiting() -> None:
    bench = Bench()
    bench.add(text("a", 4))
    bench.heard.take(bench.scheduler.abort("a", 1.0))
    assert bench.heard.finish("a").reason is FinishReason.CANCELLED
    assert not bench.scheduler.busy


def test_abort_while_running_frees_everything_and_tells_the_runner() -> None:
    bench = Bench(max_batched_tokens=4)
    bench.add(pictures("a", 6))
    bench.step()
    bench.heard.take(bench.scheduler.abort("a", 1.0))
    statistics = bench.scheduler.statistics()
    assert statistics.blocks.held == statistics.encoder_cache.held_bytes == 0
    assert bench.step().ends == ("a",)
    assert not bench.scheduler.busy


def test_abort_in_the_middle_of_a_step_is_done_when_the_step_is() -> None:
    bench = Bench()
    bench.add(text("a", 4), text("b", 4, first=11))
    result = bench.runner.run(bench.scheduler.plan(0.0))
    assert bench.scheduler.abort("a", 0.0) == ()
    assert bench.scheduler.statistics().blocks.held == 2
    bench.heard.take(bench.scheduler.apply(result, 0.0))
    assert bench.heard.finish("a").reason is FinishReason.CANCELLED
    assert bench.scheduler.statistics().blocks.held == 1
    bench.run()
    assert len(bench.heard.tokens["b"]) == 8


def test_an_abort_of_nobody_is_no_error() -> None:
    assert Bench().scheduler.abort("nobody", 0.0) == ()


def test_an_id_can_be_used_again_at_once() -> None:
    bench = Bench()
    bench.add(text("a", 4))
    bench.step()
    bench.scheduler.abort("a", 0.0)
    bench.add(text("a", 4, 2))
    plan = bench.step()
    assert (plan.ends, len(plan.starts)) == (("a",), 1)


# -- refusals -------------------------------------------------------------------------------------


def test_a_prompt_that_never_fits_is_refused_with_the_flag() -> None:
    with pytest.raises(PromptTooLong, match="--max-context"):
        Bench(max_context=16).add(text("a", 16))
    with pytest.raises(PromptTooLong, match="--kv-cache-bytes"):
        Bench(num_blocks=4).add(text("a", 16))


def test_an_item_above_the_encoder_cache_is_refused_with_its_index_and_the_flag() -> None:
    with pytest.raises(InvalidRequest, match=r"media item 1: .*--encoder-cache-bytes"):
        Bench(encoder_cache_bytes=5).add(pictures("a", 5, 6))


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


# -- bugs -----------------------------------------------------------------------------------------


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
