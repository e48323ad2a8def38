"""Items that came encoded, where prompts are computed; and items that contradict each other."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.requests import item, request
from tests.unit.scheduler_bench import Bench, pictures, text
from triptych.core.encoder_input import EncodedInput
from triptych.core.errors import InvalidRequest
from triptych.core.events import Failed, Finished
from triptych.core.layout import Grid
from triptych.core.request import Request, Stopping


def came_encoded(made: Request) -> Request:
    """The same request, its rows computed elsewhere."""
    rows = [EncodedInput(layout, np.zeros((layout.rows, 1), np.uint8)) for layout in made.plan.items]
    return replace(made, inputs=tuple(rows))


def encoded(plan: object) -> list[tuple[str, int]]:
    return [(task.request_id, task.item) for task in plan.encode]


def names(plan: object) -> set[str]:
    return {piece.request_id for piece in plan.tokens}


# -- items that came encoded ------------------------------------------------------------------------


def test_they_cost_nothing_of_the_budgets_and_starve_nobody() -> None:
    bench = Bench(encoder_items=1, encoder_tokens=10, num_blocks=200, max_context=400)
    many = came_encoded(pictures("many", *(3,) * 8, cost=100))
    bench.add(many, pictures("own", 2, start=200, cost=100), came_encoded(pictures("late", 3, start=300, cost=100)))
    plan = bench.step()
    assert encoded(plan) == [*(("many", number) for number in range(8)), ("own", 0), ("late", 0)]
    bench.run()
    statistics = bench.scheduler.statistics()
    assert (statistics.imported_items, statistics.encoded_items) == (9, 1)
    assert bench.heard.tokens["many"] == bench.alone(many)


def test_whoever_must_be_encoded_waits_for_its_budget_alone() -> None:
    bench = Bench(encoder_items=1)
    bench.add(pictures("a", 3), pictures("b", 3, start=200), came_encoded(pictures("c", 3, start=300)))
    assert encoded(bench.step()) == [("a", 0), ("c", 0)]
    assert encoded(bench.step()) == [("b", 0)]


def test_they_take_space_and_are_found_under_their_keys() -> None:
    bench = Bench(encoder_cache_bytes=12)
    first = came_encoded(pictures("first", 6))
    bench.add(first)
    bench.run()
    bench.add(request("same", [11] * 9, [item(100, (2, 6), encoder_tokens=20)]))  # another prompt, the same picture
    assert encoded(bench.step()) == []
    bench.run()
    assert bench.scheduler.statistics().encoder_cache.ready_hits == 1
    bench.add(came_encoded(pictures("second", 7, start=300)))
    plan = bench.step()
    assert len(plan.evictions) == 1
    assert encoded(plan) == [("second", 0)]


def test_only_what_was_encoded_here_has_a_span() -> None:
    bench = Bench()
    bench.add(came_encoded(pictures("elsewhere", 5)), pictures("here", 5, start=200))
    bench.run()
    spans = {name: [span.name for span in bench.heard.finish(name).spans] for name in ("elsewhere", "here")}
    assert spans == {"elsewhere": ["queue", "prefill", "decode"], "here": ["queue", "encode", "prefill", "decode"]}


def test_preemption_brings_them_back() -> None:
    bench = Bench(num_blocks=14, max_running_requests=4)
    made = [came_encoded(pictures(f"r{n}", 6, start=100 * n, tokens=12)) for n in range(4)]
    bench.add(*made)
    bench.run()
    assert bench.scheduler.statistics().preemptions > 0
    assert [bench.heard.tokens[each.request_id] for each in made] == [bench.alone(each) for each in made]


# -- one key, two shapes -------------------------------------------------------------------


def wrong(name: str, picture: int, rows: int, *, at: int = 1, tail: int = 2) -> Request:
    """A prompt with one picture behind ``at`` tokens."""
    stopping = Stopping(max_tokens=3, ignore_eos=True)
    return request(name, [12] * (at + rows + tail), [item(picture, (at, rows))], stopping=stopping)


def turned(name: str, picture: int, rows: int) -> Request:
    """As ``wrong``, of as many rows that lie in another grid."""
    layout = item(picture, (1, rows))
    layout = replace(layout, grid=Grid(1, layout.grid.w, layout.grid.h))
    stopping = Stopping(max_tokens=3, ignore_eos=True)
    return request(name, [12] * (rows + 3), [layout], stopping=stopping)


def test_as_many_rows_of_another_grid_fail_while_the_others_are_held() -> None:
    bench = Bench()
    first = wrong("first", 7, 5)
    bench.add(first, came_encoded(turned("second", 7, 5)))
    assert names(bench.step()) == {"first"}
    end = bench.heard.ends["second"]
    assert isinstance(end, Failed)
    assert str(end.error).startswith("media item 0 has 5 rows of the grid (1, 10, 2), and another request holds ")
    bench.run()
    assert bench.heard.tokens["first"] == bench.alone(first)


def test_as_many_rows_of_another_grid_are_encoded_when_the_others_are_free() -> None:
    """And the KV of the one, whose positions are others, is not that of the other."""
    bench = Bench()
    bench.add(wrong("first", 7, 5, tail=40))
    bench.run()
    second = turned("second", 7, 5)
    bench.add(second)
    assert encoded(bench.step()) == [("second", 0)]
    bench.run()
    assert bench.heard.tokens["second"] == bench.alone(second)


def test_one_request_with_two_grids_under_one_key_is_refused() -> None:
    one, other = item(7, (0, 5)), replace(item(7, (5, 5)), grid=Grid(1, 10, 2))
    with pytest.raises(InvalidRequest, match=r"media item 1 has 5 rows of the grid \(1, 10, 2\), and an earlier item"):
        Bench().add(request("two", [12] * 20, [one, other]))


def test_the_later_of_two_fails_and_names_its_item() -> None:
    bench = Bench(max_batched_tokens=10)
    good = pictures("good", 12, gap=2)
    bench.add(good)
    bench.step()  # it stands in the middle of its picture, and holds the rows
    two = request("two", [12] * 20, [item(7, (0, 1)), item(100, (1, 11))], stopping=Stopping(max_tokens=3))
    bench.add(two, text("text", 5))
    while "two" not in bench.heard.ends:
        bench.step()
    end = bench.heard.ends["two"]
    assert isinstance(end, Failed)
    assert isinstance(end.error, InvalidRequest)
    assert str(end.error).startswith("media item 1 has 11 rows of the grid (1, 2, 22), and another request holds ")
    bench.run()
    assert bench.heard.tokens["good"] == bench.alone(good)
    assert len(bench.heard.tokens["text"]) == 8


def test_both_in_one_step() -> None:
    bench = Bench()
    first = wrong("first", 7, 5)
    bench.add(first, came_encoded(wrong("second", 7, 6)), wrong("third", 7, 5))
    plan = bench.step()
    assert encoded(plan) == [("first", 0)]
    assert names(plan) == {"first", "third"}
    assert isinstance(bench.heard.ends["second"], Failed)
    bench.run()
    assert bench.heard.tokens["first"] == bench.alone(first)


def test_one_that_runs_fails_where_it_meets_the_other() -> None:
    bench = Bench(max_batched_tokens=10, encoder_items=1)
    stopping = Stopping(max_tokens=3)
    second = request("second", [12] * 20, [item(1, (2, 3)), item(7, (5, 5))], stopping=stopping)
    holder = came_encoded(request("holder", [12] * 14, [item(7, (0, 9))], stopping=stopping))
    bench.add(pictures("first", 2, gap=2, tail=1, start=200), second, holder)
    # "first" encodes, so "second" goes to its first picture only, and what is left is for the holder
    assert bench.lengths() == {"first": 5, "second": 2, "holder": 3}
    assert "second" not in bench.lengths()
    end = bench.heard.ends["second"]
    assert isinstance(end, Failed)
    assert str(end.error).startswith("media item 1 has 5 rows")
    bench.run()
    assert bench.heard.tokens["holder"] == bench.alone(holder)
    assert bench.scheduler.statistics().blocks.held == 0


def test_rows_that_nobody_holds_give_way() -> None:
    bench = Bench()
    bench.add(came_encoded(wrong("lie", 7, 5)))
    bench.run()
    truth = wrong("truth", 7, 6)
    bench.add(truth)
    plan = bench.step()
    assert plan.evictions == (plan.encode[0].key,)
    bench.run()
    assert bench.heard.tokens["truth"] == bench.alone(truth)


def test_a_group_whose_leader_fails_goes_on_one_by_one() -> None:
    bench = Bench(max_batched_tokens=10)
    bench.add(pictures("good", 12, gap=2))
    bench.step()
    leader = wrong("leader", 100, 11, at=0)
    bench.scheduler.add([leader, replace(leader, request_id="follower")])
    bench.step()
    assert isinstance(bench.heard.ends["leader"], Failed)
    bench.run()
    assert set(bench.heard.ends) == {"good", "leader", "follower"}


def test_within_one_request_it_is_refused_at_once() -> None:
    bench = Bench()
    made = request("r", [12] * 20, [item(7, (1, 3)), item(8, (5, 3)), item(7, (10, 4))])
    with pytest.raises(InvalidRequest, match=r"media item 2 has 4 rows .* an earlier item of the request has 3 of"):
        bench.scheduler.check([made])
    bench.add(request("twice", [12] * 20, [item(7, (1, 3)), item(7, (10, 3))]))
    bench.run()
    bench.heard.finish("twice")


def test_whatever_is_claimed_in_whatever_order_nothing_is_lost_or_held() -> None:
    failed = [_random_claims(random.Random(seed)) for seed in range(12)]
    assert sum(failed) > 10
    assert max(failed) < 50


def _random_claims(draw: random.Random) -> int:
    """Sixty requests that claim what they like; how many of them failed."""
    bench = Bench(
        max_batched_tokens=draw.randint(4, 24),
        encoder_cache_bytes=draw.randint(14, 40),
        encoder_items=draw.randint(1, 3),
        num_blocks=draw.randint(20, 40),
        max_context=80,
    )
    made = []
    for number in range(60):
        items, at = [], 0
        for picture in draw.sample(range(4), draw.randint(0, 3)):
            at += draw.randint(0, 4)
            items.append(item(picture, (at, draw.choice((7, 7, 5)))))
            at = items[-1].end
        one = request(f"r{number}", [12] * (at + draw.randint(1, 4)), items, stopping=Stopping(max_tokens=3))
        made.append(came_encoded(one) if draw.random() < 0.5 else one)
    while made or bench.scheduler.busy:
        if made and (draw.random() < 0.5 or not bench.scheduler.busy):
            bench.add(made.pop())
        if bench.scheduler.busy:
            bench.step()
    assert len(bench.heard.ends) == 60
    for end in bench.heard.ends.values():
        assert isinstance(end, Finished) or isinstance(end.error, InvalidRequest)
    statistics = bench.scheduler.statistics()
    assert statistics.blocks.held == statistics.encoder_cache.held_bytes == 0
    return statistics.failed
