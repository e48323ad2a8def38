"""The pool around media workers: its queue, its cancels, its end. What workers do with media: test_media_workers.py."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from triptych.core.clip import FrameSampling
from triptych.core.config import DecodeConfig, MediaLimits
from triptych.core.errors import Draining, MediaError, Overloaded
from triptych.core.media import Picture, Stage
from triptych.core.media_options import PictureOptions
from triptych.media.decode import Admitted
from triptych.media.header import Format, Size
from triptych.media.workers import MediaPool, process_pool

if TYPE_CHECKING:
    from triptych.core.clip import Clip, FrameFit
    from triptych.core.picture_fit import PictureFit
    from triptych.core.sound import Sound

ADMITTED = Admitted(Format.PNG, Size(1, 1))
DATA = b"any bytes"


class Gated:
    """A worker that waits until it is let go on, and then fails where it is asked for anything but a picture."""

    def __init__(self) -> None:
        self.starts = self.deaths = 0
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.ended = 0
        self.closed = False

    def start(self) -> None:
        pass

    def picture(
        self, index: int, data: bytes, admitted: Admitted, options: PictureOptions, fit: PictureFit | None = None
    ) -> Picture:
        self._wait()
        return Picture(np.full((1, 1, 3), index, np.uint8))

    def clip(self, index: int, data: bytes, sampling: FrameSampling, fit: FrameFit | None) -> Clip:
        self._wait()
        raise MediaError(index, "no good video", Stage.DECODE)

    def sound(
        self, index: int, data: bytes, rate: int, window_seconds: float | None = None, *, of_film: bool = False
    ) -> Sound:
        self._wait()
        raise MediaError(index, "no good sound", Stage.DECODE)

    def _wait(self) -> None:
        assert not self.closed
        self.begun.release()
        assert self.gate.wait(60)
        self.ended += 1

    def close(self) -> None:
        self.closed = True


async def decode(pool: MediaPool, index: int = 0) -> Picture:
    return await pool.picture(index, DATA, ADMITTED, PictureOptions())


async def begun(worker: Gated) -> None:
    assert await asyncio.to_thread(worker.begun.acquire, True, 60)


def idle(pool: MediaPool) -> bool:
    now = pool.statistics()
    return (now.busy, now.waiting, now.bytes_held) == (0, 0, 0)


async def test_the_queue_is_bounded_and_first_come_first_served_whatever_is_asked_for() -> None:
    worker = Gated()
    pool = MediaPool([worker], max_waiting=4)
    order: list[int] = []

    async def one(index: int) -> None:
        if index % 3 == 0:
            await decode(pool, index)
        with contextlib.suppress(MediaError):
            if index % 3 == 1:
                await pool.clip(index, DATA, FrameSampling(), None)
            if index % 3 == 2:
                await pool.sound(index, DATA, 16000)
        order.append(index)

    tasks = [asyncio.create_task(one(index)) for index in range(5)]
    await begun(worker)
    for asked in (decode(pool, 3), pool.clip(3, DATA, FrameSampling(), None), pool.sound(3, DATA, 16000)):
        with pytest.raises(Overloaded, match=r"media item 3: decode: 4 media items already wait .* --decode-workers"):
            await asked
    now = pool.statistics()
    assert (now.busy, now.waiting, now.refused, now.bytes_held) == (1, 4, 3, 5 * len(DATA))
    worker.gate.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]
    now = pool.statistics()
    assert (now.decoded, now.failed) == (2, 3)
    assert idle(pool)
    await pool.close()


async def test_who_leaves_the_queue_gives_the_place_back_at_once() -> None:
    worker = Gated()
    pool = MediaPool([worker], max_waiting=1)
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


async def test_who_is_cancelled_while_it_is_decoded_leaves_when_that_has_ended() -> None:
    worker = Gated()
    pool = MediaPool([worker], max_waiting=5)
    first = asyncio.create_task(decode(pool))
    await begun(worker)
    second = asyncio.create_task(decode(pool))
    for _ in range(3):  # however often
        first.cancel()
        await asyncio.sleep(0)
    now = pool.statistics()
    assert (now.busy, now.waiting, now.abandoned) == (1, 1, 1)
    assert not first.done()
    worker.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert worker.ended >= 1
    assert first.cancelled()
    await second
    assert idle(pool)
    await pool.close()


async def test_an_error_that_nobody_waits_for_is_nobodys() -> None:
    worker = Gated()
    pool = MediaPool([worker], max_waiting=5)
    clip = asyncio.create_task(pool.clip(0, DATA, FrameSampling(), None))
    await begun(worker)
    clip.cancel()
    await asyncio.sleep(0)
    worker.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await clip
    now = pool.statistics()
    assert (now.failed, now.abandoned) == (1, 1)
    assert idle(pool)
    await pool.close()


async def test_a_turn_that_comes_together_with_a_cancel_is_passed_on() -> None:
    worker = Gated()
    pool = MediaPool([worker], max_waiting=5)
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
    pool = MediaPool([worker], max_waiting=5)
    running = asyncio.create_task(decode(pool))
    await begun(worker)
    waiting = asyncio.create_task(decode(pool, 2))
    await asyncio.sleep(0)
    first_end, second_end = (asyncio.create_task(pool.close()) for _ in range(2))
    await asyncio.sleep(0)
    first_end.cancel()  # the end goes on
    for asked in (
        waiting,
        decode(pool, 2),
        pool.clip(2, DATA, FrameSampling(), None),
        pool.sound(2, DATA, 16000),
    ):
        with pytest.raises(Draining, match="media item 2: decode: media are not decoded any more"):
            await asked
    assert not worker.closed
    worker.gate.set()
    assert (await running).pixels.shape == (1, 1, 3)
    await second_end
    assert worker.closed
    assert idle(pool)


async def test_an_engines_pool_has_as_many_workers_as_it_says() -> None:
    pool = process_pool(MediaLimits(), DecodeConfig(decode_workers=3))
    await pool.start()
    assert (pool.statistics().workers, pool.statistics().starts) == (3, 3)
    await pool.close()
