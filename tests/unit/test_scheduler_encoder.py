"""Which items a step encodes, and whose rows stay."""

from __future__ import annotations

from tests.requests import content_key, item, request
from tests.unit.scheduler_bench import Bench, pictures, text
from triptych.core.events import Failed


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
