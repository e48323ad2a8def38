"""Budgets, and who comes first."""

from __future__ import annotations

from tests.unit.scheduler_bench import Bench, text


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
