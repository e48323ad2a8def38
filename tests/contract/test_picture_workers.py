"""Every kind of picture worker, and the pool around them."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.corpus.drawn import ALPHA, ON_WHITE, RGB, on_white
from tests.corpus.picture_files import PNG_RGB, PNG_RGB_ALPHA, png
from triptych.core.config import DecodeConfig, MediaLimits
from triptych.core.errors import Draining, MediaError, Overloaded
from triptych.core.media import Picture, Stage
from triptych.core.media_options import PictureOptions
from triptych.media.decode_host import DecodeProcess
from triptych.media.limits import RequestBudget
from triptych.media.workers import InProcess, PicturePool, process_pool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from triptych.media.decode import Admitted
    from triptych.media.workers import PictureWorker

LIMITS = MediaLimits()
GOOD = png(RGB, PNG_RGB)
CLEAR = png(np.dstack([RGB, ALPHA]), PNG_RGB_ALPHA)
CUT = GOOD[: len(GOOD) // 2]


class Gated:
    """A worker that waits until it is let go on."""

    def __init__(self) -> None:
        self.starts = self.deaths = 0
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.closed = False

    def start(self) -> None:
        pass

    def decode(self, index: int, data: bytes, admitted: Admitted, options: PictureOptions) -> Picture:
        assert not self.closed
        self.begun.release()
        assert self.gate.wait(60)
        return Picture(np.full((1, 1, 3), index, np.uint8))

    def close(self) -> None:
        self.closed = True


@pytest.fixture(params=["process", "thread"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[PicturePool]:
    workers: list[PictureWorker] = (
        [DecodeProcess(LIMITS, DecodeConfig()) for _ in range(2)]
        if request.param == "process"
        else [InProcess() for _ in range(2)]
    )
    pool = PicturePool(workers, max_waiting=2000)
    yield pool
    await pool.close()


async def decode(
    pool: PicturePool, data: bytes = GOOD, index: int = 0, background: tuple[int, int, int] = (255, 255, 255)
) -> Picture:
    return await pool.decode(index, data, RequestBudget(LIMITS), PictureOptions(background))


async def begun(worker: Gated) -> None:
    assert await asyncio.to_thread(worker.begun.acquire, True, 60)


def idle(pool: PicturePool) -> bool:
    now = pool.statistics()
    return (now.busy, now.waiting, now.bytes_held) == (0, 0, 0)


async def test_pixels_come_back(pool: PicturePool) -> None:
    picture = await decode(pool)
    assert (picture.pixels == RGB).all()
    assert picture.pixels.dtype == np.uint8
    assert (picture.height, picture.width) == RGB.shape[:2]


async def test_transparency_shows_the_background_that_was_asked_for(pool: PicturePool) -> None:
    assert ((await decode(pool, CLEAR)).pixels == ON_WHITE).all()
    dark = (await decode(pool, CLEAR, background=(0, 0, 0))).pixels
    assert (dark == 255 - on_white(255 - RGB, ALPHA)).all()


async def test_a_bad_picture_fails_by_itself(pool: PicturePool) -> None:
    results = await asyncio.gather(
        *(decode(pool, CUT if index % 3 == 1 else GOOD, index) for index in range(30)), return_exceptions=True
    )
    for index, result in enumerate(results):
        if index % 3 == 1:
            assert isinstance(result, MediaError)
            assert (result.index, result.stage) == (index, Stage.DECODE)
        else:
            assert isinstance(result, Picture)
            assert (result.pixels == RGB).all()
    now = pool.statistics()
    assert (now.decoded, now.failed) == (20, 10)
    assert idle(pool)


async def test_a_limit_is_asked_before_a_worker(pool: PicturePool) -> None:
    budget = RequestBudget(MediaLimits(max_item_pixels=10))
    with pytest.raises(MediaError, match="--max-item-pixels"):
        await pool.decode(3, GOOD, budget, PictureOptions())
    now = pool.statistics()
    assert (now.decoded, now.failed, now.starts) == (0, 0, 0)


async def test_a_request_counts_its_pictures_together_although_they_are_decoded_at_once(pool: PicturePool) -> None:
    budget = RequestBudget(MediaLimits(max_request_pixels=3 * RGB.shape[0] * RGB.shape[1]))
    work = (pool.decode(index, GOOD, budget, PictureOptions()) for index in range(5))
    results = await asyncio.gather(*work, return_exceptions=True)
    assert [isinstance(result, Picture) for result in results] == [True] * 3 + [False] * 2


async def test_pictures_outlive_the_workers(pool: PicturePool) -> None:
    picture = await decode(pool)
    await pool.close()
    assert (picture.pixels == RGB).all()


async def test_a_thousand_pictures_of_which_many_are_cancelled_leave_nothing_behind(pool: PicturePool) -> None:
    chance = random.Random(7)
    await pool.start()

    async def one(index: int) -> None:
        task = asyncio.create_task(decode(pool, CUT if index % 10 in (3, 6) else GOOD, index))
        if index % 2:
            await asyncio.sleep(chance.choice([0, 0, chance.random() * 0.3]))
            task.cancel()
        try:
            await task
        except MediaError:
            assert index % 10 in (3, 6)
        except asyncio.CancelledError:
            assert index % 2

    await asyncio.gather(*(one(index) for index in range(1000)))
    while not idle(pool):
        await asyncio.sleep(0.001)
    now = pool.statistics()
    assert now.decoded >= 400
    assert now.failed >= 100
    assert now.abandoned >= 50
    assert now.deaths == 0
    assert (await decode(pool)).pixels.any()
    await pool.close()
    assert len(asyncio.all_tasks()) == 1


async def test_the_queue_is_bounded_and_first_come_first_served() -> None:
    worker = Gated()
    pool = PicturePool([worker], max_waiting=2)
    order: list[int] = []

    async def one(index: int) -> None:
        order.append(int((await decode(pool, index=index)).pixels[0, 0, 0]))

    tasks = [asyncio.create_task(one(index)) for index in range(3)]
    await begun(worker)
    with pytest.raises(Overloaded, match=r"2 pictures already wait .* --decode-workers"):
        await decode(pool)
    now = pool.statistics()
    assert (now.busy, now.waiting, now.refused, now.bytes_held) == (1, 2, 1, 3 * len(GOOD))
    worker.gate.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    assert idle(pool)
    await pool.close()


async def test_who_leaves_the_queue_gives_the_place_back_at_once() -> None:
    worker = Gated()
    pool = PicturePool([worker], max_waiting=1)
    first = asyncio.create_task(decode(pool))
    await begun(worker)
    second = asyncio.create_task(decode(pool))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert pool.statistics().waiting == 0
    third = asyncio.create_task(decode(pool))
    worker.gate.set()
    await asyncio.gather(first, third)
    assert pool.statistics().abandoned == 1
    await pool.close()


async def test_a_worker_belongs_to_the_picture_that_nobody_waits_for_any_more() -> None:
    worker = Gated()
    pool = PicturePool([worker], max_waiting=5)
    first = asyncio.create_task(decode(pool))
    await begun(worker)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(decode(pool))
    await asyncio.sleep(0)
    now = pool.statistics()
    assert (now.busy, now.waiting, now.abandoned) == (1, 1, 1)
    worker.gate.set()
    await second
    assert idle(pool)
    await pool.close()


async def test_a_turn_that_comes_together_with_a_cancel_is_passed_on() -> None:
    worker = Gated()
    pool = PicturePool([worker], max_waiting=5)
    first = asyncio.create_task(decode(pool))
    await begun(worker)
    second, third = (asyncio.create_task(decode(pool)) for _ in range(2))
    await asyncio.sleep(0)
    worker.gate.set()
    await first  # has handed the worker to the second, which has not run yet
    second.cancel()
    await third
    with pytest.raises(asyncio.CancelledError):
        await second
    assert idle(pool)
    await pool.close()


async def test_a_pool_ends_when_what_runs_has_ended() -> None:
    worker = Gated()
    pool = PicturePool([worker], max_waiting=5)
    running = asyncio.create_task(decode(pool))
    await begun(worker)
    waiting = asyncio.create_task(decode(pool))
    await asyncio.sleep(0)
    first_end, second_end = (asyncio.create_task(pool.close()) for _ in range(2))
    await asyncio.sleep(0)
    first_end.cancel()  # the end goes on
    with pytest.raises(Draining):
        await waiting
    with pytest.raises(Draining):
        await decode(pool)
    assert not worker.closed
    worker.gate.set()
    assert (await running).pixels.shape == (1, 1, 3)
    await second_end
    assert worker.closed
    assert idle(pool)


async def test_an_engines_pool_has_as_many_workers_as_it_says() -> None:
    pool = process_pool(LIMITS, DecodeConfig(decode_workers=3))
    await pool.start()
    assert (pool.statistics().workers, pool.statistics().starts) == (3, 3)
    await pool.close()
