"""Log probabilities of prompts and answers on their way out."""

from __future__ import annotations

import dataclasses

import pytest

from tests.requests import group
from tests.unit.scheduler_bench import Bench, text
from tests.unit.simulation import prompt_logprobs
from triptych.core.errors import Internal, InvalidRequest
from triptych.core.events import Failed
from triptych.core.logprobs import LogprobOptions

PROMPT = LogprobOptions(prompt=True)
OUTPUT = LogprobOptions(output=True)


def check_prompt(bench: Bench, made: object) -> None:
    event = bench.heard.prompts[made.request_id]
    assert event.token_ids == tuple(made.plan.token_ids.tolist())
    assert [each and each.logprob for each in event.logprobs] == prompt_logprobs(made)
    assert bench.heard.tokens[made.request_id] == bench.alone(made)


@pytest.mark.parametrize("budget", [3, 7, 64])
@pytest.mark.parametrize("start", [0, 1, 2, 5, 15])
def test_a_prompt_is_said_once_whole_and_first(budget: int, start: int) -> None:
    bench = Bench(max_batched_tokens=budget)
    made = text("a", 16, logprobs=LogprobOptions(prompt=True, prompt_start=start))
    bench.add(made)
    bench.run()
    check_prompt(bench, made)


def test_a_prompt_of_one_token_has_nothing_to_say_about_it() -> None:
    bench = Bench()
    bench.add(text("a", 1, logprobs=PROMPT))
    bench.run()
    assert bench.heard.prompts["a"].logprobs == (None,)


@pytest.mark.parametrize(
    ("start", "cached"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (13, 12), (14, 12), (15, 12)]
)
def test_the_prefix_is_reused_up_to_the_token_that_predicts_the_first_wanted(start: int, cached: int) -> None:
    bench = Bench()
    bench.add(text("warm", 16))
    bench.run()
    made = text("a", 16, logprobs=LogprobOptions(prompt=True, prompt_start=start))
    bench.add(made)
    bench.run()
    assert bench.heard.finish("a").usage.cached_prompt_tokens == cached
    check_prompt(bench, made)


def test_what_was_collected_is_collected_anew_after_giving_way_in_the_prompt() -> None:
    bench = Bench(num_blocks=8, max_batched_tokens=2)
    made = [text("a", 4, 24, first=50, priority=1), text("b", 16, 4, logprobs=PROMPT)]
    bench.add(made[0])
    bench.step()
    bench.step()
    bench.add(made[1])
    while not bench.scheduler.statistics().preemptions:
        bench.step()
    assert not bench.heard.prompts
    bench.run()
    check_prompt(bench, made[1])


def test_who_gives_way_later_says_it_no_second_time_and_reuses_what_there_is() -> None:
    bench = Bench(num_blocks=8)
    made = [text("a", 4, 24, first=50), text("b", 8, 16, first=51, logprobs=PROMPT)]
    bench.add(*made)
    while not bench.scheduler.statistics().preemptions:
        bench.step()
    assert "b" in bench.heard.prompts
    bench.run()  # hears of a second one with an error
    check_prompt(bench, made[1])


def test_only_the_first_output_says_the_prompt() -> None:
    bench = Bench()
    members = group(text("a", 16, logprobs=PROMPT), 3)
    bench.scheduler.add(members)
    bench.run()
    assert set(bench.heard.prompts) == {"a"}
    check_prompt(bench, members[0])
    assert bench.heard.finish("a.1").usage.cached_prompt_tokens == 12
    assert bench.computed_prompt_tokens(16) == 16 + 2 * 4


@pytest.mark.parametrize("keep", [slice(0, 14), slice(0, 0)])
def test_too_few_are_a_failure_of_their_request_alone(keep: slice) -> None:
    bench = Bench()
    bench.add(text("a", 16, logprobs=PROMPT), text("b", 4, first=11))
    result = bench.runner.run(bench.scheduler.plan(0.0))
    result.prompt_logprobs["a"] = result.prompt_logprobs["a"][keep]
    bench.heard.take(bench.scheduler.apply(result, 0.0))
    assert isinstance(bench.heard.ends["a"], Failed)
    assert isinstance(bench.heard.ends["a"].error, Internal)
    assert "15 prompt tokens" in str(bench.heard.ends["a"].error)
    assert not bench.heard.prompts
    bench.run()
    assert len(bench.heard.tokens["b"]) == 8


@pytest.mark.parametrize("start", [16, 17, 2**32 - 1])
def test_a_start_behind_the_prompt_is_refused_with_both_numbers(start: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"prompt_logprob_start {start} .* 16 tokens"):
        Bench().add(text("a", 16, logprobs=LogprobOptions(prompt=True, prompt_start=start)))


def test_each_token_comes_with_its_own() -> None:
    bench = Bench(num_blocks=10)
    made = [text(name, 6, 18, first=ord(name), logprobs=OUTPUT) for name in "abc"]
    bench.add(*made, text("plain", 6, 2, first=60))
    bench.run()
    for each in made:
        alone = Bench()
        alone.add(each)
        alone.run()
        name = each.request_id
        assert len(bench.heard.logprobs[name]) == 18
        assert bench.heard.logprobs[name] == alone.heard.logprobs[name]
    assert bench.heard.logprobs["plain"] == []


def test_one_that_is_missing_fails_its_request() -> None:
    bench = Bench()
    bench.add(text("a", 4, logprobs=OUTPUT), text("b", 4, first=11, logprobs=OUTPUT))
    result = bench.runner.run(bench.scheduler.plan(0.0))
    kept = {"b": result.logprobs["b"]}
    bench.heard.take(bench.scheduler.apply(dataclasses.replace(result, logprobs=kept), 0.0))
    assert isinstance(bench.heard.ends["a"].error, Internal)
    assert len(bench.heard.logprobs["b"]) == 1
