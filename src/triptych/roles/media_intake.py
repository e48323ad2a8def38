"""Media of requests, from what a client sent to what the tower reads.

    check     kinds, sources, options: nothing is opened                     before a request is accepted
    enter     a place in line for shares
    read      URLs are fetched, data: URIs decoded; content keys             with one share; while fetching, with none
    look      headers of pictures, packets of videos: what will it cost?     with one share
              how many tokens will it be?
    open      what was prepared before is there; the rest is decoded, in     with as many shares as that weighs
              processes, and patched, on threads
    leave     the shares are free once all work has ended

Nothing here runs on the event loop for longer than it takes to hand work over. All but the first two belong inside a
ticket's ``run``: cancelling them ends fetches and places in line at once, and waits for work that cannot be stopped.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from triptych.core.clip import FrameSize
from triptych.core.errors import Internal, InvalidRequest, MediaUnavailable, UnsupportedFeature
from triptych.core.media import DataUri, Modality, RawBytes, Stage, Url
from triptych.core.media_options import ClipOptions, PictureOptions
from triptych.media.admission import Admission, AdmissionBounds
from triptych.media.data_uri import decode_data_uri
from triptych.media.decode import admit_picture
from triptych.media.holding import HeldBytes
from triptych.media.jobs import ClipJob, ItemBytes, PictureJob
from triptych.media.limits import RequestBudget, check_item_bytes, check_item_count
from triptych.media.prepared import PreparedItems
from triptych.media.prepared_bytes import PreparedBytes
from triptych.media.work import on_thread
from triptych.processors.identity import content_key

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from contextlib import AbstractContextManager

    from triptych.core.encoder_input import EncoderInput
    from triptych.core.media import MediaItem, MediaSource
    from triptych.core.media_options import OptionLayer
    from triptych.core.request import GenerateRequest
    from triptych.media.admission import Ticket
    from triptych.media.decode import Admitted
    from triptych.media.fetch import FetchStatistics
    from triptych.media.holding import Holding
    from triptych.media.jobs import Job
    from triptych.media.workers import MediaPool
    from triptych.roles.frontend import Frontend

T = TypeVar("T")

FETCHED_AT_ONCE = 4
"""Items of one request."""
OPENINGS = ("image_loads", "clip_loads", "preprocess_calls")
"""What is counted where media are opened."""


class Fetcher(Protocol):
    """Media by URL: ``media.fetch.Fetcher``."""

    async def fetch(self, index: int, url: str, count: Callable[[int], None], lane: asyncio.Semaphore) -> bytes:
        """The bytes at a URL, of which ``count`` is told as they arrive; ``lane`` is the request's own."""
        ...

    def statistics(self) -> FetchStatistics:
        """Counts as of now."""
        ...


class MediaIntake:
    """Opens media for one engine. Belongs to one event loop.

    Args:
        frontend: what reads media, and its limits.
        decoder: decodes items where they can harm nobody; closed with this.
        fetcher: None where URLs are not fetched.
        server: how the server wants media to be read.

    Raises:
        InvalidRequest: ``server`` is over a limit, or contradicts what the model prefers.
    """

    def __init__(self, frontend: Frontend, decoder: MediaPool, fetcher: Fetcher | None, server: OptionLayer) -> None:
        self._processor = frontend.processor
        self._limits = limits = frontend.limits
        self._decoder = decoder
        self._fetcher = fetcher
        self._layer = server.over(frontend.processor.preferences)
        self._check_options(self._layer.picture(), self._layer.clip())
        self._held = HeldBytes(limits)
        self._alive = PreparedBytes(limits, lambda: self._admission.look_again())
        bounds = AdmissionBounds(
            shares=limits.media_preparation_limit,
            max_waiting=limits.max_waiting_preparations,
            max_waiting_bytes=limits.max_waiting_bytes,
            max_wait=limits.max_waiting_seconds,
            max_away=limits.max_waiting_preparations,
        )
        self._admission = Admission(bounds, crowded=lambda: self._held.crowded, full=self._alive.full)
        self._prepared = PreparedItems(limits.prepared_cache_bytes)
        self._threads = ThreadPoolExecutor(limits.media_preparation_limit, thread_name_prefix="media")
        self._counts = Counter(dict.fromkeys(OPENINGS, 0))

    @property
    def fetches(self) -> bool:
        """Whether media may come by URL."""
        return self._fetcher is not None

    async def start(self) -> None:
        """Be ready before the first item, which would else wait for processes to start.

        Raises:
            Internal: one cannot be started.
        """
        await self._decoder.start()

    def check(self, request: GenerateRequest) -> None:
        """Refuse what is known to be wrong before anything is opened.

        Raises:
            TriptychError: naming the item or the option.
        """
        check_item_count(len(request.media), self._limits)
        for index, item in enumerate(request.media):
            if isinstance(item.source, Url) and self._fetcher is None:
                raise UnsupportedFeature(
                    f"media item {index}: {Stage.FETCH.value}: this engine fetches no URLs (--no-fetch); send a data: "
                    "URI or raw bytes"
                )
        self._check_options(*self._options(request))

    def _check_options(self, picture: PictureOptions, clip: ClipOptions) -> None:
        limits, frames = self._limits, clip.sampling.num_frames or 0
        if frames > limits.max_clip_frames:
            raise InvalidRequest(
                f"media_options.video.num_frames is {frames}; at most {limits.max_clip_frames} (--max-clip-frames)"
            )
        for kind, options, most, flag in (
            ("image", picture, limits.max_item_pixels, "--max-item-pixels"),
            ("video", clip, limits.max_clip_pixels, "--max-clip-pixels"),
        ):
            for name in ("min_pixels", "max_pixels"):
                if (getattr(options, name) or 0) > most:
                    asked = f"media_options.{kind}.{name} is {getattr(options, name)}"
                    raise InvalidRequest(f"{asked}; at most {most} ({flag})")

    def _options(self, request: GenerateRequest) -> tuple[PictureOptions, ClipOptions]:
        """Each as it is looked at here: the limit on frames is one of the options, and so in the content keys."""
        layer = request.media_options.over(self._layer)
        clip = layer.clip()
        return layer.picture(), replace(clip, sampling=clip.sampling.at_most(self._limits.max_clip_frames))

    def enter(self, items: Sequence[MediaItem]) -> Ticket:
        """A place in line for shares.

        Raises:
            Overloaded: the line is full.
        """
        return self._admission.enter(sum(_sent_bytes(item) for item in items))

    def re_enter(self, *, holds_prepared: bool) -> Ticket:
        """A place before the line, for a request that has begun once and perhaps holds some of its items, open."""
        return self._admission.re_enter(holds_prepared=holds_prepared)

    def holding(self) -> AbstractContextManager[Holding]:
        """While a request's encoded bytes are in use; they are counted."""
        return self._held.holding()

    async def read(self, request: GenerateRequest, ticket: Ticket, holding: Holding) -> tuple[ItemBytes, ...]:
        """The items' bytes, and who they are.

        Raises:
            MediaError: one cannot be had, or they have too many bytes; ``index`` names it.
            Overloaded: so many others fetch, or hold so much, that it cannot be fetched.
        """
        urls = {index: item.source for index, item in enumerate(request.media) if isinstance(item.source, Url)}
        fetched: dict[int, RawBytes] = {}
        if urls:
            fetched = await ticket.away(self._fetch(urls, holding))
        picture, clip = self._options(request)
        by_kind: dict[Modality, PictureOptions | ClipOptions] = {Modality.IMAGE: picture, Modality.VIDEO: clip}
        salt = request.cache.salt

        async def read(index: int, item: MediaItem) -> ItemBytes:
            source = fetched.get(index, item.source)
            found = await on_thread(self._threads, self._read, index, item, source, by_kind[item.modality], salt)
            if index not in fetched:
                holding.keep(index, len(found.data))
            return found

        return await _together([read(index, item) for index, item in enumerate(request.media)])

    async def _fetch(self, urls: Mapping[int, Url], holding: Holding) -> dict[int, RawBytes]:
        """A few at once, so that one request does not take everybody's turns."""
        fetcher = self._fetcher
        if fetcher is None:
            raise Internal("a URL passed the checks, and nothing fetches here")
        lane = asyncio.Semaphore(FETCHED_AT_ONCE)

        async def fetch(index: int, source: Url) -> RawBytes:
            return RawBytes(await fetcher.fetch(index, source.url, partial(holding.arrive, index), lane))

        found = await _together([fetch(index, source) for index, source in urls.items()])
        return dict(zip(urls, found, strict=True))

    def _read(
        self, index: int, item: MediaItem, source: MediaSource, options: PictureOptions | ClipOptions, salt: str
    ) -> ItemBytes:
        """Runs on a thread."""
        match source:
            case RawBytes(data):
                pass
            case DataUri(uri):
                data = decode_data_uri(index, uri, self._limits)
            case Url():
                raise Internal(f"media item {index}: a URL that was not fetched")
        check_item_bytes(index, len(data), self._limits)
        key = content_key(
            data, options=options.canonical(), fingerprint=self._processor.fingerprint, salt=salt, uuid=item.uuid
        )
        return ItemBytes(index, data, options, key)

    async def look(self, items: Sequence[ItemBytes]) -> tuple[Job, ...]:
        """What opening them will cost. Limits hold for all of them, whoever has opened them before.

        Raises:
            MediaError: one cannot be used, or they are over a limit; ``index`` names it.
        """
        budget = RequestBudget(self._limits)
        admitted = await on_thread(self._threads, _admit, items, budget)
        jobs: list[Job] = []
        for item in items:
            if isinstance(item.options, PictureOptions):
                jobs.append(PictureJob(item, item.options, admitted[item.index]))
                continue
            fit = self._processor.frame_fit(item.options)
            survey = await self._decoder.survey(item.index, item.data, item.options.sampling, fit)
            budget.take_pixels(item.index, survey.kept_pixels)
            budget.take_decoded(item.index, survey.decoded_pixels)
            jobs.append(ClipJob(item, item.options, survey))
        return tuple(jobs)

    def fewest_tokens(self, jobs: Sequence[Job]) -> int:
        """How many tokens their markers become at least, by their headers; exactly, where all are pictures."""
        return sum(map(self._fewest_tokens, jobs))

    def _fewest_tokens(self, job: Job) -> int:
        if isinstance(job, ClipJob):
            return self._processor.fewest_clip_tokens(job.survey)
        width, height = job.admitted.size
        return self._processor.picture_tokens(FrameSize(height, width), job.options)

    async def open(self, ticket: Ticket, jobs: Sequence[Job]) -> tuple[EncoderInput, ...]:
        """Each item as the tower reads it; the same one once.

        Raises:
            MediaError: one cannot be used; ``index`` names it.
        """
        weighed = 0
        while (weight := self._weight(jobs)) > weighed:  # again where something was forgotten meanwhile
            await ticket.weigh(weight)
            weighed = weight
        known = {key: found for key in {job.item.key for job in jobs} if (found := self._prepared.find(key))}
        clips = asyncio.Semaphore(ticket.shares or 1)  # each takes a worker for long, and others need some too

        async def opened(job: Job) -> EncoderInput:
            key = job.item.key
            if key in known:
                return known[key]
            if isinstance(job, PictureJob):
                return await self._prepared.get(job.item.index, key, partial(self._prepare_picture, job))
            async with clips:
                return await self._prepared.get(job.item.index, key, partial(self._prepare_clip, job))

        return await _together([opened(job) for job in jobs])

    def _weight(self, jobs: Sequence[Job]) -> int:
        """What is new in them, in shares. Nobody has what is known yet: who waits for shares holds nothing prepared."""
        new = {job.item.key: job.part(self._limits) for job in jobs if not self._prepared.has(job.item.key)}
        return math.ceil(sum(new.values()) * self._limits.media_preparation_limit)

    async def _prepare_picture(self, job: PictureJob) -> EncoderInput:
        index, data, key = job.item.index, job.item.data, job.item.key
        self._counts["image_loads"] += 1
        fit = self._processor.picture_fit(job.options)
        picture = await self._decoder.picture(index, data, job.admitted, job.options, fit)
        return await self._patch(lambda: self._processor.encoder_input(index, picture, key))

    async def _prepare_clip(self, job: ClipJob) -> EncoderInput:
        index, data, key = job.item.index, job.item.data, job.item.key
        self._counts["clip_loads"] += 1
        fit = self._processor.frame_fit(job.options)
        clip = await self._decoder.clip(index, data, job.options.sampling, fit)
        if math.prod(clip.frames.shape[:3]) > job.survey.kept_pixels:
            raise MediaUnavailable(index, "its decoder gave more than it had announced", Stage.DECODE)
        return await self._patch(lambda: self._processor.clip_input(index, clip, key))

    async def _patch(self, work: Callable[[], EncoderInput]) -> EncoderInput:
        self._counts["preprocess_calls"] += 1
        found = await on_thread(self._threads, work)
        self._alive.add(found.patches)
        return found

    async def on_thread(self, work: Callable[[], T]) -> T:
        """Do what comes after media are open, and is no work for the event loop."""
        return await on_thread(self._threads, work)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Every ledger's counts as of now."""
        ledgers: dict[str, dict[str, float]] = {
            "media_admission": asdict(self._admission.statistics()),
            "media_decoding": asdict(self._decoder.statistics()),
            "media_held": {"bytes": self._held.bytes},
            "media_prepared": self._alive.statistics(),
            "prepared_items": self._prepared.statistics(),
        }
        if self._fetcher is not None:
            ledgers["media_fetching"] = asdict(self._fetcher.statistics())
        return ledgers

    @property
    def counts(self) -> dict[str, float]:
        """How often the costly things were done."""
        return dict(self._counts)

    def hurry(self) -> None:
        """Nobody waits any more for what is being decoded, and nothing shall be: a long video ends at once."""
        self._decoder.hurry()

    async def close(self) -> None:
        """Wait for both pools, in whichever order they end; there must be no new work.

        Raises:
            Exception: the first thing that went wrong, once both have ended.
        """
        ends = await asyncio.gather(
            self._decoder.close(), asyncio.to_thread(self._threads.shutdown), return_exceptions=True
        )
        for end in ends:
            if isinstance(end, BaseException):
                raise end


def _admit(items: Sequence[ItemBytes], budget: RequestBudget) -> dict[int, Admitted]:
    """The headers of pictures, by the items' places in their request. Runs on a thread."""
    found: dict[int, Admitted] = {}
    for item in items:
        if isinstance(item.options, PictureOptions):
            admitted = admit_picture(item.index, item.data, budget)
            budget.take_pixels(item.index, max(0, (item.options.min_pixels or 0) - admitted.size.pixels))
            found[item.index] = admitted
    return found


def _sent_bytes(item: MediaItem) -> int:
    """What an item takes before it is read."""
    source = item.source
    match source:
        case Url():
            return 0
        case DataUri(uri):
            return len(uri)
    return len(source.data)


async def _together(work: Sequence[Coroutine[object, object, T]]) -> tuple[T, ...]:
    """The results of all, in order. One that fails ends the others, which are waited for."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
