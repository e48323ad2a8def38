"""Media of requests through all of their preparation: what is done once, who waits for whom, and what is left."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter, defaultdict
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.corpus.make_clips import good_clips
from tests.decoding_here import InProcess
from tests.drawings import shape_png
from tests.roles.encoder_asks import ready_of
from tests.roles.fake_engine import FakeEngine, fake_encoder, fake_role, frontend, video_processor
from triptych.core.errors import (
    Cancelled,
    Draining,
    InvalidRequest,
    MediaError,
    MediaUnavailable,
    Overloaded,
    TriptychError,
)
from triptych.core.media import MediaItem, Modality, RawBytes, Stage, Url
from triptych.core.media_options import ClipLayer, OptionLayer, PictureLayer
from triptych.core.request import CacheOptions, EncodeOptions, GenerateRequest
from triptych.media.fetch import FetchStatistics
from triptych.media.workers import MediaPool
from triptych.roles.media_intake import MediaIntake

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from triptych.core.clip import ClipSurvey, FrameFit, FrameSampling
    from triptych.core.config import MediaLimits
    from triptych.core.encoder_input import EncoderInput
    from triptych.core.media import Picture
    from triptych.core.media_options import PictureOptions
    from triptych.core.picture_fit import PictureFit
    from triptych.media.admission import Ticket
    from triptych.media.decode import Admitted
    from triptych.roles.desk import Desk

RED, BLUE = shape_png("circle", "red"), shape_png("square", "blue")
HUGE = shape_png("circle", "red", 1500)


class Gated(InProcess):
    """Decodes pictures of one size when the test says so."""

    def __init__(self, limits: MediaLimits) -> None:
        super().__init__(limits)
        self.gate = threading.Event()

    def hurry(self) -> None:
        super().hurry()
        self.gate.set()

    def picture(
        self, index: int, data: bytes, admitted: Admitted, options: PictureOptions, fit: PictureFit | None = None
    ) -> Picture:
        if data == HUGE:
            assert self.gate.wait(30)
            self._check_open(index)
        return super().picture(index, data, admitted, options, fit)


class Servers:
    """Stand for all servers: some hang, some are slow, some give nothing."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.open = 0

    async def fetch(self, index: int, url: str, count: Callable[[int], None], lane: asyncio.Semaphore) -> bytes:
        self.open += 1
        try:
            if "drip" in url:
                count(len(RED))
            if "hang" in url or "drip" in url:
                await asyncio.Event().wait()
            if "slow" in url:
                await asyncio.sleep(random.random() / 50)
            if "none" in url:
                raise MediaError(index, "404", Stage.FETCH)
            count(len(RED))
            return RED
        finally:
            self.open -= 1

    def statistics(self) -> FetchStatistics:
        return FetchStatistics(0, 0, 0, 0, 0, 0, 0, self.open)


async def opened(intake: MediaIntake, request: GenerateRequest, ticket: Ticket) -> tuple[EncoderInput, ...]:
    """The items, as an engine opens them."""
    with intake.holding() as holding:
        items = await intake.read(request, ticket, holding)
        return await intake.open(ticket, await intake.look(items))


class Bench:
    """One engine's media intake."""

    def __init__(self, server: OptionLayer | None = None, workers: int = 2, **limits: int) -> None:
        front = frontend()
        self.limits = replace(front.limits, **limits)
        self.workers = [Gated(self.limits) for _ in range(workers)]
        self.servers = Servers()
        pool = MediaPool(self.workers, 1024)
        front = replace(front, limits=self.limits)
        self.intake = MediaIntake(front, pool, self.servers, server or OptionLayer())

    def begin(self, request: GenerateRequest) -> tuple[Ticket, asyncio.Task[tuple[EncoderInput, ...]]]:
        self.intake.check(request)
        ticket = self.intake.enter(request.media)
        return ticket, asyncio.create_task(ticket.run(opened(self.intake, request, ticket)))

    async def prepare(self, request: GenerateRequest) -> tuple[EncoderInput, ...]:
        return await self.begin(request)[1]

    def counted(self) -> tuple[float, float, float]:
        """Pictures and clips decoded, items patched."""
        counts = self.intake.counts
        return counts["image_loads"], counts["clip_loads"], counts["preprocess_calls"]

    def held(self) -> dict[str, float]:
        """What somebody has now, or waits for."""
        ledgers = self.intake.statistics()
        admission, decoding = ledgers["media_admission"], ledgers["media_decoding"]
        return {
            **{what: admission[what] for what in ("shares_in_use", "orphaned", "waiting", "weighing", "away")},
            **{what: admission[what] for what in ("returning", "waiting_bytes")},
            **{what: decoding[what] for what in ("busy", "waiting", "bytes_held")},
            "bytes": ledgers["media_held"]["bytes"],
            "making": ledgers["prepared_items"]["making"],
            "fetching": ledgers["media_fetching"]["hosts"],
        }

    async def idle(self) -> None:
        async with asyncio.timeout(20):
            while any(self.held().values()):
                await asyncio.sleep(0.001)


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def build(**how: object) -> Bench:
        benches.append(Bench(**how))  # type: ignore[arg-type]
        return benches[-1]

    yield build
    for bench in benches:
        for worker in bench.workers:
            worker.gate.set()
        await bench.idle()
        await bench.intake.close()


def of(*sources: bytes | str, **changes: object) -> GenerateRequest:
    """Pictures, by their bytes or from where they are."""
    media = tuple(MediaItem(Modality.IMAGE, RawBytes(one) if isinstance(one, bytes) else Url(one)) for one in sources)
    return replace(GenerateRequest("r", "demo", "x", media=media), **changes)


async def test_what_comes_again_is_neither_decoded_nor_patched(make: Callable[..., Bench]) -> None:
    bench = make()
    (first,) = await bench.prepare(of(RED))
    (second,) = await bench.prepare(of("http://a.example/red"))
    assert second is first
    assert bench.counted() == (1, 0, 1)
    red, again, blue = await bench.prepare(of(RED, RED, BLUE))
    assert red is again is first
    assert blue is not first
    assert bench.counted() == (2, 0, 2)
    assert bench.intake.statistics()["prepared_items"]["hits"] == 2


async def test_what_differs_in_anything_is_prepared_for_itself(make: Callable[..., Bench]) -> None:
    bench = make()
    named = replace(of(RED).media[0], uuid="mine")
    requests = [
        of(RED),
        of(RED, cache=CacheOptions(salt="tenant")),
        replace(of(RED), media=(named,)),
        of(RED, media_options=OptionLayer(image=PictureLayer(background=(0, 0, 0)))),
        of(RED, media_options=OptionLayer(image=PictureLayer(max_pixels=64 * 64))),
    ]
    keys = {(await bench.prepare(request))[0].layout.content_key for request in requests}
    assert len(keys) == len(requests)
    assert bench.counted() == (len(requests), 0, len(requests))


async def test_a_video_of_which_less_is_looked_at_is_another(make: Callable[..., Bench]) -> None:
    def of_video(**video: int) -> GenerateRequest:
        media = (MediaItem(Modality.VIDEO, RawBytes(b"frames")),)
        return replace(of(), media=media, media_options=OptionLayer(video=ClipLayer(**video)))

    async def key(bench: Bench, request: GenerateRequest) -> bytes:
        ticket = bench.intake.enter(request.media)
        with bench.intake.holding() as holding:
            (item,) = await ticket.run(bench.intake.read(request, ticket, holding))
        return item.key

    few, more = make(max_clip_frames=4), make(max_clip_frames=8)
    assert await key(few, of_video()) != await key(more, of_video())
    assert await key(few, of_video()) == await key(more, of_video(max_frames=4))
    assert await key(few, of_video(max_frames=2)) == await key(more, of_video(max_frames=2))
    few.intake.check(of_video(num_frames=4))
    with pytest.raises(InvalidRequest, match=r"num_frames is 5; at most 4 \(--max-clip-frames\)"):
        few.intake.check(of_video(num_frames=5))


async def test_a_video_that_comes_to_more_than_was_announced_is_not_taken(tmp_path: Path) -> None:
    class Lying(InProcess):
        """As a process that a file has taken over: it weighs little, and is large."""

        def survey(self, index: int, data: bytes, sampling: FrameSampling, fit: FrameFit | None) -> ClipSurvey:
            return super().survey(index, data, sampling, fit)._replace(kept_pixels=1)

    front = replace(frontend(), processor=video_processor(tmp_path))
    media = (MediaItem(Modality.VIDEO, RawBytes(good_clips()["growing"][0])),)

    async def open_with(worker: InProcess) -> int:
        intake = MediaIntake(front, MediaPool([worker], 1024), None, OptionLayer())
        request = replace(of(), media=media)
        ticket = intake.enter(request.media)
        try:
            return len(await ticket.run(opened(intake, request, ticket)))
        finally:
            await intake.close()

    assert await open_with(InProcess(front.limits)) == 1
    with pytest.raises(MediaUnavailable, match="media item 0: decode: its decoder gave more than it had announced"):
        await open_with(Lying(front.limits))


async def test_without_a_memory_it_is_prepared_each_time_and_once_at_a_time(make: Callable[..., Bench]) -> None:
    bench = make(prepared_cache_bytes=1, workers=4)
    for _ in range(2):
        await bench.prepare(of(RED))
    assert bench.counted() == (2, 0, 2)
    running = [bench.begin(of(HUGE)) for _ in range(3)]
    async with asyncio.timeout(20):
        while bench.held()["busy"] < 1 or bench.intake.statistics()["prepared_items"]["joined"] < 2:
            await asyncio.sleep(0.001)
    for worker in bench.workers:
        worker.gate.set()
    one, *others = [await task for _, task in running]
    assert all(other[0] is one[0] for other in others)
    assert bench.counted() == (3, 0, 3)


async def test_the_request_over_the_server_over_the_model(make: Callable[..., Bench]) -> None:
    bench = make(server=OptionLayer(image=PictureLayer(max_pixels=64 * 64)))
    for worker in bench.workers:
        worker.gate.set()
    (small,) = await bench.prepare(of(HUGE))
    assert small.layout.encoder_tokens == (64 // 16) ** 2
    asked = OptionLayer(image=PictureLayer(max_pixels=96 * 96))
    (larger,) = await bench.prepare(of(HUGE, media_options=asked))
    assert larger.layout.encoder_tokens == (96 // 16) ** 2


@pytest.mark.parametrize(
    ("layer", "flag"),
    [(PictureLayer(max_pixels=10**9), "--max-item-pixels"), (PictureLayer(min_pixels=10**9), "--max-item-pixels")],
)
async def test_options_beyond_the_limits_are_refused_where_they_are_set(layer: PictureLayer, flag: str) -> None:
    with pytest.raises(InvalidRequest, match=flag):
        Bench(server=OptionLayer(image=layer))
    bench = Bench()
    with pytest.raises(InvalidRequest, match=flag):
        bench.begin(of(RED, media_options=OptionLayer(image=layer)))
    await bench.intake.close()


async def test_slow_servers_stop_nobody_else(make: Callable[..., Bench]) -> None:
    most = 80
    bench = make(max_waiting_preparations=most)
    slow = [bench.begin(of("http://hang.example/")) for _ in range(most)]
    assert len(await bench.prepare(of(RED))) == 1
    held = bench.held()
    assert (held["away"], held["shares_in_use"]) == (most, 0)
    with pytest.raises(Overloaded, match=f"{most} requests already wait for media from others"):
        await bench.prepare(of("http://hang.example/"))
    for ticket, task in slow:
        ticket.give_up()
        with pytest.raises(Cancelled):
            await task


async def test_what_drips_in_counts_before_it_is_whole(make: Callable[..., Bench]) -> None:
    fits = 3
    bench = make(max_waiting_bytes=fits * len(RED))
    slow = [bench.begin(of("http://drip.example/")) for _ in range(fits)]
    async with asyncio.timeout(20):
        while bench.held()["bytes"] < fits * len(RED):
            await asyncio.sleep(0.001)
    with pytest.raises(Overloaded, match=f"media item 0: fetch: {fits * len(RED)} bytes of media are held already"):
        await bench.prepare(of("http://a.example/red"))
    assert len(await bench.prepare(of(RED))) == 1  # it brings its own, and there are shares
    for ticket, _ in slow:
        ticket.give_up()
    await asyncio.gather(*(task for _, task in slow), return_exceptions=True)
    assert len(await bench.prepare(of("http://a.example/red"))) == 1


async def test_a_thumbnail_passes_what_is_huge(make: Callable[..., Bench]) -> None:
    bench = make(workers=4, max_item_pixels=1500 * 1500)
    salted = [of(HUGE, cache=CacheOptions(salt=f"{number}")) for number in range(5)]
    huge = [bench.begin(request) for request in salted]
    async with asyncio.timeout(20):
        while not bench.held()["busy"] or bench.held()["weighing"] + bench.held()["waiting"] < 4:
            await asyncio.sleep(0.001)
        for number in range(10):
            await bench.prepare(of(RED, cache=CacheOptions(salt=f"{number}")))
        assert not any(task.done() for _, task in huge)
        for worker in bench.workers:
            worker.gate.set()
        for _, task in huge:
            await task


async def test_work_that_cannot_be_stopped_keeps_its_shares(make: Callable[..., Bench]) -> None:
    bench = make()
    ticket, task = bench.begin(of(HUGE))
    async with asyncio.timeout(20):
        while not bench.held()["busy"]:
            await asyncio.sleep(0.001)
    ticket.give_up()
    await asyncio.sleep(0.01)
    assert (bench.held()["orphaned"], bench.held()["busy"], task.done()) == (1, 1, False)
    for worker in bench.workers:
        worker.gate.set()
    with pytest.raises(Cancelled):
        await task
    assert not any(bench.held().values())


NUMBER: ContextVar[int] = ContextVar("number", default=-1)
"""Of the request whose work it is."""


class Watch:
    """Knows what the work of each request is at, and says so when it begins."""

    def __init__(self, bench: Bench) -> None:
        self.at: dict[int, list[str]] = defaultdict(list)
        self.tell: dict[tuple[int, str], Callable[[], object]] = {}
        """By the request's number and the stage."""
        intake = bench.intake
        for owner, name, stage in (
            (bench.servers, "fetch", "fetch"),
            (intake._decoder, "picture", "decode"),
            (intake, "_patch", "preprocess"),
        ):
            setattr(owner, name, self._watched(stage, getattr(owner, name)))

    def _watched(self, stage: str, work: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def doing(*how: object) -> object:
            number = NUMBER.get()
            self.at[number].append(stage)
            if tell := self.tell.pop((number, stage), None):
                tell()
            try:
                return await work(*how)
            finally:
                self.at[number].remove(stage)

        return doing


async def test_a_thousand_requests_given_up_at_any_point_leave_nothing(make: Callable[..., Bench]) -> None:
    dice = random.Random(6)
    bench = make(workers=3, max_waiting_preparations=3000, prepared_cache_bytes=20_000)
    for worker in bench.workers:
        worker.gate.set()
    watch, loop = Watch(bench), asyncio.get_running_loop()
    pictures = [
        shape_png(shape, colour, size)
        for shape in ("circle", "square")
        for colour in ("red", "blue")
        for size in (40, 97, 300)
    ]
    urls = ["http://slow.example/", "http://none.example/", "http://hang.example/", "http://fast.example/"]
    ends: Counter[str] = Counter()
    given_up: Counter[str] = Counter()

    async def one(number: int) -> None:
        sources = [dice.choice([*pictures, *urls, b"no picture"]) for _ in range(dice.randrange(1, 4))]
        hangs = any(isinstance(source, str) and "hang" in source for source in sources)
        await asyncio.sleep(dice.random() * 2)
        NUMBER.set(number)
        ticket, task = bench.begin(of(*sources, cache=CacheOptions(salt=f"{number}")))

        def give_up() -> None:
            if not task.done():
                given_up.update(set(watch.at[number]) or {"between"})
                given_up["requests"] += 1
            if dice.random() < 0.5:
                ticket.give_up()
            else:
                task.cancel()

        stage = "fetch" if hangs else dice.choice(["line", "fetch", "decode", "preprocess", "never"])
        if stage == "line":
            loop.call_later(dice.random() / 100, give_up)
        else:
            watch.tell[number, stage] = lambda: loop.call_later(dice.random() / 500, give_up)
        try:
            await task
            ends["done"] += 1
        except asyncio.CancelledError:
            ends["cancelled"] += 1
        except TriptychError as error:
            ends[type(error).__name__] += 1

    async with asyncio.timeout(100):
        await asyncio.gather(*(one(number) for number in range(2500)))
    await bench.idle()
    assert given_up["requests"] >= 1000, given_up
    assert min(given_up[stage] for stage in ("fetch", "decode", "preprocess", "between")) >= 50, given_up
    assert sum(ends.values()) == 2500
    assert min(ends["done"], ends["cancelled"], ends["Cancelled"], ends["MediaError"]) > 20, ends
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@pytest.mark.parametrize("first", ["decoder", "threads"])
async def test_both_pools_end_in_either_order_and_the_first_error_is_heard(first: str) -> None:
    bench = Bench()
    ended: list[str] = []
    decoder, threads = bench.intake._decoder, bench.intake._threads
    close, shutdown = decoder.close, threads.shutdown

    async def slow_close() -> None:
        while first == "threads" and "threads" not in ended:
            await asyncio.sleep(0.001)
        await close()
        ended.append("decoder")
        raise OSError("the decoder ended badly")

    def slow_shutdown(*, wait: bool = True) -> None:
        while first == "decoder" and "decoder" not in ended:
            threading.Event().wait(0.001)
        shutdown(wait=wait)
        ended.append("threads")

    decoder.close = slow_close  # type: ignore[method-assign]
    threads.shutdown = slow_shutdown  # type: ignore[method-assign,assignment]
    with pytest.raises(OSError, match="ended badly"):
        await bench.intake.close()
    assert sorted(ended) == ["decoder", "threads"]
    assert ended[0] == first


@pytest.mark.parametrize("role", [fake_role, fake_encoder])
@pytest.mark.parametrize("left", [False, True])
async def test_the_end_does_not_wait_for_what_nobody_will_have(role: Callable[..., Desk], *, left: bool) -> None:
    engine = FakeEngine()
    desk = role(engine)
    (worker,) = workers = [Gated(frontend().limits)]
    pool = MediaPool(workers, 1024)
    media = desk._intake.media
    assert media is not None
    await media._decoder.close()
    media._decoder = pool
    prompt = "<|vision_start|><|image_pad|><|vision_end|>"
    encode = EncodeOptions() if role is fake_encoder else None
    answer = await desk.accept(replace(of(HUGE), prompt=prompt, encode=encode))
    async with asyncio.timeout(20):
        while not pool.statistics().busy:
            await asyncio.sleep(0.001)
        if left:
            await answer.aclose()
        await desk.drain(20 if left else 0.01)
    assert worker.gate.is_set()
    if not left:
        (event,) = [event async for event in answer]
        assert isinstance(event.error, Draining)
        await answer.aclose()


async def test_limits_hold_for_what_an_encoder_knows() -> None:
    engine = FakeEngine()
    pixels = 1500 * 1500
    limits = replace(frontend().limits, max_request_pixels=2 * pixels)
    role = fake_encoder(engine, limits=limits)
    pictures = [shape_png("circle", colour, 1500) for colour in ("red", "blue", "green")]
    marker = "<|vision_start|><|image_pad|><|vision_end|>"

    def ask(*sources: bytes) -> GenerateRequest:
        return replace(of(*sources), prompt=marker * len(sources), encode=EncodeOptions())

    for group, one in enumerate(pictures):
        answer = await role.accept(ask(one))
        async with asyncio.timeout(20):
            while len(engine.submitted) <= group:
                await asyncio.sleep(0.001)
        engine.encoded()
        await ready_of(answer)
        await answer.aclose()
    answer = await role.accept(ask(*pictures))
    (event,) = [event async for event in answer]
    assert "--max-request-pixels" in str(event.error)
    await answer.aclose()
    await role.drain(0)
