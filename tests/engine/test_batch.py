"""The packed batch: what stands in it for the slices of a plan."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.fakes import FakeAdapter, picture_rows, spec
from tests.engine.setup import ROOMY, piece
from tests.requests import content_key, item, request
from triptych.core.adapter import AdapterInfo
from triptych.core.logprobs import LogprobOptions
from triptych.core.request import Request, Stopping
from triptych.engine.batch import BatchBuilder, PromptRows


def builder(axes: int = 1, **changes: int) -> BatchBuilder:
    return BatchBuilder(spec(axes=axes), dataclasses.replace(ROOMY, block_size=4, **changes))


def test_single_tokens_come_first_and_every_token_finds_its_slot() -> None:
    packer = builder()
    packer.start(request("long", [10, 11, 12, 13, 14], delta=0))
    packer.start(request("one", [20, 21, 22], delta=0))
    slices = [piece("long", 0, 5, (7, 3)), piece("one", 2, 1, (9,))]
    for each in slices:
        packer.extend(each)
    batch, order, prompts = packer.build(slices, {})
    assert [each.request_id for each in order] == ["one", "long"]
    assert batch.singles == 1
    assert batch.starts == (0, 1, 6)
    assert batch.contexts == (3, 5)
    assert batch.token_ids.tolist() == [22, 10, 11, 12, 13, 14]
    assert batch.positions.tolist() == [[2, 0, 1, 2, 3, 4]]
    assert batch.slots.tolist() == [9 * 4 + 2, 28, 29, 30, 31, 12]
    assert batch.block_tables.tolist() == [[9, 9], [7, 3]]
    assert batch.sample_at.tolist() == [0, 5]
    assert batch.media_at is None
    assert (batch.adapters, prompts) == ((), ())


def test_positions_go_on_after_the_prompt_by_the_delta_on_every_axis() -> None:
    packer = builder(axes=3)
    packer.start(request("r", [10, 11, 12], axes=3, delta=-2, stopping=Stopping(max_tokens=9)))
    packer.extend(piece("r", 0, 3, (0, 1)))
    packer.append("r", 3, 40)
    packer.append("r", 4, 41)
    decode, _, _ = packer.build([piece("r", 4, 1, table_from=2)], {})
    assert (decode.token_ids.tolist(), decode.positions.tolist()) == ([41], [[2], [2], [2]])
    replay, _, _ = packer.build([piece("r", 1, 4, table_from=2)], {})
    assert replay.token_ids.tolist() == [11, 12, 40, 41]
    assert replay.positions.tolist() == [[1, 2, 1, 2]] * 3


def test_a_new_table_forgets_the_old_one() -> None:
    packer = builder()
    packer.start(request("r", [10] * 9))
    packer.extend(piece("r", 0, 9, (1, 2, 3)))
    packer.extend(piece("r", 0, 4, (5, 6), table_from=0))
    assert packer.blocks("r") == [5, 6]
    packer.extend(piece("r", 4, 1, (8,), table_from=1))
    assert packer.blocks("r") == [5, 8]
    packer.start(request("wide", [10] * 12))
    packer.extend(piece("wide", 0, 12, (6, 7, 9)))
    batch, _, _ = packer.build([piece("r", 4, 1), piece("wide", 11, 1)], {})
    assert batch.block_tables.tolist() == [[5, 8, 5], [6, 7, 9]]


@pytest.mark.parametrize("start", range(12))
@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_rows_are_copied_by_the_mask(start: int, length: int) -> None:
    # two runs with text between them, a framing token inside the second; rows of two pictures
    first, second = item(1, (1, 3), (5, 3), framing=(6,)), item(2, (9, 3))
    length = min(length, 12 - start)
    packer = builder()
    packer.start(request("r", [10] * 12, [first, second]))
    names = tuple(
        (i, each.content_key) for i, each in enumerate((first, second)) if each.overlaps(start, start + length)
    )
    only = piece("r", start, length, (0, 1, 2), rows=names)
    packer.extend(only)
    batch, _, _ = packer.build([only], {content_key(1): picture_rows(1, 5), content_key(2): picture_rows(2, 3)})
    takes = {1: (1, 0), 2: (1, 1), 3: (1, 2), 5: (1, 3), 7: (1, 4), 9: (2, 0), 10: (2, 1), 11: (2, 2)}
    expected = {at - start: row for at, row in takes.items() if start <= at < start + length}
    if not expected:
        assert batch.media_at is None
        return
    rows = [(int(row[0]), int(row[1])) for row in batch.media_rows]
    assert dict(zip(batch.media_at.tolist(), rows, strict=True)) == expected


# -- rows whose log probabilities are wanted -------------------------------------------------------


def scored(name: str, length: int, start: int = 0) -> Request:
    options = LogprobOptions(prompt=True, prompt_start=start)
    return dataclasses.replace(request(name, range(10, 10 + length)), logprobs=options)


def test_rows_of_prompt_tokens_stand_behind_those_of_the_slices_ends() -> None:
    packer = builder()
    for each in (scored("a", 9, start=5), request("b", [30, 31, 32]), scored("c", 6), scored("d", 3)):
        packer.start(each)
    slices = [
        piece("a", 2, 5, (0, 1), samples=False),
        piece("b", 0, 3, (2,)),
        piece("c", 0, 6, (3, 4)),
        piece("d", 1, 1, (5,), samples=False),
    ]
    for each in slices:
        packer.extend(each)
    batch, order, prompts = packer.build(slices, {})
    assert [each.request_id for each in order] == ["d", "a", "b", "c"]
    assert batch.starts == (0, 1, 6, 9, 15)
    # d's token 1 foretells 2; a's tokens 4..6 foretell 5..7; c's tokens 0..4 foretell 1..5
    assert prompts == (PromptRows("d", 2, 3), PromptRows("a", 5, 8), PromptRows("c", 1, 6))
    assert batch.sample_at.tolist() == [0, 5, 8, 14, 0, 3, 4, 5, 9, 10, 11, 12, 13]


@given(length=st.integers(1, 40), start=st.integers(0, 45), cuts=st.sets(st.integers(1, 39)))
def test_the_slices_of_a_prompt_give_every_wanted_token_once(length: int, start: int, cuts: set[int]) -> None:
    packer = builder()
    packer.start(scored("r", length, start))
    packer.extend(piece("r", 0, length, tuple(range(10))))
    bounds = [0, *sorted(cut for cut in cuts if cut < length), length]
    found = []
    for begin, end in itertools.pairwise(bounds):
        batch, _, prompts = packer.build([piece("r", begin, end - begin, samples=end == length)], {})
        before = batch.token_ids[batch.sample_at[1:]].tolist()  # a token of this prompt is its index + 10
        after = [index for rows in prompts for index in range(rows.first, rows.end)]
        assert before == [index - 1 + 10 for index in after]
        found += after
    assert found == list(range(max(start, 1), length))


def test_tokens_after_the_prompt_have_no_such_rows() -> None:
    packer = builder()
    packer.start(dataclasses.replace(scored("r", 3), stopping=Stopping(max_tokens=9)))
    packer.extend(piece("r", 0, 3, (0, 1)))
    for index in range(3, 6):
        packer.append("r", index, 40)
    assert packer.build([piece("r", 3, 1)], {}).prompts == ()
    # nor has a prompt that is computed again after a preemption
    batch, _, prompts = packer.build([piece("r", 0, 6)], {})
    assert (batch.sample_at.tolist(), prompts) == ([5], ())


# -- adapters -------------------------------------------------------------------------------------


def adapted(name: str, length: int, adapter: str | None) -> Request:
    loaded = FakeAdapter(AdapterInfo(1, adapter, "/adapters")) if adapter else None
    return dataclasses.replace(request(name, [10] * length), adapter=loaded)


def test_the_tokens_of_an_adapter_are_named_once_in_ascending_order() -> None:
    packer = builder()
    made = [adapted("a", 4, "one"), adapted("b", 3, None), adapted("c", 2, "two"), adapted("d", 1, "one")]
    for each in made:
        packer.start(each)
    slices = [piece(each.request_id, 0, len(each.plan), (n,)) for n, each in enumerate(made)]
    batch, order, _ = packer.build(slices, {})
    assert [each.request_id for each in order] == ["d", "a", "b", "c"]
    # another object of the same digest is the same adapter
    assert [(use.adapter.info.name, use.at.tolist()) for use in batch.adapters] == [
        ("one", [0, 1, 2, 3, 4]),
        ("two", [8, 9]),
    ]
    packer.append("a", 4, 20)
    packer.append("b", 3, 20)
    decode = packer.build([piece("b", 3, 1), piece("a", 4, 1)], {}).batch
    assert [(use.adapter.info.name, use.at.tolist()) for use in decode.adapters] == [("one", [1])]
    assert packer.build([piece("b", 3, 1)], {}).batch.adapters == ()


# -- lines ----------------------------------------------------------------------------------------


def test_more_requests_may_have_state_than_run_at_once() -> None:
    packer = builder(max_running_requests=3)
    for number in range(20):
        packer.start(request(f"r{number}", [10 + number, 11], stopping=Stopping(max_tokens=9)))
        packer.extend(piece(f"r{number}", 0, 2, (number + 1,)))
        packer.append(f"r{number}", 2, 50 + number)
    for number in (0, 4, 9, 17):
        packer.end(f"r{number}")
    packer.start(request("new", [5, 6]))
    packer.extend(piece("new", 0, 2, (40,)))
    assert packer.blocks("new") == [40]
    batch, _, _ = packer.build([piece(f"r{number}", 2, 1) for number in (1, 8, 19)], {})
    assert batch.token_ids.tolist() == [51, 58, 69]
    assert batch.block_tables.tolist() == [[2], [9], [20]]
    assert batch.positions.tolist() == [[2, 2, 2]]
