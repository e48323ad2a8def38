"""Prompts that are computed for another engine: stored as they are computed, leased until nobody reads them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from tests.requests import group, item, request
from tests.unit.handoff_bench import Pair, Side, exported
from tests.unit.scheduler_bench import text
from tests.unit.simulation import Exchange, prompt_logprobs
from triptych.core.errors import Internal
from triptych.core.events import EosToken, Failed, Finished, FinishReason, StopToken
from triptych.core.logprobs import LogprobOptions
from triptych.core.request import CacheOptions, Sampling, Stopping

if TYPE_CHECKING:
    from triptych.core.step import Store

BLOCK = 4


def prefill(**changes: float) -> Side:
    return Side(Exchange(), **changes)


def one(name: str, length: int, **options: object) -> list[object]:
    return exported([text(name, length, **options)])


def stores(side: Side) -> list[Store]:
    return [store for plan in side.runner.plans for store in plan.stores]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 17, 24])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 64])
def test_blocks_are_stored_in_the_step_that_fills_them_and_the_last_one_seals(length: int, chunk: int) -> None:
    side = prefill(max_batched_tokens=chunk)
    side.scheduler.add(one("a", length))
    computed = 0
    sent: list[int] = []
    while side.scheduler.busy and "a" not in side.heard.ends:
        plan = side.step()
        computed += plan.tokens[0].length
        found = [block for store in plan.stores for block in store.blocks]
        sent += found
        last = computed == length
        assert len(sent) == (-(-length // BLOCK) if last else computed // BLOCK)
        assert [store.seals for store in plan.stores] == [last] * (len(found) > 0 or last)
    made = stores(side)
    assert [store.opens for store in made] == [True] + [False] * (len(made) - 1)
    assert len(set(sent)) == len(sent) == len(side.exchange_blocks("s a"))
    assert side.heard.prefilled("a").handle.blocks == len(sent)


def test_the_answer_ends_with_its_first_token_which_is_the_one_it_would_have_had() -> None:
    side = prefill()
    made = text("a", 17, logprobs=LogprobOptions(output=True))
    side.scheduler.add(exported([made]))
    side.step(now=3.0)
    end = side.heard.prefilled("a")
    assert side.heard.tokens == {}
    assert [end.first.token_id] == side.alone(made)[:1]
    assert end.first.logprob is not None
    assert (end.first.finish, end.first.stop) == (None, None)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_prompt_tokens) == (17, 1, 0)
    assert [span.name for span in end.spans] == ["queue", "prefill"]
    statistics = side.scheduler.statistics()
    assert (statistics.finished, statistics.exported_sessions, statistics.generated_tokens) == (1, 1, 1)


@pytest.mark.parametrize(
    ("stopping", "eos", "finish"),
    [
        (Stopping(max_tokens=1), (), FinishReason.LENGTH),
        (Stopping(max_tokens=9, stop_token_ids=(0,)), (), FinishReason.STOP),
        (Stopping(max_tokens=9), (0,), FinishReason.STOP),
        (Stopping(max_tokens=9, ignore_eos=True), (0,), None),
        (Stopping(max_tokens=9, min_tokens=2), (0,), None),
    ],
    ids=str,
)
def test_a_first_token_that_ends_the_answer_says_so(
    stopping: Stopping, eos: tuple, finish: FinishReason | None
) -> None:
    side = prefill()
    token = side.alone(text("a", 9))[0]
    stopping = dataclasses.replace(stopping, stop_token_ids=(token,) if stopping.stop_token_ids else ())
    made = request("a", [10, *range(20, 28)], stopping=stopping, eos=(token,) if eos else ())
    side.scheduler.add(exported([made]))
    side.step()
    end = side.heard.prefilled("a")
    assert end.first.token_id == token
    assert end.first.finish is finish
    match = {(): StopToken(token)}.get(eos, EosToken(token)) if finish is FinishReason.STOP else None
    assert end.first.stop == match
    assert end.handle is not None


def test_blocks_stay_until_the_transport_reads_them_no_more() -> None:
    side = prefill()
    side.scheduler.add(one("a", 17))
    side.run()
    statistics = side.scheduler.statistics()
    assert (statistics.sessions, statistics.leased_blocks, statistics.blocks.held) == (1, 5, 5)
    assert side.scheduler.load().used_blocks == 5
    assert side.scheduler.load().running_requests == side.scheduler.load().queued_requests == 0
    side.release("s nobody")
    assert side.scheduler.statistics().leased_blocks == 5
    side.release("s a")
    side.release("s a")
    assert side.scheduler.statistics().blocks.held == side.scheduler.statistics().leased_blocks == 0


def test_leased_blocks_are_given_to_nobody_and_who_needs_them_waits_asleep() -> None:
    side = prefill(num_blocks=6)
    side.scheduler.add(one("a", 15))
    side.run()
    leased = set(side.exchange_blocks("s a"))
    side.add(text("b", 12, tokens=1, first=11))
    plan = side.step()
    assert plan.tokens == ()
    assert not side.scheduler.busy
    assert side.scheduler.load().queued_requests == 1
    side.release("s a")
    assert side.scheduler.busy
    side.run()
    assert isinstance(side.heard.ends["b"], Finished)
    assert {block for piece in side.runner.plans[-2].tokens for block in piece.blocks} & leased


def test_who_waits_for_leased_blocks_can_be_aborted() -> None:
    side = prefill(num_blocks=6)
    side.scheduler.add(one("a", 15))
    side.run()
    side.add(text("b", 12, first=11))
    side.step()
    side.heard.take(side.scheduler.abort("b", 0.0))
    assert side.heard.finish("b").reason is FinishReason.CANCELLED
    side.run()


def test_whoever_leaves_wakes_those_behind() -> None:
    side = prefill(num_blocks=6)
    side.scheduler.add(one("a", 15))
    side.run()
    side.add(text("large", 12, first=11), text("small", 2, tokens=2, first=12))
    side.step()
    assert not side.scheduler.busy
    side.heard.take(side.scheduler.abort("large", 0.0))
    assert side.scheduler.busy
    side.run()
    assert side.heard.finish("small")


@pytest.mark.parametrize("cached", range(0, 25, BLOCK))
def test_blocks_that_were_found_are_stored_too(cached: int) -> None:
    pair = Pair(prefill={"max_batched_tokens": 5})
    made = text("a", 24)
    if cached:
        ids = made.plan.token_ids.tolist()
        pair.prefill.add(request("before", [*ids[:cached], 9], stopping=Stopping(max_tokens=1), eos=()))
        pair.prefill.run()
    pair.compute(made)
    end = pair.prefill.heard.prefilled("a")
    assert end.usage.cached_prompt_tokens == min(cached, 20)
    session = pair.exchange.sessions["s a"]
    assert len(session.blocks) == 6
    # a found block is leased beside whoever else has it
    slots = pair.prefill.runner.slots
    tokens = [slots[block, offset][0] for block in session.blocks for offset in range(BLOCK)]
    assert tokens == made.plan.token_ids.tolist()


def test_only_the_first_output_is_stored_and_all_end_with_their_first_tokens() -> None:
    side = prefill(max_batched_tokens=9)
    members = group(text("a", 14, sampling=Sampling(seed=5)), 3)
    side.scheduler.add(exported(members))
    side.run()
    assert {store.request_id for store in stores(side)} == {"a"}
    ends = [side.heard.prefilled(each.request_id) for each in members]
    assert [end.handle is None for end in ends] == [False, True, True]
    assert [end.first.token_id for end in ends] == [side.alone(each)[0] for each in members]
    assert side.scheduler.statistics().exported_sessions == 1
    assert side.scheduler.statistics().blocks.held == 4


def test_the_prompts_log_probabilities_come_before_the_end() -> None:
    side = prefill(max_batched_tokens=5)
    made = text("a", 14, logprobs=LogprobOptions(prompt=True, prompt_start=3))
    side.scheduler.add(exported([made]))
    side.run()
    assert [each and each.logprob for each in side.heard.prompts["a"].logprobs] == prompt_logprobs(made)
    assert side.heard.prefilled("a").handle is not None


def test_an_abort_half_way_withdraws_the_session_and_its_blocks_wait_for_the_transport() -> None:
    side = prefill(max_batched_tokens=6)
    side.scheduler.add(one("a", 20))
    side.step()
    side.step()
    side.heard.take(side.scheduler.abort("a", 0.0))
    assert side.heard.finish("a").reason is FinishReason.CANCELLED
    assert side.scheduler.statistics().blocks.held == 3
    assert side.scheduler.busy
    assert side.step().withdrawals == ("s a",)
    assert not side.scheduler.busy
    assert side.scheduler.statistics().blocks.held == 3
    side.release(*side.exchange.take_freed())
    assert side.scheduler.statistics().blocks.held == 0


def test_an_abort_before_anything_was_stored_withdraws_nothing_and_frees_the_name() -> None:
    side = prefill(max_batched_tokens=3)
    for name, steps in (("waiting", 0), ("running", 1)):
        side.scheduler.add(exported([text(name, 20)]))
        for _ in range(steps):
            side.step()
        side.heard.take(side.scheduler.abort(name, 0.0))
        if side.scheduler.busy:
            assert side.step().withdrawals == ()
        assert side.scheduler.statistics().blocks.held == 0
        side.scheduler.add([dataclasses.replace(text(f"{name} again", 3), export=f"s {name}")])
        side.run()
        side.release(f"s {name}")
    assert side.heard_sessions() == {"s waiting", "s running"}


def test_an_abort_in_the_step_that_seals_withdraws_what_was_sealed() -> None:
    side = prefill()
    side.scheduler.add(one("a", 9))
    plan = side.scheduler.plan(0.0)
    result = side.runner.run(plan)
    assert side.scheduler.abort("a", 0.0) == ()
    side.heard.take(side.scheduler.apply(result, 0.0))
    assert side.heard.finish("a").reason is FinishReason.CANCELLED
    assert side.step().withdrawals == ("s a",)
    side.release(*side.exchange.take_freed())
    assert side.scheduler.statistics().blocks.held == 0


@pytest.mark.parametrize("chunk", [6, 64])
def test_a_failure_withdraws_the_session_and_stores_nothing_of_its_step(chunk: int) -> None:
    side = prefill(max_batched_tokens=chunk)
    side.scheduler.add(one("a", 20))
    if chunk < 20:
        side.step()
    side.runner.bad_requests = {"a"}
    side.step()
    assert isinstance(side.heard.ends["a"], Failed)
    side.runner.bad_requests = set()
    opened = chunk < 20
    assert side.step().withdrawals == (("s a",) if opened else ())
    side.release(*side.exchange.take_freed())
    assert side.scheduler.statistics().blocks.held == 0
    assert side.scheduler.statistics().exported_sessions == 0


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_store_that_goes_wrong_fails_its_request_only(when: int) -> None:
    side = prefill(max_batched_tokens=20)
    side.scheduler.add(one("a", 24))
    side.add(text("b", 6, tokens=4, first=11))
    for number in range(2):
        side.runner.bad_stores = {"a"} if number == when else set()
        side.step()
    if when < 2:
        end = side.heard.ends["a"]
        assert isinstance(end, Failed)
        assert isinstance(end.error, Internal)
    side.run()
    assert side.heard.tokens["b"] == side.alone(text("b", 6, tokens=4, first=11))
    side.release(*side.exchange.take_freed(), *side.heard_sessions())
    assert side.scheduler.statistics().blocks.held == 0


def test_a_handle_that_the_runner_left_out_fails_the_request() -> None:
    side = prefill()
    side.scheduler.add(one("a", 6))
    plan = side.scheduler.plan(0.0)
    result = side.runner.run(plan)
    side.heard.take(side.scheduler.apply(dataclasses.replace(result, stored={"s a": None}), 0.0))
    assert "no handle" in str(side.heard.ends["a"].error)
    assert side.step().withdrawals == ("s a",)


def test_a_withdrawal_goes_to_the_transport_whoever_holds_the_session() -> None:
    side = prefill()
    side.scheduler.add(one("a", 6))
    side.run()
    side.scheduler.withdraw("s a")
    side.scheduler.withdraw("s stranger")
    assert side.scheduler.busy
    plan = side.step()
    assert plan.withdrawals == ("s a", "s stranger")
    assert not side.scheduler.busy
    side.release(*side.exchange.take_freed())
    assert side.scheduler.statistics().blocks.held == 0


def test_a_session_has_one_owner_until_its_blocks_are_free() -> None:
    side = prefill()
    side.scheduler.add(one("a", 6))
    for _ in range(2):  # while it is computed, and while it is leased
        again = dataclasses.replace(text("b", 6), export="s a")
        with pytest.raises(Internal, match="in use"):
            side.scheduler.add([again])
        side.run()
    side.release("s a")
    side.exchange.end("s a")
    side.scheduler.add([again])
    side.run()
    assert side.heard.prefilled("b").handle is not None


# -- blocks run out -----------------------------------------------------------------------------------


def test_who_stores_is_not_driven_out_while_somebody_else_can_give_way() -> None:
    # "old" has two blocks and grows to five; seven are the export's, which computes a token a step
    side = prefill(num_blocks=11, max_batched_tokens=2)
    old = text("old", 8, tokens=12)
    side.add(old)
    while not side.heard.tokens:
        side.step()
    side.scheduler.add(one("export", 26, first=11))
    side.run()
    assert side.scheduler.statistics().preemptions == 1
    assert side.heard.prefilled("export").handle is not None
    assert "old" not in side.heard.ends  # it waits for the leased blocks
    side.release("s export")
    side.run()
    assert side.heard.tokens["old"] == side.alone(old)


def test_bypass_and_pictures_are_stored_as_any_prompt() -> None:
    pair = Pair(prefill={"max_batched_tokens": 7})
    cache = CacheOptions(bypass_prefix_cache=True)
    made = request("a", [10] * 19, [item(3, (2, 5), (8, 6), framing=(9,))], cache=cache)
    pair.compute(made)
    session = pair.exchange.sessions["s a"]
    slots = pair.prefill.runner.slots
    keys = [slots[session.blocks[n // BLOCK], n % BLOCK][2] for n in range(19)]
    assert [bool(key) for key in keys] == [2 <= n < 7 or (8 <= n < 14 and n != 9) for n in range(19)]
