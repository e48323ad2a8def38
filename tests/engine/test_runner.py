from __future__ import annotations

import logging
import re

import pytest
import torch

from tests.engine.fakes import OUT_OF_MEMORY, FakeTower, HashModel, picture_rows, spec
from tests.engine.setup import Bench, alone, piece
from tests.requests import content_key, item, picture_number, request
from triptych.core.config import MIB
from triptych.core.errors import Internal, InvalidRequest, Overloaded, StartupError
from triptych.core.events import Failed
from triptych.core.request import Sampling, Stopping
from triptych.core.step import EncodeTask, StepPlan
from triptych.engine.kv_pool import allocate, count_blocks
from triptych.engine.runner import Runner
from triptych.models.contract import Model

STOPPING = Stopping(max_tokens=4, ignore_eos=True)


def text(name: str, length: int, first: int = 10) -> object:
    return request(name, [first, *(20 + n % 50 for n in range(length - 1))], stopping=STOPPING)


def shown(name: str, *pictures: int, rows: int = 6) -> object:
    items = [item(picture, (2 + number * (rows + 1), rows)) for number, picture in enumerate(pictures)]
    return request(name, [10] * (items[-1].end + 3), items, stopping=STOPPING)


# -- encoding -------------------------------------------------------------------------------------


def test_the_items_of_a_step_are_one_call_of_the_tower() -> None:
    bench = Bench()
    bench.run([shown("a", 1, 2), shown("b", 3)])
    assert bench.tower.calls == [[1, 2, 3]]


@pytest.mark.parametrize("trouble", ["raises", "too many rows", "too narrow", "not finite"])
def test_a_bad_item_fails_its_own_request_only(trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    match trouble:
        case "raises":
            bench.tower.broken = {2}
        case "too many rows":
            bench.tower.wrong = {2: picture_rows(2, 7)}
        case "too narrow":
            bench.tower.wrong = {2: picture_rows(2, 6)[:, :-1]}
        case "not finite":
            bench.tower.wrong = {2: picture_rows(2, 6) * float("nan")}
    with caplog.at_level(logging.CRITICAL):
        bench.run([shown("a", 1), shown("bad", 3, 2), shown("c", 4), text("text", 5)])
    assert isinstance(bench.ends["bad"], Failed)
    assert "media item 1" in str(bench.ends["bad"].error)
    assert bench.tokens["a"] == alone(shown("a", 1))
    assert bench.tokens["c"] == alone(shown("c", 4))
    assert bench.tokens["text"] == alone(text("text", 5))


@pytest.mark.parametrize(
    ("tower", "kind", "reason"),
    [
        (FakeTower(most_rows=6), Overloaded, "does not fit into memory: 32 encoder tokens at once; retry later"),
        (FakeTower(broken={7}), Internal, "could not be encoded"),
    ],
    ids=["no memory", "raises"],
)
def test_who_waits_for_the_same_item_hears_the_same_reason_with_their_own_index(
    tower: FakeTower, kind: type, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tower=tower)
    owner = request("owner", [10] * 12, [item(7, (2, 8))], stopping=STOPPING)
    follower = request("follower", [10] * 16, [item(1, (1, 3)), item(7, (6, 8))], stopping=STOPPING)
    with caplog.at_level(logging.CRITICAL):
        bench.run([owner, follower, shown("other", 2)])
    assert [(task.request_id, task.item) for task in bench.plans[0].encode] == [
        ("owner", 0),
        ("follower", 0),
        ("other", 0),
    ]
    for name, index in (("owner", 0), ("follower", 1)):
        end = bench.ends[name]
        assert isinstance(end, Failed)
        assert type(end.error) is kind
        assert str(end.error).startswith(f"media item {index} {reason}")
    assert bench.tokens["other"] == alone(shown("other", 2))


def test_too_few_outputs_are_asked_for_one_by_one() -> None:
    bench = Bench()
    bench.tower.short = True
    bench.run([shown("a", 1), shown("b", 2)])
    assert bench.tower.calls == [[1, 2], [1], [2]]
    assert bench.tokens["b"] == alone(shown("b", 2))


def test_stored_rows_do_not_keep_the_whole_batch_alive() -> None:
    class Batched:
        def encode(self, inputs: list) -> list[torch.Tensor]:
            together = torch.cat([picture_rows(picture_number(i), i.layout.rows) for i in inputs])
            return list(together.split([i.layout.rows for i in inputs]))

    bench = Bench(tower=Batched())
    for each in (shown("a", 1), shown("b", 2)):
        bench.scheduler.add([each])
    bench.step()
    for rows in bench.runner._rows.values():
        assert rows.untyped_storage().nbytes() == rows.nbytes


def test_evicted_rows_are_dropped() -> None:
    bench = Bench(encoder_cache_bytes=6 * spec().row_width * 4)
    bench.run([shown("a", 1), shown("b", 2)])
    assert set(bench.runner._rows) == {content_key(2)}


# -- computing ------------------------------------------------------------------------------------


def test_a_token_that_breaks_the_model_fails_its_own_request_only(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(HashModel(broken={66}))
    with caplog.at_level(logging.CRITICAL):
        bench.run([text("a", 5), text("bad", 5, first=66), text("c", 7, first=11)])
    assert isinstance(bench.ends["bad"], Failed)
    assert "66" not in str(bench.ends["bad"].error)
    assert bench.tokens["a"] == alone(text("a", 5))
    assert bench.tokens["c"] == alone(text("c", 7, first=11))


def test_logits_that_are_not_numbers_fail_one_request_and_its_blocks_can_be_used_again() -> None:
    bench = Bench(HashModel(poison={66}), num_blocks=4)
    bench.run([text("bad", 20, first=66)])
    assert isinstance(bench.ends["bad"], Failed)
    assert torch.isfinite(bench.kv.storage).all()
    assert bench.run([text("a", 40)])["a"] == alone(text("a", 40))


def test_a_chunk_of_broken_numbers_fails_before_anybody_can_read_its_blocks() -> None:
    bench = Bench(HashModel(poison={66}), max_batched_tokens=16)
    bench.scheduler.add([text("bad", 40, first=66)])
    bench.scheduler.add([text("good", 40)])
    bench.step()
    assert isinstance(bench.ends["bad"], Failed)
    assert torch.isfinite(bench.kv.storage).all()
    assert bench.run([])["good"] == alone(text("good", 40))
    again = text("again", 40, first=66)
    bench.run([again])
    assert isinstance(bench.ends["again"], Failed)


def test_a_batch_too_large_for_the_memory_is_computed_in_parts(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(HashModel(most_tokens=12))
    made = [text("a", 9), text("b", 12, first=11), shown("c", 1)]
    with caplog.at_level(logging.CRITICAL):
        bench.run(made)
    assert bench.tokens == {each.request_id: alone(each) for each in made}


def test_items_too_large_for_the_memory_together_are_encoded_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(tower=FakeTower(most_rows=6))
    made = [shown("a", 1, 2), shown("b", 3)]
    with caplog.at_level(logging.CRITICAL):
        bench.run(made)
    assert bench.tower.calls == [[1, 2, 3], [1], [2], [3]]
    assert bench.tokens == {each.request_id: alone(each) for each in made}


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OUT_OF_MEMORY], ids=["python", "cuda", "cpu"]
)
def test_what_is_too_large_even_alone_is_overload_and_says_what_to_lower(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tests.engine.fakes.OUT_OF_MEMORY", error)
    bench = Bench(HashModel(most_tokens=30), FakeTower(most_rows=6))
    with caplog.at_level(logging.CRITICAL):
        bench.run([text("long", 31), text("a", 5), shown("large", 7, rows=8), shown("b", 1)])
    for name, words in {
        "long": r"compute 31 token\(s\) .*retry later.* --max-batched-tokens$",
        "large": r"media item 0 .*: 32 encoder tokens .*retry .* max_pixels \(longest_edge\).*, or in media_options$",
    }.items():
        end = bench.ends[name]
        assert isinstance(end, Failed)
        assert isinstance(end.error, Overloaded)
        assert re.search(words, str(end.error))
    assert bench.tokens["a"] == alone(text("a", 5))
    assert bench.tokens["b"] == alone(shown("b", 1))


@pytest.mark.parametrize("place", ["tower", "model"])
def test_a_lost_device_is_passed_on(place: str) -> None:
    def lost(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    bench = Bench()
    setattr(*{"tower": (bench.tower, "encode"), "model": (bench.model, "forward")}[place], lost)
    bench.scheduler.add([shown("a", 1)])
    with pytest.raises(torch.AcceleratorError):
        bench.step()


def test_rows_that_are_not_there_fail_the_request_that_reads_them() -> None:
    bench = Bench()
    made = shown("a", 1)
    plan = StepPlan(
        starts=(made, text("b", 3)),
        tokens=(
            piece("a", 0, 8, (0,), rows=((0, content_key(1)),), samples=False),
            piece("b", 0, 3, (1,)),
        ),
    )
    result = bench.runner.run(plan)
    assert set(result.failures) == {"a"}
    assert isinstance(result.failures["a"], Internal)
    assert str(result.failures["a"]) == "media item 0 has no encoder rows"
    assert set(result.sampled) == {"b"}


def test_an_encode_without_tokens_is_stored() -> None:
    bench = Bench()
    result = bench.runner.run(StepPlan(starts=(shown("a", 1),), encode=(EncodeTask("a", 0, content_key(1)),)))
    assert result.encoded == (content_key(1),)


@pytest.mark.parametrize("picture", [(2, 20), (18, 30), (30, 12), (40, 5)], ids=str)
def test_an_answer_begins_behind_blocks_that_another_request_computed(picture: tuple[int, int]) -> None:
    # a prompt of 50 tokens in blocks of 16: one follower shares three of them and computes a tail of two tokens again,
    # the other shares two, and there are rows of the picture in its tail
    bench = Bench()
    sampling = Sampling(seed=5, temperature=2)
    leader, *followers = (
        request(name, [10 + n for n in range(50)], [item(7, picture)], sampling=sampling, stopping=STOPPING)
        for name in ("leader", "late", "early")
    )
    expected = alone(leader)
    rows = ((0, content_key(7)),)
    first = StepPlan(
        starts=(leader,),
        encode=(EncodeTask("leader", 0, content_key(7)),),
        tokens=(piece("leader", 0, 50, (4, 9, 2, 7), rows=rows),),
    )
    assert bench.runner.run(first).sampled == {"leader": expected[0]}
    late = piece("late", 48, 2, (4, 9, 2, 11))
    early = piece("early", 32, 18, (4, 9, 12, 13), rows=rows if sum(picture) > 32 else ())
    found: dict[str, list[int]] = {"leader": [expected[0]], "late": [], "early": []}
    plan = StepPlan(starts=tuple(followers), tokens=(piece("leader", 50, 1, table_from=4), late, early))
    for step in range(3):
        result = bench.runner.run(plan)
        assert not result.failures
        for name, token in result.sampled.items():
            found[name].append(token)
        plan = StepPlan(
            tokens=(
                piece("leader", 51 + step, 1, table_from=4),
                piece("late", 50 + step, 1, table_from=4),
                piece("early", 50 + step, 1, table_from=4),
            )
        )
    assert found == {"leader": expected, "late": expected[:3], "early": expected[:3]}


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, 97, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InvalidRequest, match=str(token)):
        Bench().runner.check(request("r", [10, token]))


def test_positions_of_another_model_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="3 axes"):
        Bench().runner.check(request("r", [10], axes=3))


def test_media_without_a_tower_are_refused() -> None:
    bench = Bench()
    runner = Runner(Model(bench.model, None), bench.kv, bench.config)
    with pytest.raises(InvalidRequest, match="tower"):
        runner.check(shown("a", 1))


# -- the pool -------------------------------------------------------------------------------------


def test_the_pool_holds_as_many_blocks_as_fit() -> None:
    shape = spec()
    blocks = count_blocks(shape, 1000 * shape.kv_bytes_per_token(), 16)
    assert blocks == 62
    kv = allocate(shape, blocks, 16)
    assert kv.keys[0].shape == (62, 1, 16, 3)
    assert kv.storage.nbytes == 62 * 16 * shape.kv_bytes_per_token()


def test_too_small_a_pool_says_the_flag_and_what_would_do() -> None:
    shape = spec()
    with pytest.raises(StartupError, match="--kv-cache-bytes") as refusal:
        count_blocks(shape, 100, 16)
    smallest = int(str(refusal.value).rsplit(" ", 1)[1])
    assert count_blocks(shape, smallest, 16) == 16


def test_more_than_the_memory_there_is_says_the_flag() -> None:
    with pytest.raises(StartupError, match=r"--kv-cache-bytes.*available"):
        count_blocks(spec(), 1 << 60, 16)


def test_the_weights_that_will_be_loaded_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.engine.kv_pool.available_bytes", lambda device: 100 * MIB)
    shape = spec()
    assert count_blocks(shape, 60 * MIB, 16, weight_bytes=40 * MIB) == 60 * MIB // (16 * shape.kv_bytes_per_token())
    with pytest.raises(StartupError, match=r"needs 60 MiB and the weights take 41 MiB, but 100 MiB are available"):
        count_blocks(shape, 60 * MIB, 16, weight_bytes=41 * MIB)


def test_a_pool_that_cannot_be_allocated_says_the_flag() -> None:
    with pytest.raises(StartupError, match="--kv-cache-bytes"):
        allocate(spec(), 1 << 44, 16)
