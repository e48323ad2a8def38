"""An encoder engine without its thread: what other engines read is what the tower has said."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch

from tests.engine.encode_setup import LAYOUT, EncodeBench, asked, is_picture
from tests.engine.fakes import FakeTower, picture_rows
from tests.requests import picture_number
from triptych.core.errors import Draining, Internal, Overloaded, StartupError
from triptych.core.events import Encoded, RowsGone
from triptych.core.handles import RowLayout
from triptych.engine.row_arena import ROW_LAYOUT, allocate_rows, count_row_blocks, write_rows
from triptych.transport.contract import BlockMemory, FetchOutcome


def test_rows_of_any_number_come_over_as_they_are() -> None:
    bench = EncodeBench()
    sizes = [1, 2, 3, 4, 5, 6, 7, 10, 13]
    bench.run([asked(f"r{rows}", rows, rows) for rows in sizes])
    for rows in reversed(sizes):
        assert bench.ends[f"r{rows}"].handle.blocks == LAYOUT.blocks(16 * rows)
        assert is_picture(bench.take(f"r{rows}", rows), rows, rows)
    bench.run()
    bench.nothing_is_held()


def test_the_items_of_a_step_are_one_call_of_the_tower_whoever_asked() -> None:
    bench = EncodeBench()
    bench.run([asked("a", 1), asked("b", 2)], [asked("c", 3), asked("twin", 1)])
    assert bench.tower.calls == [[1, 2, 3]]
    for name, picture in (("a", 1), ("b", 2), ("c", 3), ("twin", 1)):
        assert is_picture(bench.take(name), picture)


def test_cached_rows_need_neither_tower_nor_input() -> None:
    bench = EncodeBench()
    bench.run([asked("a", 1)])
    bench.run([asked("known", 1, cached=True), asked("given", 1)], [asked("gone", 2, cached=True)])
    assert bench.tower.calls == [[1]]
    assert is_picture(bench.take("known"), 1)
    assert is_picture(bench.take("given"), 1)
    assert isinstance(bench.ends["gone"], RowsGone)


def test_evicted_rows_are_dropped_and_encoded_again() -> None:
    bench = EncodeBench(encoder_cache_bytes=6 * 16)
    for name, picture in (("a", 1), ("b", 2), ("c", 1)):
        bench.run([asked(name, picture)])
        assert len(bench.runner._rows) == 1
    assert bench.tower.calls == [[1], [2], [1]]
    assert is_picture(bench.take("a"), 1)  # what was handed over does not depend on the cache


def test_stored_rows_do_not_keep_the_whole_batch_alive() -> None:
    class Batched:
        def encode(self, inputs: list) -> list[torch.Tensor]:
            together = torch.cat([picture_rows(picture_number(i), i.layout.rows) for i in inputs])
            return list(together.split([i.layout.rows for i in inputs]))

    bench = EncodeBench(Batched())
    bench.run([asked("a", 1), asked("b", 2)])
    for rows in bench.runner._rows.values():
        assert rows.untyped_storage().nbytes() == rows.nbytes
    assert is_picture(bench.take("b"), 2)


def test_memory_is_waited_for_and_goes_on_when_a_consumer_takes() -> None:
    bench = EncodeBench(blocks=6)
    bench.run([asked("a", 1), asked("b", 2)])
    bench.run([asked("c", 3), asked("d", 4)])
    assert set(bench.ends) == {"a", "b"}
    assert is_picture(bench.take("a"), 1)
    bench.run()
    assert set(bench.ends) == {"a", "b"}
    assert is_picture(bench.take("b"), 2)
    bench.run()
    assert is_picture(bench.take("c"), 3)
    assert is_picture(bench.take("d"), 4)
    bench.run()
    bench.nothing_is_held()


def test_a_session_is_taken_once() -> None:
    bench = EncodeBench()
    bench.run([asked("a", 1)])
    assert is_picture(bench.take("a"), 1)
    assert bench.take("a") is FetchOutcome.GONE


def test_a_withdrawn_session_is_gone_and_its_blocks_are_given_to_others() -> None:
    bench = EncodeBench(blocks=3)
    bench.run([asked("a", 1)])
    bench.scheduler.withdraw("s a")
    bench.run([asked("b", 2)])
    assert bench.take("a") is FetchOutcome.GONE
    assert is_picture(bench.take("b"), 2)


# -- what goes wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["raises", "too many rows", "too narrow", "not finite"])
def test_a_bad_item_fails_alone_with_its_twins(trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    tower = FakeTower()
    match trouble:
        case "raises":
            tower.broken = {2}
        case "too many rows":
            tower.wrong = {2: picture_rows(2, 7)}
        case "too narrow":
            tower.wrong = {2: picture_rows(2, 6)[:, :-1]}
        case "not finite":
            tower.wrong = {2: picture_rows(2, 6) * float("nan")}
    bench = EncodeBench(tower)
    with caplog.at_level(logging.CRITICAL):
        bench.run([asked("a", 1), asked("bad", 2)], [asked("twin", 2), asked("c", 3)])
    for name in ("bad", "twin"):
        assert isinstance(bench.error(name), Internal)
        assert str(bench.error(name)).split()[0] in ("could", "was")  # whoever knows the item names it
    assert is_picture(bench.take("a"), 1)
    assert is_picture(bench.take("c"), 3)
    bench.run()
    bench.nothing_is_held()


def test_what_is_too_large_for_the_memory_is_overload(caplog: pytest.LogCaptureFixture) -> None:
    bench = EncodeBench(FakeTower(most_rows=6))
    with caplog.at_level(logging.CRITICAL):
        bench.run([asked("a", 1), asked("large", 2, 8), asked("b", 3)])
    assert isinstance(bench.error("large"), Overloaded)
    assert "32 encoder tokens at once" in str(bench.error("large"))
    assert is_picture(bench.take("a"), 1)
    assert is_picture(bench.take("b"), 3)


@pytest.mark.parametrize("where", ["open", "publish", "seal"])
@pytest.mark.parametrize("error", [Overloaded("too many sessions"), ValueError("broken")], ids=["refused", "broken"])
def test_a_store_that_fails_fails_its_item_and_leaves_nothing(
    where: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = EncodeBench()
    real = getattr(bench.publisher, where)

    def failing(session_id: str, *rest: object) -> object:
        if session_id == "s bad":
            raise error
        return real(session_id, *rest)

    monkeypatch.setattr(bench.publisher, where, failing)
    with caplog.at_level(logging.CRITICAL):
        bench.run([asked("a", 1), asked("bad", 2), asked("twin", 2)])
    assert type(bench.error("bad")) is (Overloaded if isinstance(error, Overloaded) else Internal)
    assert "broken" not in str(bench.error("bad"))
    assert is_picture(bench.take("a"), 1)
    assert is_picture(bench.take("twin"), 2)
    bench.run()
    bench.nothing_is_held()


def test_a_closed_transport_fails_what_comes() -> None:
    bench = EncodeBench()
    bench.publisher.close()
    bench.run([asked("a", 1)])
    assert isinstance(bench.error("a"), Draining)
    bench.nothing_is_held()


@pytest.mark.parametrize("place", ["tower", "store"])
def test_a_lost_device_is_passed_on(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    bench = EncodeBench()
    if place == "tower":
        monkeypatch.setattr(bench.tower, "encode", lost)
    else:
        monkeypatch.setattr("triptych.engine.encode_runner.write_rows", lost)
    bench.scheduler.add([asked("a", 1)])
    with pytest.raises(torch.AcceleratorError):
        bench.step()


def test_an_input_of_another_item_is_refused() -> None:
    bench = EncodeBench()
    mixed = dataclasses.replace(asked("a", 1), input=asked("b", 2).input)
    with pytest.raises(Internal, match="another one"):
        bench.runner.check(mixed)
    bench.runner.check(asked("a", 1, cached=True))


def test_what_it_holds_is_told() -> None:
    bench = EncodeBench()
    bench.run([asked("a", 1)])
    held = bench.runner.statistics()["row_transport"]
    assert held["sessions"] == 1
    assert held["bytes"] == 3 * LAYOUT.block_bytes
    assert isinstance(bench.ends["a"], Encoded)


# -- memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_rows_lie_one_after_the_other_and_nothing_is_left_behind_them(rows: int, dtype: torch.dtype) -> None:
    layout = RowLayout(24)
    memory = BlockMemory(layout, np.full((9, 24), 0xEE, np.uint8), np.zeros(9, np.int64))
    numbers = torch.randn(rows, 5).to(dtype)
    blocks = [7, 2, 8, 0, 3][: layout.blocks(numbers.nbytes)]
    write_rows(memory, blocks, numbers)
    flat = memory.memory[blocks].reshape(-1)
    expected = numbers.view(torch.uint8).numpy().reshape(-1)
    assert np.array_equal(flat[: len(expected)], expected)
    assert not flat[len(expected) :].any()
    others = [block for block in range(9) if block not in blocks]
    assert (memory.memory[others] == 0xEE).all()


def test_the_quota_is_cut_into_blocks() -> None:
    size = ROW_LAYOUT.block_bytes
    assert size == 65536
    assert count_row_blocks(ROW_LAYOUT, 3 * size + 1) == 3
    generations = np.zeros(3, np.int64)
    memory = allocate_rows(ROW_LAYOUT, generations)
    assert memory.memory.shape == (3, size)
    assert memory.memory.dtype == np.uint8
    assert memory.memory.flags.c_contiguous
    assert not memory.memory.any()
    assert memory.generations is generations
    assert memory.layout is ROW_LAYOUT


def test_a_quota_that_holds_nothing_or_too_much_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"--encoder-quota 65535 holds no rows; .* is 65536"):
        count_row_blocks(ROW_LAYOUT, 65535)
    monkeypatch.setattr("triptych.engine.row_arena.available_bytes", lambda device: 100 << 20)
    assert count_row_blocks(ROW_LAYOUT, 60 << 20, weight_bytes=40 << 20) == 960
    with pytest.raises(StartupError, match=r"needs 60 MiB and the weights take 41 MiB, but 100 MiB are available"):
        count_row_blocks(ROW_LAYOUT, 60 << 20, weight_bytes=41 << 20)
    with pytest.raises(StartupError, match=r"--encoder-quota 105906176 needs 101 MiB but 100 MiB"):
        count_row_blocks(ROW_LAYOUT, 101 << 20)


def test_memory_that_cannot_be_had_names_the_flag() -> None:
    huge = np.broadcast_to(np.int64(0), (1 << 44,))
    with pytest.raises(StartupError, match="--encoder-quota"):
        allocate_rows(ROW_LAYOUT, huge)
