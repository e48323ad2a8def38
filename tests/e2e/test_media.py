"""The corpus of media through an engine of its own process, over gRPC, while others are answered."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.checkpoints import write_checkpoint
from tests.contract.corpus_run import resident
from tests.contract.web import answer
from tests.corpus.make_clips import bad_clips, bad_sounds, good_clips, good_sounds
from tests.corpus.make_pictures import bad, good
from tests.drawings import shape_png
from tests.e2e.holdings import metrics
from tests.e2e.servers import Engine, engine_process
from tests.e2e.site import Site, site
from triptych.core.config import MIB
from triptych.core.errors import MediaError, MediaUnavailable, TriptychError, UnsupportedFeature
from triptych.core.events import Finished, Tokens
from triptych.core.media import MediaItem, Modality, RawBytes, Stage, Url
from triptych.core.media_options import ClipLayer, OptionLayer
from triptych.core.request import GenerateRequest, Sampling, Stopping
from triptych.wire.channel import EngineChannel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

PATIENCE = 30.0
"""Seconds after which an item that is refused is taken to hang; how long they take is printed."""
MARKERS = {Modality.IMAGE: "image", Modality.VIDEO: "video", Modality.AUDIO: "audio"}
HELD = (
    *("load_running_requests", "load_queued_requests", "load_used_blocks"),
    *("media_admission_shares_in_use", "media_admission_waiting", "media_admission_away", "media_admission_returning"),
    *("media_admission_weighing", "media_admission_orphaned", "media_admission_waiting_bytes", "media_held_bytes"),
    *("media_decoding_busy", "media_decoding_waiting", "media_decoding_bytes_held", "prepared_items_making"),
    *("media_fetching_hosts", "encoder_cache_held_bytes"),
)
RED = shape_png("circle", "red")
LARGE = shape_png("circle", "red", 4000)


@pytest.fixture(scope="module")
def slow() -> Iterator[Site]:
    """A server that has a picture, a hundred bytes at a time."""
    with site() as here:
        here.pages["/red"], here.pauses["/red"] = answer(RED + bytes(1000)), 0.05
        yield here


@pytest.fixture(scope="module")
def engine(slow: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A random checkpoint that reads pictures and videos, also from this machine."""
    directory = write_checkpoint("vl-plain", tmp_path_factory.mktemp("model"), videos=True)
    flags = ("--max-loras", "0", "--no-kv-events", "--kv-cache-bytes", "64MiB", "--served-name", "demo")
    fetching = ("--fetch-private-networks", "--fetch-ports", str(slow.port))
    with engine_process(str(directory), *flags, *fetching, "--metrics", "127.0.0.1:0") as started:
        yield started


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[Client]:
    client = Client(engine)
    yield client
    await client.close()


def children(pid: int) -> list[int]:
    """Of a process, whichever of its threads has started them."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for one in lists for word in one.read_text().split()]


class Client:
    """Asks one engine; counts its requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._channel = EngineChannel(engine.address)
        self._count = 0

    async def ask(self, *items: MediaItem, tokens: int = 2, name: str | None = None) -> list[int]:
        """Its answer's tokens. Four frames are looked at of each video."""
        self._count += 1
        prompt = "".join(f"<|vision_start|><|{MARKERS[one.modality]}_pad|><|vision_end|>" for one in items)
        request = GenerateRequest(
            name or f"{id(self)} {self._count}",
            "demo",
            prompt + "what is it?",
            media=items,
            sampling=Sampling(temperature=0),
            stopping=Stopping(max_tokens=tokens, ignore_eos=True),
            media_options=OptionLayer(video=ClipLayer(num_frames=4)),
        )
        answer = await self._channel.generate(request)
        found: list[int] = []
        try:
            async for event in answer:
                if isinstance(event, Tokens):
                    found += event.token_ids
                assert not isinstance(event, Finished) or len(found) == tokens
        finally:
            await answer.aclose()
        return found

    async def refusal(self, item: MediaItem) -> TriptychError:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(TriptychError) as caught:
                await self.ask(item)
        return caught.value

    async def said(self, item: MediaItem) -> str:
        """How many tokens came, or why none did."""
        try:
            return f"{len(await self.ask(item))} tokens"
        except TriptychError as error:
            return str(error)

    async def health(self) -> None:
        await self._channel.health()

    async def abort(self, name: str) -> None:
        with suppress(TriptychError):
            await self._channel.abort(name)

    async def idle(self) -> None:
        """Until nobody has anything any more."""
        async with asyncio.timeout(30):
            while await self.held():
                await asyncio.sleep(0.05)

    async def metric(self, name: str) -> float:
        return (await metrics(self.engine))[name]

    async def held(self) -> dict[str, float]:
        numbers = await metrics(self.engine)
        return {name: numbers[name] for name in HELD if numbers[name]}

    async def close(self) -> None:
        await self._channel.close()


def of(data: bytes, modality: Modality = Modality.IMAGE) -> MediaItem:
    return MediaItem(modality, RawBytes(data))


class Others:
    """A client who asks the same thing again and again, and looks after the engine's health."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.answers: list[list[int]] = []
        self.answer_seconds: list[float] = []
        self.check_seconds: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def _ask(self) -> None:
        while True:
            begun = time.monotonic()
            self.answers.append(await self._client.ask(of(RED)))
            self.answer_seconds.append(time.monotonic() - begun)

    async def _look(self) -> None:
        while True:
            begun = time.monotonic()
            await self._client.health()
            self.check_seconds.append(time.monotonic() - begun)
            await asyncio.sleep(0.02)

    def said(self) -> str:
        asked, looked = self.answer_seconds, self.check_seconds
        return (
            f"meanwhile {len(asked)} answers to others, the slowest after {max(asked):.2f} s, and {len(looked)} of "
            f"Health, the slowest after {max(looked):.2f} s"
        )

    async def __aenter__(self) -> Others:
        self._tasks = [asyncio.create_task(self._ask()), asyncio.create_task(self._look())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            assert not task.done() or task.exception() is None, task.exception()
            task.cancel()
        await asyncio.wait(self._tasks)
        assert min(len(self.answers), len(self.check_seconds)) > 3
        assert all(answer == self.answers[0] for answer in self.answers)


async def test_hostile_media_fail_by_themselves_and_in_time_while_others_are_answered(
    client: Client, measured: Callable[[str], None]
) -> None:
    refused: dict[str, float] = {}
    before = resident(client.engine.process.pid, "VmRSS")
    peak = 0

    def look() -> None:
        nonlocal peak
        for pid in children(client.engine.process.pid):
            with suppress(OSError):
                peak = max(peak, resident(pid, "VmHWM"))

    async with Others(client) as others:
        for name, case in bad().items():
            begun = time.monotonic()
            error = await client.refusal(of(case.data))
            refused[name] = time.monotonic() - begun
            assert type(error) is MediaError, name
            assert (error.index, error.stage, error.retryable) == (0, case.stage, False), name
            assert case.words in error.reason, name
            look()
        for name, (data, _) in bad_clips().items():
            begun = time.monotonic()
            error = await client.refusal(of(data, Modality.VIDEO))
            refused[name] = time.monotonic() - begun
            assert type(error) is MediaError, f"{name}: {error!r}"
            assert (error.index, error.retryable) == (0, False), name
            look()
        for name, (data, *_) in {**bad_sounds(), **good_sounds()}.items():
            error = await client.refusal(of(data, Modality.AUDIO))
            assert isinstance(error, UnsupportedFeature), name
            assert not error.retryable
    await client.idle()
    grown = resident(client.engine.process.pid, "VmHWM") - before
    worst = max(refused, key=refused.__getitem__)
    measured(
        f"{len(refused)} hostile pictures and videos through an engine: slowest {refused[worst]:.2f} s "
        f"({worst}); the engine grew by {grown // MIB} MiB at most, a decoding process had {peak // MIB} MiB; "
        f"{others.said()}"
    )
    assert len(others.answers) > len(refused)  # a client who asks one thing after the other is answered as often
    assert grown < 512 * MIB
    assert peak < 1024 * MIB


async def test_good_media_are_answered(client: Client) -> None:
    for name, case in good().items():
        said = await client.said(of(case.data))
        # Some are too narrow for the model, or too long for its window.
        assert said == "2 tokens" or "too narrow" in said or "context window" in said, f"{name}: {said}"
    for name, (data, _) in good_clips().items():
        assert len(await client.ask(of(data, Modality.VIDEO))) == 2, name
    await client.idle()


async def test_sound_is_refused_by_name(client: Client) -> None:
    data = next(iter(good_sounds().values()))[0]
    error = await client.refusal(of(data, Modality.AUDIO))
    assert isinstance(error, UnsupportedFeature)
    assert "media item 0: preprocess: audio is not accepted here" in str(error)


async def test_a_decoding_process_that_is_killed_fails_its_own_picture(client: Client) -> None:
    expected = await client.ask(of(RED))
    pid = client.engine.process.pid
    for _ in range(10):
        large = asyncio.create_task(client.ask(of(LARGE + os.urandom(8))))
        while not (await metrics(client.engine))["media_decoding_busy"] and not large.done():
            await asyncio.sleep(0.001)
        for child in children(pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        (failure,) = await asyncio.gather(large, return_exceptions=True)
        if isinstance(failure, MediaUnavailable):
            break
    assert isinstance(failure, MediaUnavailable), failure
    assert failure.retryable
    assert failure.stage is Stage.DECODE
    for data in (RED + os.urandom(8), RED):
        assert await client.ask(of(data)) == expected
    await client.idle()


async def cancel_many(client: Client, slow: Site, count: int) -> None:
    """Pictures, videos and slow URLs, of which so many are given up somewhere on their way."""
    dice = random.Random(count)
    clip = good_clips()["growing"][0]
    expected = await client.ask(of(RED))
    fetches = await client.metric("media_fetching_items"), await client.metric("media_fetching_fetched")

    async def one(number: int) -> None:
        salt = os.urandom(4)
        kinds = [
            of(RED + salt),
            of(LARGE + salt),
            of(clip + salt, Modality.VIDEO),
            MediaItem(Modality.IMAGE, Url(slow.url(f"/red?{salt.hex()}"))),
            of(b"no picture"),
        ]
        items = [dice.choices(kinds, (6, 2, 2, 3, 1))[0] for _ in range(dice.randrange(1, 5))]
        await asyncio.sleep(dice.random() * count / 100)
        name = f"cancelled {count} {number}"
        task = asyncio.create_task(client.ask(*items, name=name))
        if number < count:
            await asyncio.sleep(dice.random() * 0.3)
            if dice.random() < 0.5:
                await client.abort(name)
            else:
                task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(one(number) for number in range(count * 5 // 4)))
    await client.idle()
    assert await client.ask(of(RED)) == expected
    begun, ended = await client.metric("media_fetching_items"), await client.metric("media_fetching_fetched")
    assert 0 < ended - fetches[1] < begun - fetches[0]  # some were given up on their way


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def test_requests_given_up_on_their_way_leave_nothing(client: Client, slow: Site) -> None:
    await cancel_many(client, slow, 100)


@pytest.mark.slow
async def test_a_thousand_requests_given_up_on_their_way_leave_nothing(
    client: Client, slow: Site, measured: Callable[[str], None]
) -> None:
    pid = client.engine.process.pid
    await cancel_many(client, slow, 200)
    before, open_before, processes = resident(pid, "VmRSS"), descriptors(pid), len(children(pid))
    await cancel_many(client, slow, 1000)
    grown, opened = resident(pid, "VmRSS") - before, descriptors(pid) - open_before
    measured(f"1,000 requests given up: the engine grew by {grown // MIB} MiB and {opened} descriptors")
    assert len(children(pid)) == processes
    assert opened < 40
    assert grown < 256 * MIB


def test_the_end_waits_for_no_picture_and_leaves_no_process(tmp_path: Path) -> None:
    directory = write_checkpoint("vl-plain", tmp_path, videos=True)
    with engine_process(str(directory), "--served-name", "demo", "--metrics", "127.0.0.1:0") as started:
        pid = started.process.pid
        decoding = children(pid)
        assert decoding

        async def ask_and_stop() -> None:
            client = Client(started)
            asks = [asyncio.create_task(client.ask(of(LARGE + os.urandom(8)))) for _ in range(12)]
            await asyncio.sleep(0.3)
            started.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*asks, return_exceptions=True)
            await client.close()

        asyncio.run(ask_and_stop())
        assert started.process.wait(40) == 0
        for child in decoding:
            assert not Path(f"/proc/{child}").exists()
