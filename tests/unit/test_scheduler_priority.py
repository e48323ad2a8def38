"""Who goes first, and that everybody's turn comes."""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.scheduler_bench import Bench, text
from triptych.engine.priority import head_start
from triptych.engine.waiting import Waiting

priorities = st.integers(-(2**31), 2**31 - 1)


@given(priorities)
def test_a_head_start_is_odd_and_bounded(priority: int) -> None:
    assert abs(head_start(priority, 60.0)) <= 60.0
    assert head_start(-priority, 60.0) == -head_start(priority, 60.0)


@given(priorities, priorities)
def test_more_urgent_is_never_less_head_start(one: int, two: int) -> None:
    low, high = sorted((one, two))
    assert head_start(low, 60.0) <= head_start(high, 60.0)


def test_small_priorities_all_differ() -> None:
    starts = [head_start(priority, 60.0) for priority in range(-1000, 1001)]
    assert all(low < high for low, high in itertools.pairwise(starts))
    assert starts[1001] == 30.0
    assert {head_start(priority, 0.0) for priority in range(-5, 6)} == {0.0}


def order_of(bench: Bench) -> list[str]:
    bench.run()
    return list(bench.heard.ends)


def test_the_urgent_are_admitted_first_and_equals_in_order() -> None:
    bench = Bench(max_running_requests=1)
    bench.add(*(text(f"{p}{n}", 3, 1, priority=p) for n in "ab" for p in (0, -2, 7, 1)))
    assert order_of(bench) == ["7a", "7b", "1a", "1b", "0a", "0b", "-2a", "-2b"]


def test_age_makes_up_for_urgency() -> None:
    bench = Bench(max_running_requests=1, priority_seconds=10.0)
    # priority 1 is worth five seconds
    bench.add(text("urgent", 3, 1, arrival=20.0, priority=1), text("late", 3, 1, arrival=15.5))
    bench.add(text("old", 3, 1, arrival=14.5))
    assert order_of(bench) == ["old", "urgent", "late"]


def test_running_prefills_are_served_by_urgency_too() -> None:
    bench = Bench(max_batched_tokens=4)
    bench.add(text("a", 20))
    bench.step()
    bench.add(text("b", 20, first=11, priority=1))
    assert bench.lengths() == {"a": 4}  # "b" waits: there is no budget to admit it
    bench = Bench(max_batched_tokens=24)
    bench.add(text("a", 20), text("b", 20, first=11, priority=1))
    assert bench.lengths() == {"b": 20, "a": 4}
    bench.add(text("c", 60, first=12, priority=2))
    assert bench.lengths() == {"b": 1, "a": 16, "c": 7}
    assert bench.lengths() == {"b": 1, "a": 1, "c": 22}


def test_who_waits_drives_out_nobody() -> None:
    bench = Bench(max_running_requests=1)
    bench.add(text("a", 3, 5))
    bench.step()
    bench.add(text("urgent", 3, 5, first=11, priority=9))
    assert order_of(bench) == ["a", "urgent"]
    assert bench.scheduler.statistics().preemptions == 0


def test_the_least_urgent_gives_way_however_long_it_has_run() -> None:
    bench = Bench(num_blocks=10)
    bench.add(text("humble", 6, 18, first=50, priority=-1))
    bench.step()
    made = [text(name, 6, 18, first=ord(name)) for name in "ab"]
    bench.add(*made)
    assert order_of(bench) == ["a", "b", "humble"]
    assert bench.scheduler.statistics().preemptions > 0
    assert [bench.heard.tokens[each.request_id] for each in made] == [bench.alone(each) for each in made]


def test_who_gave_way_keeps_its_place_by_age_and_urgency() -> None:
    bench = Bench(num_blocks=8)
    bench.add(text("a", 4, 24, first=50, priority=1), text("b", 8, 16, first=51))
    while not bench.scheduler.statistics().preemptions:
        bench.step()
    # one behind "b" and one before it; both would fit where "b" does not
    bench.add(text("behind", 2, 1, first=52), text("before", 2, 1, first=53, priority=1))
    steps = [set(bench.lengths()) for _ in range(40)]
    first = {name: next(n for n, step in enumerate(steps) if name in step) for name in ("before", "b", "behind")}
    assert first["before"] == 0 < first["b"] <= first["behind"]


def test_more_may_have_state_in_the_runner_than_may_run() -> None:
    bench = Bench(num_blocks=8, max_running_requests=2)
    made = [text("a", 4, 24, first=50, priority=1), text("b", 8, 16, first=51)]
    bench.add(*made)
    while not bench.scheduler.statistics().preemptions:
        bench.step()
    made.append(text("c", 3, 3, first=52, priority=2))
    bench.add(made[-1])
    bench.step()
    assert set(bench.runner.known) == {"a", "b", "c"}
    bench.run()
    assert [bench.heard.tokens[each.request_id] for each in made] == [bench.alone(each) for each in made]


def test_nobody_starves_under_an_endless_stream_of_the_urgent() -> None:
    bench = Bench(max_running_requests=1, priority_seconds=10.0)
    arrivals = {"patient": 0.0}
    bench.add(text("patient", 3, 2, priority=-1_000_000))
    started: list[str] = []
    while "patient" not in bench.heard.ends:
        now = float(len(arrivals))
        arrivals[f"u{now}"] = now
        bench.add(text(f"u{now}", 3, 2, first=11, arrival=now, priority=1_000_000))
        started += [each.request_id for each in bench.step(now).starts]
        assert now < 100, "starved"
    before = started[: started.index("patient")]
    # each takes two seconds and one comes every second, so they never leave a gap; twenty seconds are the bound
    assert [arrivals[name] for name in before] == [float(number) for number in range(1, 20)]


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 30)), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_one_place_is_filled_in_the_order_of_keys(made: list[tuple[int, int]]) -> None:
    bench = Bench(max_running_requests=1, priority_seconds=10.0)
    for number, (priority, arrival) in enumerate(made):
        bench.add(text(f"{number}", 3, 1, priority=priority, arrival=float(arrival)))
    keys = {f"{n}": (arrival - head_start(priority, 10.0), n) for n, (priority, arrival) in enumerate(made)}
    assert order_of(bench) == sorted(keys, key=keys.__getitem__)


class Waiter:
    """All that the queue looks at."""

    def __init__(self, request_id: str, key: tuple[float, int]) -> None:
        self.request_id, self.key, self.known = request_id, key, 3


@given(st.lists(st.tuples(st.sampled_from(("push", "pop", "leave")), st.integers(0, 5)), max_size=300))
@example([("push", 0), ("push", 1), ("push", 3), ("leave", 1), ("push", 1), ("pop", 0)])
@settings(max_examples=60, deadline=None)
def test_the_queue_is_a_sorted_list(moves: list[tuple[str, int]]) -> None:
    waiting, model = Waiting(), {}
    for serial, (move, number) in enumerate(moves):
        if move == "push" and f"r{number}" not in model:
            model[f"r{number}"] = Waiter(f"r{number}", (float(number % 2), serial))
            waiting.push(model[f"r{number}"])
        elif move == "leave" and f"r{number}" in model:
            waiting.remove(model.pop(f"r{number}"))
        elif move == "pop" and model:
            waiting.remove(model.pop(waiting.head().request_id))
        lowest = min(model.values(), key=lambda each: each.key, default=None)
        assert waiting.head() is lowest
        assert (len(waiting), waiting.tokens) == (len(model), 3 * len(model))
        assert set(waiting) == set(model.values())


def test_those_who_leave_the_queue_leave_no_heap_behind() -> None:
    waiting = Waiting()
    waiting.push(Waiter("head", (0.0, 0)))
    for serial in range(1, 5000):
        waiter = Waiter("r", (1.0, serial))
        waiting.push(waiter)
        waiting.remove(waiter)
    assert len(waiting._heap) < 100
