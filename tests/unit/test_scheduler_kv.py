"""What the scheduler says of the prefix cache."""

from __future__ import annotations

from tests.requests import FakeAdapter, content_key, item, request
from tests.unit.scheduler_bench import Bench, pictures, text
from tests.unit.simulation import Mirror
from triptych.core.kv_events import BlockRemoved, BlockStored
from triptych.core.request import Stopping


def changes_of(bench: Bench) -> list[object]:
    bench.run()
    return list(bench.scheduler.take_kv_changes())


def test_a_block_says_what_is_in_it() -> None:
    bench = Bench(kv_changes=True)
    items = [item(1, (2, 3)), item(2, (5, 2)), item(3, (9, 5))]
    made = request("a", [10] * 17, items, stopping=Stopping(max_tokens=1), adapter=FakeAdapter(4))
    bench.add(made)
    stored = changes_of(bench)
    assert [each.parent for each in stored] == [None, *(each.block_hash for each in stored[:-1])]
    assert [each.token_ids for each in stored] == [
        tuple(made.plan.token_ids[start : start + 4].tolist()) for start in range(0, 16, 4)
    ]
    assert [[int.from_bytes(key, "big") for key in each.item_keys] for each in stored] == [[1], [1, 2], [3], [3]]
    assert {(each.lora_id, each.lora_name, each.request_id) for each in stored} == {(4, "adapter4", "a")}


def test_a_gap_inside_an_item_is_not_the_item() -> None:
    bench = Bench(kv_changes=True)
    bench.add(request("a", [10] * 13, [item(1, (0, 2), (9, 2))], stopping=Stopping(max_tokens=1)))
    keys = [each.item_keys for each in changes_of(bench)]
    assert keys == [(content_key(1),), (), (content_key(1),)]


def test_generated_tokens_are_said_too_and_without_an_adapter_there_is_none() -> None:
    bench = Bench(kv_changes=True)
    bench.add(text("a", 6, 7))
    stored = changes_of(bench)
    whole = [10, *range(20, 25), *bench.heard.tokens["a"]]
    assert [token for each in stored for token in each.token_ids] == whole[:12]
    assert {(each.lora_id, each.lora_name) for each in stored} == {(0, "")}


def test_what_others_could_find_already_is_not_said_again() -> None:
    bench = Bench(kv_changes=True)
    bench.add(text("a", 9, 1), text("b", 9, 1))
    assert [each.request_id for each in changes_of(bench)] == ["a", "a"]
    bench.add(text("c", 9, 1))
    assert changes_of(bench) == []


def test_what_is_overwritten_is_said_in_order() -> None:
    bench = Bench(kv_changes=True, num_blocks=4)
    bench.add(text("a", 12, 1))
    mirror = Mirror(4)
    mirror.take(changes_of(bench))
    bench.add(text("b", 12, 1, first=11))
    changes = changes_of(bench)
    # one block was free: two of "a" go, its end first, before "b" has anything to be found
    assert [type(each) for each in changes] == [BlockRemoved] * 2 + [BlockStored] * 3
    mirror.take(changes)
    assert len(mirror.findable) == 4


def test_what_a_failed_request_computed_can_no_longer_be_found() -> None:
    bench = Bench(kv_changes=True, max_batched_tokens=8)
    bench.add(text("a", 16))
    mirror = Mirror(4)
    bench.step()
    mirror.take(bench.scheduler.take_kv_changes())
    assert len(mirror.findable) == 2
    bench.runner.bad_requests = {"a"}
    mirror.take(changes_of(bench))
    assert not mirror.findable


def test_nothing_is_collected_when_nobody_listens() -> None:
    bench = Bench(num_blocks=4)
    bench.add(text("a", 12, 1), text("b", 12, 1, first=11))
    assert changes_of(bench) == []
    assert bench.scheduler._roster.journal is None


def test_adapters_share_rows_but_no_kv() -> None:
    bench = Bench()
    made = pictures("a", 8, gap=5, tail=4)
    for name, adapter in (("a", None), ("b", FakeAdapter(1)), ("c", FakeAdapter(2)), ("d", FakeAdapter(1))):
        bench.add(request(name, made.plan.token_ids, made.plan.items, adapter=adapter))
        bench.run()
    cached = {name: bench.heard.finish(name).usage.cached_prompt_tokens for name in "abcd"}
    assert cached == {"a": 0, "b": 0, "c": 0, "d": 16}
    assert bench.scheduler.statistics().encoded_items == 1
    assert bench.heard.tokens["b"] == bench.heard.tokens["d"] != bench.heard.tokens["a"]
