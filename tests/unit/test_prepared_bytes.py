"""Prepared media that are alive: counted as long as anybody has any of their memory, whoever it is."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.stepping import Steps
from triptych.core.config import MediaLimits
from triptych.media.prepared_bytes import PreparedBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

MOST = 1000
LIMITS = MediaLimits(max_prepared_bytes=MOST, prepared_cache_bytes=1)
Array = "npt.NDArray[np.uint8]"


def array(size: int) -> npt.NDArray[np.uint8]:
    return np.empty((size // 10, 10), np.uint8)


@pytest.fixture
def ledger() -> Iterator[PreparedBytes]:
    """No collector runs: what has to go must go by itself."""
    gc.disable()
    yield PreparedBytes(LIMITS, lambda: pytest.fail("nobody had asked"))
    gc.enable()


def test_it_is_counted_until_the_last_who_has_it_lets_go(ledger: PreparedBytes) -> None:
    first, second = array(100), array(50)
    ledger.add(first)
    ledger.add(second)
    assert ledger.statistics() == {"bytes": 150, "arrays": 2}
    others = [first] * 3
    del first
    assert ledger.bytes == 150
    others.clear()
    assert ledger.statistics() == {"bytes": 50, "arrays": 1}
    del second
    assert ledger.statistics() == {"bytes": 0, "arrays": 0}


@pytest.mark.parametrize(
    "kept",
    [
        lambda whole: whole[:1],
        lambda whole: whole.reshape(-1)[3:5].reshape(1, 2),
        lambda whole: memoryview(whole),
        lambda whole: torch.from_numpy(whole),
        lambda whole: torch.from_numpy(whole)[1:].view(torch.int8),
        lambda whole: torch.from_numpy(whole[1:]),
        lambda whole: torch.from_numpy(whole).numpy(),
    ],
    ids=["view", "view of views", "buffer", "tensor", "view of a tensor", "tensor of a view", "array of a tensor"],
)
@pytest.mark.parametrize("added", [lambda whole: whole, lambda whole: whole[:, :5], lambda whole: whole.reshape(-1)])
def test_a_part_keeps_the_whole(
    ledger: PreparedBytes, kept: Callable[[Array], object], added: Callable[[Array], Array]
) -> None:
    whole = array(100)
    ledger.add(added(whole))
    part = kept(whole)
    del whole
    assert ledger.bytes == 100
    del part
    assert ledger.bytes == 0


def test_memory_that_is_no_arrays_is_its_arrays(ledger: PreparedBytes) -> None:
    mapped = np.frombuffer(bytearray(100), np.uint8)
    ledger.add(mapped.reshape(10, 10))
    part = mapped[3:]
    del mapped
    assert ledger.bytes == 100
    del part
    assert ledger.bytes == 0


def test_what_only_keeps_itself_goes_with_the_collector(ledger: PreparedBytes) -> None:
    whole = array(100)
    ledger.add(whole)
    ring: list[object] = [whole]
    ring.append(ring)
    del whole, ring
    assert ledger.bytes == 100  # it is there
    gc.collect()
    assert ledger.bytes == 0


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 4)), max_size=40))
def test_it_is_what_is_there_in_whatever_order_they_come_and_go(steps: list[tuple[int, int]]) -> None:
    ledger = PreparedBytes(LIMITS, lambda: None)
    there: list[Array] = []
    for size, goes in steps:
        there.append(array(10 * size))
        ledger.add(there[-1])
        del there[: goes // 2]
        assert ledger.statistics() == {"bytes": sum(one.nbytes for one in there), "arrays": len(there)}


class Line:
    """Somebody who waits, on a loop that the test runs."""

    def __init__(self) -> None:
        self.loop = Steps()
        self.rings = 0
        self.ledger = PreparedBytes(LIMITS, self.ring)

    def ring(self) -> None:
        assert asyncio.get_running_loop() is self.loop
        self.rings += 1

    def full(self) -> str | None:
        with self.loop.running():
            return self.ledger.full()

    def heard(self) -> int:
        self.loop.settle()
        return self.rings


def test_who_was_told_that_it_is_full_hears_when_it_is_not() -> None:
    line = Line()
    arrays = [array(MOST), array(10), array(10)]
    for one in arrays[:1]:
        line.ledger.add(one)
    assert line.full() is None  # as much as there may be
    del one
    for other in arrays[1:]:
        line.ledger.add(other)
    del other
    why = line.full()
    assert why is not None
    assert "take 1020 bytes; at most 1000 (--max-prepared-bytes)" in why
    arrays.pop()
    assert line.heard() == 0
    arrays.pop()
    assert line.heard() == 1
    assert line.full() is None
    arrays.clear()
    assert line.heard() == 1  # nobody has asked since


def test_what_is_kept_in_case_it_comes_again_fills_nothing_by_itself() -> None:
    limits = MediaLimits(max_prepared_bytes=10, prepared_cache_bytes=MOST)
    ledger, kept = PreparedBytes(limits, lambda: None), array(MOST)
    ledger.add(kept)
    assert ledger.full() is None
    more = array(10)
    ledger.add(more)
    with Steps().running():
        assert ledger.full() is not None


async def test_arrays_go_on_any_thread_and_in_the_middle_of_anything() -> None:
    fallen = asyncio.Event()
    ledger = PreparedBytes(LIMITS, fallen.set)
    loop = asyncio.get_running_loop()

    def drop(arrays: list[Array]) -> None:
        while arrays:
            arrays.pop()

    for _ in range(20):
        fallen.clear()
        shared = [array(100) for _ in range(40)]
        for one in shared:
            ledger.add(one)
        del one
        assert ledger.full() is not None
        threads = [threading.Thread(target=drop, args=(shared,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        async with asyncio.timeout(20):
            await fallen.wait()
            for thread in threads:
                await loop.run_in_executor(None, thread.join)
        assert ledger.statistics() == {"bytes": 0, "arrays": 0}


def test_the_end_of_a_loop_is_no_trouble_for_what_ends_later() -> None:
    arrays = [array(2 * MOST)]
    loop = asyncio.new_event_loop()
    ledger = PreparedBytes(LIMITS, lambda: None)
    ledger.add(arrays[0])

    async def ask() -> None:
        assert ledger.full() is not None

    loop.run_until_complete(ask())
    loop.close()
    arrays.clear()
    assert ledger.bytes == 0


@contextmanager
def collecting_often() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


async def test_the_collector_may_run_inside_of_anything() -> None:
    """Rings come in the middle of the loop's own work, and of the ledger's."""
    rings = []
    ledger = PreparedBytes(LIMITS, lambda: rings.append(ledger.bytes))
    with collecting_often():
        for _ in range(200):
            one = array(2 * MOST)
            ledger.add(one)
            ring: list[object] = [one]
            ring.append(ring)
            asked = ledger.full()
            del one, ring
            await asyncio.sleep(0)
            assert asked is not None
    gc.collect()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ledger.bytes == 0
    assert rings
    assert all(size <= MOST for size in rings)
