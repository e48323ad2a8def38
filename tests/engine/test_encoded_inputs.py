"""The answer does not depend on who has encoded the items, however it was scheduled."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

from tests.engine.encoded import as_bytes, came_encoded
from tests.engine.fakes import picture_rows, spec
from tests.engine.handoff import Pair
from tests.engine.setup import Bench, alone
from tests.engine.test_engine_identity import REQUESTS, STOPPING, mixed
from tests.requests import group, item, request
from triptych.core.encoder_input import EncodedInput
from triptych.core.errors import InvalidRequest, RowTransferFailed
from triptych.core.events import Failed, Finished
from triptych.core.request import Request, Sampling, Stopping
from triptych.engine.runner import Runner
from triptych.models.contract import Model

ENCODED = [came_encoded(each) for each in REQUESTS]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Of the pixels."""
    return {each.request_id: alone(each) for each in REQUESTS}


def without_tower(**changes: int) -> Bench:
    """An engine that encodes nothing, as one that was started to be given rows."""
    bench = Bench(**changes)
    bench.runner = Runner(Model(bench.model, None), bench.kv, bench.config)
    return bench


@pytest.mark.parametrize("chunk", [1, 16, 17, 48, 512])
def test_chunk_sizes(chunk: int, expected: dict[str, list[int]]) -> None:
    bench = without_tower(max_batched_tokens=chunk)
    some = ENCODED if chunk > 1 else ENCODED[:4]
    for each in some:
        bench.runner.check(each)
    assert bench.run(some) == {each.request_id: expected[each.request_id] for each in some}
    statistics = bench.scheduler.statistics()
    assert statistics.imported_items == sum(len(each.inputs) for each in some)
    assert statistics.encoded_items == 0


def test_side_by_side_with_pixels(expected: dict[str, list[int]]) -> None:
    bench = Bench(max_batched_tokens=64, encoder_items=1)
    assert bench.run([*ENCODED[::2], *REQUESTS[1::2]]) == expected


def test_preemption_and_a_tight_cache(expected: dict[str, list[int]]) -> None:
    bench = without_tower(
        block_size=2, num_blocks=110, max_batched_tokens=64, encoder_cache_bytes=41 * spec().row_width * 4
    )
    assert bench.run(ENCODED) == expected
    statistics = bench.scheduler.statistics()
    assert statistics.preemptions > 0
    assert statistics.encoder_cache.evictions > 5


@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("before", ["pixels", "rows"])
def test_prefix_hits_at_every_block_offset(before: str, chunk: int) -> None:
    target = mixed("target", 3, pictures=3)
    answer, ids, size = alone(target), target.plan.token_ids, 8
    for at in range(size, len(ids), size):
        bench = Bench(block_size=size, max_batched_tokens=chunk)
        kept = [layout for layout in target.plan.items if layout.end <= at]
        first = request("before", [*ids[:at].tolist(), 96], kept, stopping=Stopping(max_tokens=1))
        bench.run([came_encoded(first) if before == "rows" else first])
        assert bench.run([came_encoded(target)])["target"] == answer
        cut = any(layout.start < at < layout.end for layout in target.plan.items)
        cached = bench.ends["target"].usage.cached_prompt_tokens
        assert cached <= at if cut else cached == at


def test_hits_that_end_inside_a_picture() -> None:
    target = request("target", [10] * 60, [item(7, (6, 40))], stopping=STOPPING)
    answer = alone(target)
    for chunk in range(7, 50, 3):
        bench = without_tower(block_size=4, max_batched_tokens=chunk)
        bench.scheduler.add([dataclasses.replace(came_encoded(target), request_id="started")])
        bench.step()
        bench.scheduler.abort("started", 0.0)
        assert bench.run([came_encoded(target)])["target"] == answer
        assert bench.ends["target"].usage.cached_prompt_tokens == chunk // 4 * 4


def test_what_was_seen_as_pixels_is_found_when_it_comes_encoded_and_the_other_way() -> None:
    made = mixed("a", 5, pictures=2, tail=2)
    for first, second in ((made, came_encoded(made)), (came_encoded(made), made)):
        bench = Bench()
        bench.run([first])
        bench.run([dataclasses.replace(second, request_id="b")])
        assert bench.tokens["a"] == bench.tokens["b"]
        statistics = bench.scheduler.statistics()
        assert statistics.encoded_items + statistics.imported_items == 2
        assert bench.ends["b"].usage.cached_prompt_tokens == (len(made.plan) - 1) // 16 * 16


def test_the_same_item_twice_is_placed_once() -> None:
    twice = request("twice", [10] * 40, [item(7, (2, 9)), item(7, (20, 9))], stopping=STOPPING)
    bench = without_tower()
    assert bench.run([came_encoded(twice)])["twice"] == alone(twice)
    assert bench.scheduler.statistics().imported_items == 1


def test_two_items_of_one_shape_are_not_confused() -> None:
    made = [
        request(f"{one}{two}", [10] * 40, [item(one, (2, 9)), item(two, (20, 9))], stopping=STOPPING)
        for one, two in ((1, 2), (2, 1), (1, 1), (2, 2))
    ]
    answers = without_tower().run([came_encoded(each) for each in made])
    assert answers == {each.request_id: alone(each) for each in made}
    assert len({tuple(tokens) for tokens in answers.values()}) == 4


def test_several_outputs_share_the_prompt() -> None:
    made = group(mixed("a", 6, pictures=2, sampling=Sampling(seed=4)), 3)
    bench = without_tower()
    inputs = came_encoded(made[0]).inputs
    bench.scheduler.add([dataclasses.replace(each, inputs=inputs) for each in made])
    bench.run()
    for each in made:
        assert bench.tokens[each.request_id] == alone(each)


def test_a_prompt_of_rows_is_handed_to_a_decode_engine(expected: dict[str, list[int]]) -> None:
    pair = Pair(p_max_batched_tokens=40)
    assert pair.run(*([each] for each in ENCODED[:8])) == {f"r{n}": expected[f"r{n}"] for n in range(8)}
    assert pair.prefill.tower.calls == pair.decode.tower.calls == []
    pair.nothing_is_held()


# -- what goes wrong --------------------------------------------------------------------------------


def bad(name: str, *, number: float = float("nan"), picture: int = 7) -> Request:
    """Two items, of which the second has a number that is none."""
    made = came_encoded(request(name, [10] * 40, [item(1, (2, 9)), item(picture, (20, 9))], stopping=STOPPING))
    rows = picture_rows(picture, 9)
    rows[8, -1] = number
    return dataclasses.replace(made, inputs=(made.inputs[0], EncodedInput(made.inputs[1].layout, as_bytes(rows))))


def test_numbers_that_are_not_finite_fail_their_owner_only(caplog: pytest.LogCaptureFixture) -> None:
    bench = without_tower()
    good, again = (request(name, [10] * 40, [item(picture, (2, 9))]) for name, picture in (("good", 3), ("again", 7)))
    with caplog.at_level(logging.CRITICAL):
        bench.run([bad("bad"), came_encoded(good), bad("worse", number=float("inf"), picture=8)])
    for name in ("bad", "worse"):
        end = bench.ends[name]
        assert isinstance(end, Failed)
        assert isinstance(end.error, RowTransferFailed)
        assert str(end.error) == "media item 1 came with numbers that are not finite"
    assert bench.tokens["good"] == alone(good)
    assert bench.run([came_encoded(again)])["again"] == alone(again)


def test_rows_of_another_width_are_refused_and_would_fail_their_owner_only(caplog: pytest.LogCaptureFixture) -> None:
    bench = without_tower()
    made = came_encoded(request("narrow", [10] * 40, [item(1, (2, 9)), item(2, (20, 9))], stopping=STOPPING))
    narrow = EncodedInput(made.inputs[1].layout, np.ascontiguousarray(made.inputs[1].rows[:, :-4]))
    made = dataclasses.replace(made, inputs=(made.inputs[0], narrow))
    with pytest.raises(InvalidRequest, match=r"media item 1 came with uint8 rows \[9, 12\], not uint8 \[9, 16\]"):
        bench.runner.check(made)
    with caplog.at_level(logging.CRITICAL):
        bench.run([made, ENCODED[2]])
    end = bench.ends["narrow"]
    assert isinstance(end, Failed)
    assert "media item 1 came with" in str(end.error)
    assert isinstance(bench.ends[ENCODED[2].request_id], Finished)


def test_pixels_without_a_tower_are_refused() -> None:
    bench = without_tower()
    with pytest.raises(InvalidRequest, match="no tower"):
        bench.runner.check(REQUESTS[1])
    bench.runner.check(ENCODED[1])
    bench.runner.check(REQUESTS[0])  # text


def test_a_claim_of_another_number_of_rows_ends_nothing_but_itself() -> None:
    bench = without_tower(max_batched_tokens=16)
    good = request("good", [10] * 30, [item(7, (2, 20))], stopping=STOPPING)
    bench.scheduler.add([came_encoded(good)])
    bench.step()  # it stands in its picture
    bench.scheduler.add([came_encoded(request("lie", [10] * 9, [item(7, (0, 5))], stopping=STOPPING))])
    bench.run()
    end = bench.ends["lie"]
    assert isinstance(end, Failed)
    assert isinstance(end.error, InvalidRequest)
    assert str(end.error).startswith("media item 0 has 5 rows")
    assert bench.tokens["good"] == alone(good)
