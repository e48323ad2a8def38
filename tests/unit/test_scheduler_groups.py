"""Several outputs of one request: one prefill, and nobody is stranded."""

from __future__ import annotations

import dataclasses

import pytest

from tests.requests import group, item, request
from tests.unit.scheduler_bench import Bench, text
from triptych.core.errors import DuplicateRequest, Internal, InvalidRequest, Overloaded
from triptych.core.events import Failed, FinishReason
from triptych.core.request import CacheOptions, Sampling, Stopping

BLOCK = 4


def outputs(name: str, length: int, count: int, tokens: int = 6, **options: object) -> list[object]:
    return group(text(name, length, tokens, sampling=Sampling(seed=7), **options), count)


def check_answers(bench: Bench, *members: object) -> None:
    assert [bench.heard.tokens[each.request_id] for each in members] == [bench.alone(each) for each in members]
    assert bench.scheduler.statistics().blocks.held == 0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 30])
@pytest.mark.parametrize("bypass", [False, True])
def test_four_outputs_are_those_of_four_requests_for_one_prefill(length: int, bypass: bool) -> None:
    bench = Bench()
    members = outputs("a", length, 4, cache=CacheOptions(bypass_prefix_cache=bypass))
    bench.scheduler.add(members)
    bench.run()
    check_answers(bench, *members)
    assert len({tuple(tokens) for tokens in bench.heard.tokens.values()}) > 1
    shared = (length - 1) // BLOCK * BLOCK
    assert bench.computed_prompt_tokens(length) == length + 3 * (length - shared) <= length + 3 * BLOCK


def test_followers_sample_in_the_step_after_the_prompt_however_it_was_cut() -> None:
    bench = Bench(max_batched_tokens=10)
    bench.scheduler.add(outputs("a", 26, 3))
    assert [bench.lengths() for _ in range(3)] == [{"a": 10}, {"a": 10}, {"a": 6}]
    assert bench.lengths() == {"a": 1, "a.1": 2, "a.2": 2}
    assert {name: len(tokens) for name, tokens in bench.heard.tokens.items()} == {"a": 2, "a.1": 1, "a.2": 1}


def test_a_leader_whose_blocks_cannot_be_found_shares_them_all_the_same() -> None:
    # "twin" computes the same prompt in the same step and is the one that others find
    bench = Bench()
    twin, members = text("twin", 16, 6), outputs("a", 16, 3)
    bench.add(twin)
    bench.scheduler.add(members)
    bench.run()
    check_answers(bench, twin, *members)
    assert bench.computed_prompt_tokens(16) == 16 + 16 + 2 * BLOCK


def test_the_prompt_of_a_group_counts_once_and_each_output_says_what_it_reused() -> None:
    bench = Bench()
    bench.add(text("warm", 9, 1))
    bench.run()
    bench.scheduler.add(outputs("a", 16, 3))
    bench.run()
    cached = {name: bench.heard.finish(name).usage.cached_prompt_tokens for name in ("a", "a.1", "a.2")}
    assert cached == {"a": 8, "a.1": 12, "a.2": 12}
    statistics = bench.scheduler.statistics()
    assert (statistics.prompt_tokens, statistics.cached_prompt_tokens) == (9 + 16, 8)
    assert (statistics.accepted, statistics.finished) == (4, 4)


def test_an_output_that_ends_with_its_first_token_leaves_its_blocks_to_the_others() -> None:
    bench = Bench()
    members = outputs("a", 13, 3, tokens=1)
    bench.scheduler.add(members)
    assert bench.step().ends == ()
    assert list(bench.heard.ends) == ["a"]
    assert bench.lengths() == {"a.1": 1, "a.2": 1}
    bench.run()
    check_answers(bench, *members)


def test_pictures_in_the_last_block_are_read_again_and_encoded_once() -> None:
    bench = Bench()
    made = request("a", [10] * 11, [item(1, (2, 8))], sampling=Sampling(seed=1), stopping=Stopping(max_tokens=4))
    members = group(made, 4)
    bench.scheduler.add(members)
    bench.run()
    check_answers(bench, *members)
    statistics = bench.scheduler.statistics()
    assert statistics.encoded_items == 1
    assert statistics.encoder_cache.held_bytes == 0
    assert bench.computed_prompt_tokens(11) == 11 + 3 * 3


def test_rows_that_are_gone_by_then_are_encoded_again() -> None:
    # the second picture drives the first one out, and the last block has a bit of both
    bench = Bench(encoder_cache_bytes=6, max_batched_tokens=10)
    items = [item(1, (2, 6)), item(2, (8, 6))]
    made = request("a", [10] * 15, items, sampling=Sampling(seed=1), stopping=Stopping(max_tokens=4))
    bench.scheduler.add(group(made, 3))
    bench.run()
    check_answers(bench, *group(made, 3))


def test_places_are_kept_for_the_followers() -> None:
    bench = Bench(max_running_requests=4, max_batched_tokens=12)
    members = outputs("a", 16, 3, tokens=3)
    bench.scheduler.add(members)
    bench.add(text("b", 3, 9, first=11), text("c", 3, 3, first=12))
    assert set(bench.lengths()) == {"a"}
    assert set(bench.lengths()) == {"a", "b"}
    assert set(bench.lengths()) == {"a", "a.1", "a.2", "b"}
    assert set(bench.lengths()) == {"a", "a.1", "a.2", "b"}  # "a" ends
    assert set(bench.lengths()) == {"a.1", "a.2", "b", "c"}
    bench.run()
    check_answers(bench, *members)


def test_a_group_waits_for_places_of_all_and_those_behind_it_wait_too() -> None:
    bench = Bench(max_running_requests=3)
    bench.add(text("b", 3, 4, first=11))
    bench.step()
    bench.scheduler.add(outputs("a", 5, 3))
    bench.add(text("c", 3, 2, first=12))
    assert [set(bench.lengths()) for _ in range(3)] == [{"b"}] * 3
    assert set(bench.lengths()) == {"a"}
    assert set(bench.lengths()) == {"a", "a.1", "a.2"}


def test_followers_count_as_waiting_until_they_run() -> None:
    bench = Bench(max_batched_tokens=8)
    bench.scheduler.add(outputs("a", 12, 3))
    assert bench.scheduler.load().queued_requests == 3
    bench.step()
    load = bench.scheduler.load()
    assert (load.running_requests, load.queued_requests, load.waiting_tokens) == (1, 2, 0)
    bench.step()
    load = bench.scheduler.load()
    assert (load.running_requests, load.queued_requests, load.running_tokens) == (3, 0, 12 + 8 + 8)


def test_followers_do_not_hash_the_prompt_again() -> None:
    bench = Bench()
    bench.scheduler.add(outputs("a", 30, 2))
    bench.step()
    assert len(bench.scheduler._roster.find("a.1").chain.hashes) == 30 // BLOCK


def test_a_follower_without_a_block_waits_for_one() -> None:
    bench = Bench(num_blocks=7)
    members = outputs("a", 16, 4, tokens=8)
    bench.scheduler.add(members)
    bench.step()
    load = bench.scheduler.load()
    assert (load.running_requests, load.queued_requests) == (2, 2)
    bench.run()
    check_answers(bench, *members)
    statistics = bench.scheduler.statistics()
    assert statistics.prompt_tokens == 16


def test_a_group_larger_than_what_runs_or_waits_is_refused_by_name() -> None:
    bench = Bench(max_running_requests=3)
    with pytest.raises(InvalidRequest, match=r"num_sequences 4 .* 3 .*--max-running-requests 4"):
        bench.scheduler.add(outputs("a", 4, 4))
    bench.scheduler.add(outputs("a", 4, 3))
    bench = Bench(max_waiting_requests=2)
    with pytest.raises(InvalidRequest, match=r"num_sequences 3 .* 2 .*--max-waiting-requests 3"):
        bench.scheduler.check_queue(0, 3)


def test_the_queue_has_room_for_a_whole_group_or_for_none() -> None:
    bench = Bench(max_waiting_requests=4)
    bench.scheduler.add(outputs("a", 4, 2))
    bench.scheduler.check_queue(0, 2)
    for arriving, count in ((0, 3), (1, 2)):
        with pytest.raises(Overloaded, match="--max-waiting-requests"):
            bench.scheduler.check_queue(arriving, count)


def test_a_refused_group_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.add(text("a.2", 4))
    with pytest.raises(DuplicateRequest):
        bench.scheduler.add(outputs("a", 4, 4))
    with pytest.raises(DuplicateRequest):
        bench.scheduler.add([text("b", 4), text("b", 4)])
    assert bench.scheduler.load().queued_requests == bench.scheduler.statistics().accepted == 1
    bench.scheduler.add([text("a", 4)])


@pytest.mark.parametrize("change", [{"cache": CacheOptions(salt="other")}, {"adapter": object()}, {"plan": None}])
def test_members_that_could_not_share_are_a_bug_of_the_caller(change: dict[str, object]) -> None:
    bench = Bench()
    leader, follower = outputs("a", 4, 2)
    with pytest.raises(Internal):
        bench.scheduler.add([leader, dataclasses.replace(follower, **change)])


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("flying", [False, True])
def test_an_aborted_leader_strands_nobody(steps: int, flying: bool) -> None:
    # two steps of prompt
    bench = Bench(max_batched_tokens=8)
    members = outputs("a", 16, 3)
    bench.scheduler.add(members)
    for _ in range(steps):
        bench.step()
    result = bench.runner.run(bench.scheduler.plan(0.0)) if flying else None
    bench.heard.take(bench.scheduler.abort("a", 0.0))
    if flying:
        bench.heard.take(bench.scheduler.apply(result, 0.0))
    bench.scheduler.check_integrity()
    assert bench.heard.finish("a").reason is FinishReason.CANCELLED
    bench.run()
    check_answers(bench, *members[1:])


@pytest.mark.parametrize("steps", [0, 1])
def test_a_failed_leader_strands_nobody(steps: int) -> None:
    bench = Bench(max_batched_tokens=8)
    members = outputs("a", 16, 3)
    bench.scheduler.add(members)
    for _ in range(steps):
        bench.step()
    bench.runner.bad_requests = {"a"}
    bench.step()
    assert isinstance(bench.heard.ends["a"], Failed)
    bench.runner.bad_requests = set()
    bench.run()
    check_answers(bench, *members[1:])
    # nothing of the failed one was reused by the first who computed the prompt again
    assert bench.heard.finish("a.1").usage.cached_prompt_tokens == 0


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("flying", [False, True])
def test_an_attached_follower_can_be_aborted(steps: int, flying: bool) -> None:
    bench = Bench(max_batched_tokens=8, max_running_requests=3)
    members = outputs("a", 24, 3)
    bench.scheduler.add(members)
    for _ in range(steps):
        bench.step()
    result = bench.runner.run(bench.scheduler.plan(0.0)) if flying else None
    bench.heard.take(bench.scheduler.abort("a.1", 0.0))
    assert bench.heard.finish("a.1").reason is FinishReason.CANCELLED
    if flying:
        bench.heard.take(bench.scheduler.apply(result, 0.0))
    bench.scheduler.check_integrity()
    bench.run()
    check_answers(bench, members[0], members[2])
    assert "a.1" not in bench.heard.tokens


def test_a_follower_aborted_before_its_first_step_never_reaches_the_runner() -> None:
    bench = Bench()
    bench.scheduler.add(outputs("a", 6, 2))
    bench.step()
    bench.heard.take(bench.scheduler.abort("a.1", 0.0))
    bench.run()
    assert not any(each.request_id == "a.1" for plan in bench.runner.plans for each in plan.starts)


def test_a_leader_that_gives_way_in_its_prompt_keeps_its_followers() -> None:
    # two tokens a step, one for "a": it needs a fifth block before the prompt of "b" is through
    bench = Bench(num_blocks=8, max_batched_tokens=2)
    first, members = text("a", 4, 24, first=50, priority=1), outputs("b", 16, 3, tokens=4)
    bench.add(first)
    bench.step()
    bench.step()
    bench.scheduler.add(members)
    while not bench.scheduler.statistics().preemptions:
        bench.step()
    load = bench.scheduler.load()
    assert (load.running_requests, load.queued_requests) == (1, 3)
    assert not bench.heard.tokens.get("b")
    bench.run()
    check_answers(bench, first, *members)
