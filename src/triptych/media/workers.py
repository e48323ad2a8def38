"""Where media are decoded: a few workers, a bounded queue for them, and whoever waits.

    picture, clip, sound -> a place in the queue -> a worker's turn -> pixels, frames, samples

A place in the queue belongs to the caller: who leaves gives it back at once. A worker belongs to the work: who stops
waiting for what is being decoded is let go when that has ended, so that whatever the caller holds for it is held as
long as the work takes.

Every item goes to a process, however small: handing it over costs 0.3 ms, a hostile one is no larger than others, and
what is decoded straight into memory that the engine maps is cheaper than what a thread does with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from triptych.core.errors import Draining, Overloaded
from triptych.core.media import Stage
from triptych.media.decode_host import DecodeProcess
from triptych.media.work import until_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triptych.core.clip import Clip, ClipSurvey, FrameFit, FrameSampling
    from triptych.core.config import DecodeConfig, MediaLimits
    from triptych.core.media import Picture
    from triptych.core.media_options import PictureOptions
    from triptych.core.picture_fit import PictureFit
    from triptych.core.sound import Sound
    from triptych.media.decode import Admitted

Decoded = TypeVar("Decoded")


class MediaWorker(Protocol):
    """Decodes one item at a time. Every method may block.

    What decodes raises MediaError where the item is damaged, cut off, or over a limit or a ceiling, and
    MediaUnavailable where the worker could not do it just now; ``index`` names the item.
    """

    starts: int
    """How often something was started to decode in."""
    deaths: int
    """How often it had to be given up, or ended by itself."""

    def start(self) -> None:
        """Be ready before the first item.

        Raises:
            Internal: it cannot be.
        """
        ...

    def picture(
        self, index: int, data: bytes, admitted: Admitted, options: PictureOptions, fit: PictureFit | None = None
    ) -> Picture:
        """The pixels of an admitted picture."""
        ...

    def survey(self, index: int, data: bytes, sampling: FrameSampling, fit: FrameFit | None) -> ClipSurvey:
        """What decoding a video will cost."""
        ...

    def clip(self, index: int, data: bytes, sampling: FrameSampling, fit: FrameFit | None) -> Clip:
        """The chosen frames of a video."""
        ...

    def sound(
        self, index: int, data: bytes, rate: int, window_seconds: float | None = None, *, of_film: bool = False
    ) -> Sound:
        """The samples of a sound."""
        ...

    def hurry(self) -> None:
        """End what runs, where that can be done, and refuse what comes with MediaUnavailable, for good.

        From any thread, also while another one decodes, starts or closes; does not wait.
        """
        ...

    def close(self) -> None:
        """End what was started."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeStatistics:
    """Workers, the queue for them, and what became of items."""

    workers: int
    busy: int
    waiting: int
    decoded: int
    failed: int
    refused: int
    """By a full queue."""
    abandoned: int
    """Left the queue before their turn, or were decoded for nobody."""
    bytes_held: int
    """Encoded bytes of the items that wait or are being decoded."""
    starts: int
    deaths: int


class MediaPool:
    """First come, first served. Belongs to one event loop.

    What decodes raises MediaError where the item is damaged, cut off, or over a limit or a ceiling, MediaUnavailable
    where it could not be decoded just now, Overloaded where the queue is full, and Draining where the pool is closed.

    Args:
        workers: what decodes; closed with the pool.
        max_waiting: items that may wait for one.
    """

    def __init__(self, workers: Sequence[MediaWorker], max_waiting: int) -> None:
        self._workers = tuple(workers)
        self._idle = list(workers)
        self._max_waiting = max_waiting
        self._queue: deque[asyncio.Future[MediaWorker | None]] = deque()
        self._threads = ThreadPoolExecutor(len(workers), thread_name_prefix="decode")
        self._running: set[asyncio.Future[Any]] = set()
        self._end: asyncio.Future[None] | None = None
        self._counts = dict.fromkeys(("decoded", "failed", "refused", "abandoned", "bytes_held"), 0)

    async def start(self) -> None:
        """Have all workers ready before the first item.

        Raises:
            Internal: one cannot be.
        """
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, worker.start) for worker in self._workers))

    async def picture(
        self, index: int, data: bytes, admitted: Admitted, options: PictureOptions, fit: PictureFit | None = None
    ) -> Picture:
        """Decode, turn upright and flatten one picture that was admitted; of an animation the first frame.

        Args:
            index: Of the item in its request.
            data: The file.
            admitted: What its header says.
            options: What shows through where it is transparent.
            fit: Resizes it; without it the picture keeps its size.
        """
        return await self._decode(index, data, lambda worker: worker.picture(index, data, admitted, options, fit))

    async def survey(self, index: int, data: bytes, sampling: FrameSampling, fit: FrameFit | None) -> ClipSurvey:
        """What ``clip`` will cost; nothing is decoded, and all limits hold that need no decoding."""
        return await self._decode(index, data, lambda worker: worker.survey(index, data, sampling, fit))

    async def clip(self, index: int, data: bytes, sampling: FrameSampling, fit: FrameFit | None) -> Clip:
        """Choose frames of a video and decode them, upright and flattened on white.

        Args:
            index: Of the item in its request.
            data: The file.
            sampling: Which frames are asked for.
            fit: Resizes each frame as it is decoded; without it frames keep the size of the first one.
        """
        return await self._decode(index, data, lambda worker: worker.clip(index, data, sampling, fit))

    async def sound(
        self, index: int, data: bytes, rate: int, window_seconds: float | None = None, *, of_film: bool = False
    ) -> Sound:
        """Decode a sound to one channel.

        Args:
            index: Of the item in its request.
            data: The file.
            rate: Samples a second that the model hears.
            window_seconds: What the model hears at a time; None where it hears any length.
            of_film: Whether the sound of a video is asked for. Unasked it is an error, never a guess.
        """
        return await self._decode(
            index, data, lambda worker: worker.sound(index, data, rate, window_seconds, of_film=of_film)
        )

    def hurry(self) -> None:
        """End what is being decoded and decode nothing any more, for good: callers get MediaUnavailable.

        For the end of an engine whose grace is over, before ``close`` or while it waits. From any thread, any number
        of times; returns at once. Who waits in the queue has a turn and is refused then.
        """
        for worker in self._workers:
            worker.hurry()

    async def close(self) -> None:
        """Refuse what waits, let what runs end, then end the workers; what runs is bounded by its ceilings.

        Goes on to its end also where nobody waits for it any more; ``hurry`` brings it there.
        """
        if self._end is None:
            self._end = asyncio.ensure_future(self._close())
        await asyncio.shield(self._end)

    async def _close(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
        while self._running:
            await asyncio.wait(self._running)
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, worker.close) for worker in self._workers))
        self._threads.shutdown()

    async def _decode(self, index: int, data: bytes, decode: Callable[[MediaWorker], Decoded]) -> Decoded:
        self._check_open(index)
        self._counts["bytes_held"] += len(data)
        try:
            worker = await self._turn(index)
        except BaseException:
            self._counts["bytes_held"] -= len(data)
            raise
        work = asyncio.get_running_loop().run_in_executor(self._threads, decode, worker)
        self._running.add(work)
        work.add_done_callback(lambda done: self._finished(done, worker, len(data)))
        await until_ended(work, self._left)
        return work.result()

    def _left(self) -> None:
        """Nobody waits any more for what is being decoded."""
        self._counts["abandoned"] += 1

    def _check_open(self, index: int) -> None:
        if self._end is not None:
            raise _closed(index)

    async def _turn(self, index: int) -> MediaWorker:
        """A worker; hand it back."""
        if self._idle:
            return self._idle.pop()
        if len(self._queue) >= self._max_waiting:
            self._counts["refused"] += 1
            raise Overloaded(
                f"media item {index}: {Stage.DECODE.value}: {len(self._queue)} media items already wait to be decoded "
                "(--max-waiting-items); retry later, or raise --decode-workers"
            )
        turn: asyncio.Future[MediaWorker | None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            worker = await turn
        except asyncio.CancelledError:
            self._counts["abandoned"] += 1
            if turn in self._queue:
                self._queue.remove(turn)
            elif not turn.cancelled() and (came := turn.result()) is not None:  # its turn came at the same time
                self._give_back(came)
            raise
        if worker is None or self._end is not None:  # the end came first, or before the turn could be taken
            raise _closed(index)
        return worker

    def _finished(self, work: asyncio.Future[Decoded], worker: MediaWorker, size: int) -> None:
        self._running.discard(work)
        self._counts["bytes_held"] -= size
        self._counts["failed" if work.exception() else "decoded"] += 1
        self._give_back(worker)

    def _give_back(self, worker: MediaWorker) -> None:
        """To the first in the queue, so that nobody can overtake."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(worker)
                return
        self._idle.append(worker)

    def statistics(self) -> DecodeStatistics:
        """Counts as of now."""
        return DecodeStatistics(
            workers=len(self._workers),
            busy=len(self._running),
            waiting=len(self._queue),
            starts=sum(worker.starts for worker in self._workers),
            deaths=sum(worker.deaths for worker in self._workers),
            **self._counts,
        )


def _closed(index: int) -> Draining:
    what = "media are not decoded any more: the engine is shutting down"
    return Draining(f"media item {index}: {Stage.DECODE.value}: {what}")


def process_pool(limits: MediaLimits, config: DecodeConfig) -> MediaPool:
    """The workers that an engine has."""
    workers = [DecodeProcess(limits, config) for _ in range(config.decode_workers)]
    return MediaPool(workers, config.max_waiting_items)
