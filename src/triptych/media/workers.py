"""Where pictures are decoded: a few workers, a bounded queue for them, and whoever waits.

    decode   limits -> a place in the queue -> a worker's turn -> pixels

A worker belongs to the work: who stops waiting for a picture that is being decoded leaves the worker to it until it
ends. A place in the queue belongs to the caller: who leaves gives it back at once.

Every picture goes to a process, however small: handing it over costs 0.2 ms, a hostile one is no larger than others,
and packing the pixels straight into memory that the engine maps is cheaper than what a thread does with them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from triptych.core.errors import Draining, Overloaded
from triptych.media.decode import admit_picture, decode_here
from triptych.media.decode_host import DecodeProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.config import DecodeConfig, MediaLimits
    from triptych.core.media import Picture
    from triptych.core.media_options import PictureOptions
    from triptych.media.decode import Admitted
    from triptych.media.limits import RequestBudget


class PictureWorker(Protocol):
    """Decodes one picture at a time. Every method may block."""

    starts: int
    """How often something was started to decode in."""
    deaths: int
    """How often it had to be given up, or ended by itself."""

    def start(self) -> None:
        """Be ready before the first picture.

        Raises:
            Internal: it cannot be.
        """
        ...

    def decode(self, index: int, data: bytes, admitted: Admitted, options: PictureOptions) -> Picture:
        """The pixels of an admitted picture.

        Raises:
            MediaError: damaged or cut off, or over a ceiling; ``index`` names the item.
            MediaUnavailable: the worker could not do it just now.
        """
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class InProcess:
    """A worker without a process or ceilings, for tests."""

    def __init__(self) -> None:
        self.starts = 0
        self.deaths = 0

    def start(self) -> None:
        """Nothing to do."""

    def decode(self, index: int, data: bytes, admitted: Admitted, options: PictureOptions) -> Picture:
        """The pixels, decoded by the calling thread.

        Raises:
            MediaError: damaged or cut off; ``index`` names the item.
            MediaUnavailable: there is not enough memory.
        """
        return decode_here(index, data, admitted, options)

    def close(self) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class DecodeStatistics:
    """Workers, the queue for them, and what became of pictures."""

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
    """Encoded bytes of the pictures that wait or are being decoded."""
    starts: int
    deaths: int


class PicturePool:
    """First come, first served. Belongs to one event loop.

    Args:
        workers: what decodes; closed with the pool.
        max_waiting: pictures that may wait for one.
    """

    def __init__(self, workers: Sequence[PictureWorker], max_waiting: int) -> None:
        self._workers = tuple(workers)
        self._idle = list(workers)
        self._max_waiting = max_waiting
        self._queue: deque[asyncio.Future[PictureWorker]] = deque()
        self._threads = ThreadPoolExecutor(len(workers), thread_name_prefix="decode")
        self._running: set[asyncio.Future[Picture]] = set()
        self._end: asyncio.Future[None] | None = None
        self._counts = dict.fromkeys(("decoded", "failed", "refused", "abandoned", "bytes_held"), 0)

    async def start(self) -> None:
        """Have all workers ready before the first picture.

        Raises:
            Internal: one cannot be.
        """
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, worker.start) for worker in self._workers))

    async def decode(self, index: int, data: bytes, budget: RequestBudget, options: PictureOptions) -> Picture:
        """Decode, turn upright and flatten one picture; of an animation the first frame.

        Raises:
            MediaError: empty, not a supported picture, damaged, cut off, or over a limit; ``index`` names the item.
            MediaUnavailable: it could not be decoded just now.
            Overloaded: the queue is full.
            Draining: the pool is closed.
        """
        self._check_open()
        admitted = admit_picture(index, data, budget)
        self._counts["bytes_held"] += len(data)
        try:
            worker = await self._turn()
        except BaseException:
            self._counts["bytes_held"] -= len(data)
            raise
        work = asyncio.get_running_loop().run_in_executor(self._threads, worker.decode, index, data, admitted, options)
        self._running.add(work)
        work.add_done_callback(lambda done: self._finished(done, worker, len(data)))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self._counts["abandoned"] += 1
            raise

    async def close(self) -> None:
        """Refuse what waits, let what runs end, then end the workers; what runs is bounded by its ceilings.

        Goes on to its end also where nobody waits for it any more.
        """
        if self._end is None:
            self._end = asyncio.ensure_future(self._close())
        await asyncio.shield(self._end)

    async def _close(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_exception(_closed())
        while self._running:
            await asyncio.wait(self._running)
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, worker.close) for worker in self._workers))
        self._threads.shutdown()

    def _check_open(self) -> None:
        if self._end is not None:
            raise _closed()

    async def _turn(self) -> PictureWorker:
        """A worker; hand it back."""
        if self._idle:
            return self._idle.pop()
        if len(self._queue) >= self._max_waiting:
            self._counts["refused"] += 1
            raise Overloaded(
                f"{len(self._queue)} pictures already wait to be decoded; retry later, or raise --decode-workers"
            )
        turn: asyncio.Future[PictureWorker] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            worker = await turn
            self._check_open()  # its turn came, and then the end before it could be taken
        except asyncio.CancelledError:
            self._counts["abandoned"] += 1
            if turn in self._queue:
                self._queue.remove(turn)
            elif not turn.cancelled() and turn.exception() is None:  # its turn came at the same time
                self._give_back(turn.result())
            raise
        return worker

    def _finished(self, work: asyncio.Future[Picture], worker: PictureWorker, size: int) -> None:
        self._running.discard(work)
        self._counts["bytes_held"] -= size
        self._counts["failed" if work.exception() else "decoded"] += 1
        self._give_back(worker)

    def _give_back(self, worker: PictureWorker) -> None:
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


def _closed() -> Draining:
    return Draining("pictures are not decoded any more: the engine is shutting down")


def process_pool(limits: MediaLimits, config: DecodeConfig) -> PicturePool:
    """The workers that an engine has."""
    workers = [DecodeProcess(limits, config) for _ in range(config.decode_workers)]
    return PicturePool(workers, config.max_waiting_pictures)
