"""Blocks, prefixes, preemption."""

from __future__ import annotations

import pytest

from tests.requests import request
from tests.unit.scheduler_bench import Bench, pictures, text
from triptych.core.events import Failed
from triptych.core.request import CacheOptions, Stopping


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
