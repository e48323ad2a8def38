"""Going on from prompts that another engine computed: blocks reserved at once or not at all, and nothing computed."""

from __future__ import annotations

import dataclasses

import pytest

from tests.requests import group, item, request
from tests.unit.handoff_bench import Pair, check_answer
from tests.unit.scheduler_bench import text
from triptych.core.errors import IntegrityError, Internal, InvalidRequest, KvSessionNotFound, Overloaded, PromptTooLong
from triptych.core.events import Failed, FinishReason
from triptych.core.logprobs import LogprobOptions
from triptych.core.request import CacheOptions, Sampling, Stopping

BLOCK = 4


def loads(pair: Pair) -> list[object]:
    return [load for plan in pair.decode.runner.plans for load in plan.loads]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 17, 24])
@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
@pytest.mark.parametrize("count", [1, 3])
def test_answers_are_those_of_one_engine(length: int, chunk: int, count: int) -> None:
    pair = Pair(prefill={"max_batched_tokens": chunk})
    members = group(text("a", length, tokens=7, sampling=Sampling(seed=3)), count)
    pair.go_on(*pair.compute(*members))
    for each in members:
        check_answer(pair, each)
        assert pair.decode.heard.tokens[each.request_id] == pair.decode.alone(each)
    assert pair.decode.computed_prompt_tokens(length) == 0
    assert pair.decode.heard.admitted == [each.request_id for each in members]
    pair.nothing_is_held()


def test_all_blocks_are_reserved_at_once_and_nothing_is_computed_until_they_have_come() -> None:
    pair = Pair()
    pair.decode.scheduler.add(pair.compute(text("a", 16, tokens=4)))
    assert pair.decode.scheduler.load().queued_requests == 1
    plan = pair.decode.step()
    (load,) = plan.loads
    assert [source for source, _ in load.moves] == [0, 1, 2, 3]
    assert (plan.tokens, plan.starts) == ((), ())
    assert not pair.decode.scheduler.busy
    current, statistics = pair.decode.scheduler.load(), pair.decode.scheduler.statistics()
    assert (current.running_requests, current.queued_requests, current.used_blocks) == (1, 0, 5)
    assert (statistics.loads, statistics.loading_blocks) == (1, 5)
    assert pair.decode.heard.tokens == {}
    pair.decode.end_loads()
    assert len(pair.decode.heard.tokens["a"]) == 1
    assert pair.decode.lengths() == {"a": 1}
    assert pair.decode.runner.plans[-1].tokens[0].start == 16
    statistics = pair.decode.scheduler.statistics()
    assert (statistics.imported_sessions, statistics.imported_blocks, statistics.loads) == (1, 4, 0)
    pair.decode.run()
    assert not any(plan.scrubs for plan in pair.decode.runner.plans)  # a step has read the blocks


def test_others_go_on_while_one_waits_for_its_blocks() -> None:
    pair = Pair()
    pair.decode.add(text("other", 5, tokens=3, first=12))
    pair.decode.scheduler.add(pair.compute(text("a", 9)))
    pair.decode.run()
    assert pair.decode.heard.finish("other")
    assert "a" not in pair.decode.heard.ends
    pair.decode.end_loads()
    pair.decode.run()
    check_answer(pair, text("a", 9))


def test_the_usage_and_the_stages_are_the_whole_answers() -> None:
    pair = Pair()
    before = text("before", 12)
    pair.prefill.add(before)
    pair.prefill.run()
    made = request("a", before.plan.token_ids.tolist()[:9], stopping=Stopping(max_tokens=4), eos=())
    pair.go_on(*pair.compute(made))
    end = pair.decode.heard.finish("a")
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_prompt_tokens) == (9, 4, 8)
    assert [span.name for span in end.spans] == ["queue", "load", "decode"]
    statistics = pair.decode.scheduler.statistics()
    assert (statistics.prompt_tokens, statistics.cached_prompt_tokens, statistics.computed_tokens) == (9, 0, 3)


def test_the_first_token_comes_with_its_log_probability() -> None:
    pair = Pair()
    made = text("a", 9, logprobs=LogprobOptions(prompt=True, output=True))
    pair.go_on(*pair.compute(made))
    logprobs = pair.decode.heard.logprobs["a"]
    assert len(logprobs) == 8
    assert logprobs[0] == pair.prefill.heard.prefilled("a").first.logprob.logprob
    assert pair.decode.heard.prompts == {}


@pytest.mark.parametrize("length", range(7, 18))
@pytest.mark.parametrize("cached", [0, 4, 8, 12])
@pytest.mark.parametrize("count", [1, 2])
def test_blocks_that_are_there_are_not_moved(length: int, cached: int, count: int) -> None:
    pair = Pair()
    made = text("a", length, tokens=5, sampling=Sampling(seed=1))
    if cached:
        ids = made.plan.token_ids.tolist()
        pair.decode.add(request("before", [*ids[:cached], 9, 9], stopping=Stopping(max_tokens=1), eos=()))
        pair.decode.run()
    members = group(made, count)
    pair.go_on(*pair.compute(*members))
    (load,) = loads(pair)
    known = min(cached, length) // BLOCK
    assert [source for source, _ in load.moves] == list(range(known, -(-length // BLOCK)))
    for each in members:
        check_answer(pair, each)
    assert pair.decode.scheduler.statistics().cached_prompt_tokens == known * BLOCK
    pair.nothing_is_held()


def test_a_prompt_that_is_there_to_its_last_block_takes_the_session_and_moves_nothing() -> None:
    pair = Pair()
    made = text("a", 12)
    pair.decode.add(text("before", 12))
    pair.decode.run()
    pair.go_on(*pair.compute(made))
    assert [load.moves for load in loads(pair)] == [()]
    check_answer(pair, made)
    pair.nothing_is_held()


def test_a_request_that_bypasses_the_cache_has_all_its_blocks_moved() -> None:
    pair = Pair()
    pair.decode.add(text("before", 12))
    pair.decode.run()
    made = text("a", 12, cache=CacheOptions(bypass_prefix_cache=True))
    pair.go_on(*pair.compute(made))
    assert [len(load.moves) for load in loads(pair)] == [3]
    check_answer(pair, made)


@pytest.mark.parametrize("count", [1, 3])
def test_loaded_blocks_are_found_by_others_once_a_step_has_read_them(count: int) -> None:
    pair = Pair(kv_changes=True)
    members = group(text("a", 14, tokens=5, sampling=Sampling(seed=4)), count)
    pair.decode.scheduler.add(pair.compute(*members))
    pair.decode.step()
    pair.decode.end_loads()
    assert pair.decode.scheduler.take_kv_changes() == ()
    pair.decode.step()
    stored = pair.decode.scheduler.take_kv_changes()
    assert [change.token_ids for change in stored] == [
        tuple(members[0].plan.token_ids.tolist()[start : start + BLOCK]) for start in (0, 4, 8)
    ]
    pair.decode.run()
    pair.decode.add(text("b", 14, tokens=2))
    pair.decode.run()
    assert pair.decode.heard.finish("b").usage.cached_prompt_tokens == 12


# -- answers that end with their first tokens -------------------------------------------------------


def test_an_answer_that_ends_with_its_first_token_takes_the_session_and_holds_nothing() -> None:
    pair = Pair()
    made = text("a", 9, tokens=1)
    pair.decode.scheduler.add(pair.compute(made))
    plan = pair.decode.step()
    assert [load.moves for load in plan.loads] == [()]
    assert pair.decode.scheduler.load().used_blocks == 0
    assert pair.decode.heard.ends == {}
    pair.decode.end_loads()
    end = pair.decode.heard.finish("a")
    assert (end.reason, end.usage.completion_tokens) == (FinishReason.LENGTH, 1)
    assert pair.decode.heard.tokens["a"] == pair.decode.alone(made)
    pair.settle()
    pair.nothing_is_held()
    assert pair.decode.scheduler.statistics().imported_sessions == 1


def test_an_end_of_sequence_is_not_shown() -> None:
    pair = Pair()
    token = pair.decode.alone(text("a", 9))[0]
    made = request("a", [10, *range(20, 28)], stopping=Stopping(max_tokens=6), eos=(token,))
    pair.go_on(*pair.compute(made))
    end = pair.decode.heard.finish("a")
    assert end.reason is FinishReason.STOP
    assert pair.decode.heard.tokens == {}
    pair.nothing_is_held()


def test_some_outputs_end_with_their_first_tokens_and_the_others_share_the_blocks() -> None:
    pair = Pair()
    for seed in range(100):
        members = group(text("a", 14, tokens=6, sampling=Sampling(seed=seed)), 4)
        firsts = [pair.decode.alone(each)[0] for each in members]
        if len(set(firsts)) == 4:
            break
    ends = frozenset(firsts[::2])
    members = [dataclasses.replace(each, stopping=Stopping(max_tokens=6), eos_token_ids=ends) for each in members]
    pair.decode.scheduler.add(pair.compute(*members))
    pair.decode.step()
    assert pair.decode.scheduler.load().used_blocks == 3 + 2
    pair.decode.end_loads()
    assert sorted(pair.decode.heard.ends) == ["a", "a.2"]
    pair.decode.run()
    for each in members:
        if each.request_id in ("a", "a.2"):
            assert pair.decode.heard.finish(each.request_id).reason is FinishReason.STOP
        else:
            assert pair.decode.heard.tokens[each.request_id] == pair.decode.alone(each)
    pair.settle()
    pair.nothing_is_held()


# -- no room ----------------------------------------------------------------------------------------


def refused(pair: Pair, name: str) -> Overloaded:
    end = pair.decode.heard.ends[name]
    assert isinstance(end, Failed)
    assert isinstance(end.error, Overloaded)
    assert name not in pair.decode.heard.admitted
    return end.error


def test_without_enough_blocks_it_is_refused_and_not_queued() -> None:
    pair = Pair(num_blocks=8)
    pair.decode.add(text("other", 13, tokens=9, first=12))
    pair.decode.step()
    members = group(text("a", 13), 2)
    pair.decode.scheduler.add(pair.compute(*members))
    assert pair.decode.step().loads == ()
    assert "13" not in str(refused(pair, "a"))
    assert "prompt of 4 KV blocks" in str(refused(pair, "a"))
    refused(pair, "a.1")
    assert pair.decode.scheduler.load().queued_requests == 0
    pair.decode.run()
    pair.go_on(*(dataclasses.replace(each, request_id=f"{each.request_id} again") for each in pair.resumed(members)))
    assert pair.decode.heard.tokens["a again"] == pair.decode.alone(members[0])
    pair.nothing_is_held()


def test_blocks_that_are_found_are_no_longer_there_for_others() -> None:
    # five blocks can be had, and three of them are what is found
    pair = Pair(num_blocks=8)
    pair.decode.add(text("before", 12, tokens=1))
    pair.decode.run()
    pair.decode.add(text("other", 12, tokens=9, first=12))
    pair.decode.step()
    pair.decode.scheduler.add(pair.compute(text("a", 21)))
    pair.decode.step()
    refused(pair, "a")


def test_one_that_needs_no_blocks_is_admitted_to_a_pool_that_is_full() -> None:
    pair = Pair(num_blocks=4)
    pair.decode.add(text("other", 13, tokens=3, first=12))
    pair.decode.step()
    assert pair.decode.scheduler.load().used_blocks == 4
    pair.decode.scheduler.add(pair.compute(text("a", 9, tokens=1)))
    pair.decode.step()
    assert pair.decode.heard.admitted == ["a"]


def test_without_enough_places_it_is_refused() -> None:
    pair = Pair(max_running_requests=2)
    pair.decode.add(text("other", 5, tokens=9, first=12))
    pair.decode.step()
    pair.decode.scheduler.add(pair.compute(*group(text("a", 9), 2)))
    pair.decode.step()
    assert "--max-running-requests" in str(refused(pair, "a.1"))


def test_one_that_loads_has_a_place() -> None:
    pair = Pair(max_running_requests=1)
    first, second = text("a", 9), text("b", 9, first=12)
    pair.decode.scheduler.add(pair.compute(first))
    pair.decode.step()
    pair.decode.scheduler.add(pair.compute(second))
    pair.decode.step()
    refused(pair, "b")
    pair.decode.add(text("queued", 3, first=13))
    pair.decode.step()
    assert pair.decode.scheduler.load().queued_requests == 1
    assert not pair.decode.scheduler.busy
    pair.decode.end_loads()
    pair.decode.run()
    assert pair.decode.heard.finish("queued")


def test_it_does_not_wait_behind_the_queue_but_gives_way_to_older_ones_that_lack_blocks() -> None:
    pair = Pair(num_blocks=10)
    pair.decode.add(text("running", 8, tokens=20, first=12))
    pair.decode.step()
    pair.decode.add(text("waiting", 30, tokens=2, first=13))
    pair.decode.step()
    assert pair.decode.scheduler.load().queued_requests == 1
    made = text("a", 5)
    pair.decode.scheduler.add(pair.compute(made))
    pair.decode.step()
    refused(pair, "a")
    # an older one, or one more urgent, goes first
    urgent = dataclasses.replace(pair.resumed([made])[0], request_id="urgent", priority=5)
    pair.decode.scheduler.add([urgent])
    pair.decode.step()
    assert "urgent" in pair.decode.heard.admitted


def test_it_passes_those_that_wait_for_a_budget_of_tokens_only() -> None:
    pair = Pair(max_batched_tokens=5)
    pair.decode.add(text("long", 30, tokens=2, first=12), text("queued", 9, first=13))
    pair.decode.step()
    made = text("a", 9)
    pair.decode.scheduler.add(pair.compute(made))
    assert len(pair.decode.step().loads) == 1
    assert pair.decode.scheduler.load().queued_requests == 1
    pair.decode.run()
    pair.decode.end_loads()
    pair.decode.run()
    check_answer(pair, made)


def test_two_that_arrive_together_are_decided_by_urgency() -> None:
    pair = Pair(num_blocks=5)
    low, high = text("low", 9), text("high", 9, first=12, priority=1)
    pair.decode.scheduler.add(pair.compute(low))
    pair.decode.scheduler.add(pair.compute(high))
    pair.decode.step()
    assert pair.decode.heard.admitted == ["high"]
    refused(pair, "low")


@pytest.mark.parametrize("loaded", [False, True])
def test_what_a_plan_decides_comes_before_what_happens_while_it_is_computed(loaded: bool) -> None:
    pair = Pair()
    pair.decode.scheduler.add(pair.compute(text("a", 9)))
    plan = pair.decode.scheduler.plan(0.0)
    result = pair.decode.runner.run(plan)
    if loaded:
        pair.decode.end_loads()
    else:
        pair.decode.heard.take(pair.decode.scheduler.abort("a", 0.0))
    pair.decode.heard.take(pair.decode.scheduler.apply(result, 0.0))
    assert pair.decode.heard.admitted == ["a"]
    assert ("a" in pair.decode.heard.ends) is not loaded


def test_what_a_plan_decides_can_be_taken_before_it_is_computed() -> None:
    pair = Pair()
    pair.decode.scheduler.add(pair.compute(text("a", 9)))
    plan = pair.decode.scheduler.plan(0.0)
    pair.decode.heard.take(pair.decode.scheduler.take_events())
    assert pair.decode.heard.admitted == ["a"]
    assert pair.decode.scheduler.apply(pair.decode.runner.run(plan), 0.0) == ()


# -- loads that end badly, late, or for nobody ------------------------------------------------------


def test_a_load_that_fails_fails_its_outputs_and_leaves_nothing_to_be_read() -> None:
    pair = Pair(num_blocks=12)
    pair.decode.scheduler.add(pair.compute(*group(text("a", 14), 2)))
    pair.decode.step()
    pair.decode.end_loads(broken=True)
    for name in ("a", "a.1"):
        end = pair.decode.heard.ends[name]
        assert isinstance(end, Failed)
        assert isinstance(end.error, KvSessionNotFound)
    assert pair.decode.scheduler.statistics().imported_sessions == 0
    assert len(pair.decode.step().scrubs) == 5
    # all blocks hold numbers again, and none is found
    pair.decode.add(text("b", 38, tokens=2))
    pair.decode.run()
    assert pair.decode.heard.tokens["b"] == pair.decode.alone(text("b", 38, tokens=2))
    assert pair.decode.heard.finish("b").usage.cached_prompt_tokens == 0


def test_an_abort_ends_the_answer_at_once_and_its_blocks_when_the_load_has_ended() -> None:
    pair = Pair(num_blocks=5)
    pair.decode.scheduler.add(pair.compute(text("a", 14)))
    pair.decode.step()
    pair.decode.heard.take(pair.decode.scheduler.abort("a", 1.0))
    end = pair.decode.heard.finish("a")
    assert (end.reason, end.usage.completion_tokens) == (FinishReason.CANCELLED, 0)
    statistics = pair.decode.scheduler.statistics()
    assert (statistics.loads, statistics.loading_blocks, statistics.blocks.held) == (1, 4, 4)
    assert pair.decode.scheduler.load().running_requests == 0
    assert pair.decode.step().cancels == (0,)
    pair.decode.add(text("b", 9, tokens=2, first=12))
    pair.decode.step()
    assert not pair.decode.scheduler.busy  # it waits for the blocks
    pair.decode.end_loads()
    assert pair.decode.scheduler.statistics().blocks.held == 0
    pair.decode.run()
    assert pair.decode.heard.tokens["b"] == pair.decode.alone(text("b", 9, tokens=2, first=12))


def test_the_name_of_one_that_was_aborted_is_free_while_its_load_goes_on() -> None:
    pair = Pair()
    made = text("a", 9)
    pair.decode.scheduler.add(pair.compute(made))
    pair.decode.step()
    pair.decode.heard.take(pair.decode.scheduler.abort("a", 0.0))
    del pair.decode.heard.ends["a"]
    pair.decode.add(made)
    pair.decode.run()
    pair.decode.end_loads(broken=True)
    pair.decode.run()
    assert pair.decode.heard.tokens["a"] == pair.decode.alone(made)


def test_an_abort_before_the_first_pass_takes_nothing() -> None:
    pair = Pair()
    members = group(text("a", 9), 2)
    pair.decode.scheduler.add(pair.compute(*members))
    for each in members:
        pair.decode.heard.take(pair.decode.scheduler.abort(each.request_id, 0.0))
        assert pair.decode.heard.finish(each.request_id).reason is FinishReason.CANCELLED
    assert not pair.decode.scheduler.busy
    assert pair.decode.heard.admitted == []


@pytest.mark.parametrize("gone", [("a",), ("a.1",), ("a", "a.2"), ("a.1", "a.2")], ids=str)
@pytest.mark.parametrize("length", [12, 14])
def test_outputs_that_leave_while_they_wait_do_not_touch_the_others(gone: tuple[str, ...], length: int) -> None:
    pair = Pair()
    members = group(text("a", length, tokens=6, sampling=Sampling(seed=7)), 3)
    pair.decode.scheduler.add(pair.compute(*members))
    pair.decode.step()
    for name in gone:
        pair.decode.heard.take(pair.decode.scheduler.abort(name, 0.0))
    assert not pair.decode.scheduler.busy  # somebody still waits: nothing is cancelled
    pair.decode.end_loads()
    pair.decode.run()
    for each in members:
        if each.request_id not in gone:
            assert pair.decode.heard.tokens[each.request_id] == pair.decode.alone(each)
    pair.settle()
    pair.nothing_is_held()


def test_outputs_that_leave_between_the_load_and_the_next_step() -> None:
    pair = Pair(num_blocks=9)
    members = group(text("a", 14, tokens=6, sampling=Sampling(seed=7)), 3)
    pair.decode.scheduler.add(pair.compute(*members))
    pair.decode.step()
    pair.decode.end_loads()
    pair.decode.heard.take(pair.decode.scheduler.abort("a", 0.0))  # the copies come from its last block
    pair.decode.heard.take(pair.decode.scheduler.abort("a.1", 0.0))
    pair.decode.add(text("b", 9, tokens=2, first=12))
    pair.decode.run()
    for made in (members[2], text("b", 9, tokens=2, first=12)):
        assert pair.decode.heard.tokens[made.request_id] == pair.decode.alone(made)
    pair.settle()
    pair.nothing_is_held()


def test_a_load_that_nobody_began_is_a_contradiction() -> None:
    pair = Pair()
    pair.decode.scheduler.add(pair.compute(text("a", 9)))
    with pytest.raises(IntegrityError):
        pair.decode.scheduler.loaded(0, None, 0.0)
    pair.decode.step()
    pair.decode.end_loads()
    with pytest.raises(IntegrityError):
        pair.decode.scheduler.loaded(0, None, 0.0)


# -- blocks run out -----------------------------------------------------------------------------------


def shown(name: str, length: int, tokens: int) -> object:
    return request(name, [10] * length, [item(7, (1, 5))], stopping=Stopping(max_tokens=tokens, ignore_eos=True))


def test_one_without_pictures_is_computed_again_after_a_preemption() -> None:
    pair = Pair(num_blocks=9)
    old, young = text("old", 8, tokens=20), text("young", 8, tokens=20, first=12)
    for each in (old, young):
        pair.decode.scheduler.add(pair.compute(each))
    pair.decode.run()
    pair.decode.end_loads()
    pair.decode.run()
    assert pair.decode.scheduler.statistics().preemptions > 0
    for each in (old, young):
        assert pair.decode.heard.tokens[each.request_id] == pair.decode.alone(each)
    usage = pair.decode.heard.finish("young").usage
    assert usage.cached_prompt_tokens == 0
    pair.settle()
    pair.nothing_is_held()


def test_one_that_gives_way_before_its_first_step_keeps_what_the_other_engine_reused() -> None:
    pair = Pair(num_blocks=7)
    old, young = text("old", 8, tokens=12), text("young", 8, tokens=12, first=12)
    pair.prefill.add(request("before", young.plan.token_ids.tolist()[:5], stopping=Stopping(max_tokens=1), eos=()))
    pair.prefill.run()
    pair.decode.add(old)
    pair.decode.step()
    pair.decode.scheduler.add(pair.compute(young))
    while len(pair.decode.heard.tokens["old"]) < 9:
        pair.decode.step()
    pair.decode.end_loads()
    assert set(pair.decode.lengths()) == {"old"}  # which takes the last block there is, and one of the other's
    assert pair.decode.scheduler.statistics().preemptions == 1
    pair.decode.run()
    assert pair.decode.heard.tokens["young"] == pair.decode.alone(young)
    assert pair.decode.heard.finish("young").usage.cached_prompt_tokens == 4


@pytest.mark.parametrize("order", [("picture", "text"), ("oldest", "text", "picture")], ids=" ".join)
def test_one_with_pictures_is_driven_out_last(order: tuple[str, ...]) -> None:
    pair = Pair(num_blocks=9 if len(order) == 2 else 13)
    made = [shown(name, 8, 20) if name == "picture" else text(name, 8, tokens=20, first=len(name)) for name in order]
    for each in made:
        pair.decode.scheduler.add(pair.compute(each))
    pair.decode.run()
    pair.decode.end_loads()
    pair.decode.run()
    assert pair.decode.scheduler.statistics().preemptions > 0
    begun = [piece.request_id for plan in pair.decode.runner.plans for piece in plan.tokens if piece.table_from == 0]
    assert begun.count("picture") == 1 < begun.count("text")
    for each in made:
        assert pair.decode.heard.tokens[each.request_id] == pair.decode.alone(each)


def test_the_oldest_gives_way_to_nobody() -> None:
    pair = Pair(num_blocks=10)
    old, young = text("old", 8, tokens=20, first=12), shown("young", 9, 20)
    for each in (old, young):
        pair.decode.scheduler.add(pair.compute(each))
    pair.decode.run()
    pair.decode.end_loads()
    pair.decode.run()
    assert pair.decode.heard.tokens["old"] == pair.decode.alone(old)
    assert isinstance(pair.decode.heard.ends["young"], Failed)


def test_one_with_pictures_fails_when_nobody_else_is_left() -> None:
    pair = Pair(num_blocks=9)
    old, young = shown("old", 8, 20), dataclasses.replace(shown("young", 9, 20), request_id="young")
    for each in (old, young):
        pair.decode.scheduler.add(pair.compute(each))
    pair.decode.run()
    pair.decode.end_loads()
    pair.decode.run()
    assert pair.decode.heard.tokens["old"] == pair.decode.alone(old)
    end = pair.decode.heard.ends["young"]
    assert isinstance(end, Failed)
    assert isinstance(end.error, Overloaded)
    assert end.error.retryable
    assert "--kv-cache-bytes" in str(end.error)
    shown_tokens = pair.decode.heard.tokens["young"]
    assert shown_tokens == pair.decode.alone(young)[: len(shown_tokens)]
    pair.settle()
    pair.nothing_is_held()


# -- refusals -----------------------------------------------------------------------------------------


def test_a_session_of_another_length_is_refused() -> None:
    pair = Pair()
    (made,) = pair.compute(text("a", 9))
    longer = dataclasses.replace(text("b", 13), resume=made.resume)
    with pytest.raises(InvalidRequest, match=r"3 blocks; a prompt of 13 tokens has 4 of 4 tokens"):
        pair.decode.scheduler.check([longer])


def test_more_outputs_than_the_pool_can_ever_hold_are_refused_for_good() -> None:
    pair = Pair(num_blocks=6)
    members = pair.compute(*group(text("a", 17), 3))
    pair.decode.scheduler.check(members[:2])
    with pytest.raises(PromptTooLong, match=r"3 outputs of a prompt of 17 tokens need 7 KV blocks .* there are 6"):
        pair.decode.scheduler.check(members)
    pair.go_on(*members[:2])
    assert pair.decode.heard.tokens["a"] == pair.decode.alone(members[0])


def test_log_probabilities_that_are_not_there_are_refused() -> None:
    pair = Pair()
    (made,) = pair.compute(text("a", 9))
    for options, words in (
        (LogprobOptions(prompt=True), "return_prompt_logprobs"),
        (LogprobOptions(output=True), "return_output_logprobs"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            pair.decode.scheduler.check([dataclasses.replace(made, logprobs=options)])


def test_a_prompt_with_pictures_needs_its_inputs_or_a_session() -> None:
    pair = Pair()
    made = shown("a", 9, 3)
    (resumed,) = pair.compute(made)
    pair.decode.scheduler.check([resumed])
    with pytest.raises(InvalidRequest, match="0 encoder inputs for 1 media items"):
        pair.decode.scheduler.check([dataclasses.replace(made, inputs=())])


def test_the_outputs_of_one_request_name_one_session() -> None:
    pair = Pair()
    first, second = pair.compute(*group(text("a", 9), 2))
    with pytest.raises(Internal, match="differ in the session"):
        pair.decode.scheduler.check([first, dataclasses.replace(second, resume=None)])
    with pytest.raises(Internal, match="differ in the session"):
        pair.decode.scheduler.check([dataclasses.replace(each, export=each.request_id) for each in (first, second)])
    with pytest.raises(Internal, match="computes its prompt for one"):
        pair.decode.scheduler.check([dataclasses.replace(first, export="s")])
