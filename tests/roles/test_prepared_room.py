"""What is prepared and has no answer yet: how much of it there may be, who waits for it, and that nothing keeps it."""

from __future__ import annotations

import asyncio
import gc
import io
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from PIL import Image

from tests.corpus.make_clips import good_clips
from tests.corpus.pictures import pictures
from tests.decoding_here import InProcess
from tests.drawings import shape_png
from tests.roles.encoder_asks import MARKER, PICTURES, ask, ready_of, rest, submitted, turns
from tests.roles.encoder_engine import load_tower, running_encoder
from tests.roles.fake_engine import FakeEngine, fake_encoder, fake_role, frontend, video_processor
from tests.roles.pair import begin, load_models, running_pair
from tests.roles.running import ask as ask_engine
from tests.roles.running import load_model, options, running
from triptych.cli.flags import DEMO, model_directory
from triptych.cli.loaded import LoadedModel, LoadedTower
from triptych.core.config import MediaLimits
from triptych.core.errors import MediaError, Overloaded, PromptTooLong
from triptych.core.events import Failed, Finished
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.media_options import ClipLayer, OptionLayer, PictureLayer
from triptych.core.request import EncodeOptions, GenerateRequest, Stopping
from triptych.media.workers import MediaPool
from triptych.roles import live
from triptych.roles.adapters import Adapters
from triptych.roles.intake import Intake
from triptych.roles.media_intake import MediaIntake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from triptych.core.clip import Clip, FrameFit, FrameSampling
    from triptych.media.admission import Ticket
    from triptych.roles.desk import Desk

ROW_BYTES = 4 * 3 * 16 * 16
"""Of what one row of the demo model's pictures is computed from."""
SIDE = 512
SIZE = (SIDE // 32) ** 2 * ROW_BYTES
"""Bytes of a prepared picture of so many pixels each way."""
NARROW = io.BytesIO()
Image.new("RGB", (1000, 1)).save(NARROW, "PNG")
"""Too narrow for the model."""


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What is kept by nobody must go by itself: a collector comes when it likes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def one_of(number: int, side: int = SIDE) -> MediaItem:
    """All different."""
    return MediaItem(Modality.IMAGE, RawBytes(shape_png("circle", f"#{number:06x}", side)), uuid=f"{number}")


def large(number: int, **changes: Any) -> GenerateRequest:
    """A request with a picture of its own."""
    plain = GenerateRequest(f"{number}", "demo", MARKER, media=(one_of(number),))
    return replace(plain, media_options=OptionLayer(image=PictureLayer(max_pixels=SIDE**2)), **changes)


def alive(role: Desk | MediaIntake) -> float:
    return role.statistics()["media_prepared"]["bytes"]


async def until(role: Desk | MediaIntake, most: float = 0) -> None:
    """No more is alive; else it stays."""
    async with asyncio.timeout(20):
        while alive(role) > most:
            await asyncio.sleep(0.001)


async def test_what_waits_in_the_engine_is_bounded_in_bytes_and_all_are_answered() -> None:
    count, fit, shares = 12, 3, 2
    engine = FakeEngine()
    limits = MediaLimits(max_prepared_bytes=fit * SIZE, prepared_cache_bytes=1, media_preparation_limit=shares)
    role = fake_role(engine, limits=limits)
    answers = [await role.accept(large(number)) for number in range(count)]
    most = 0.0
    async with asyncio.timeout(20):
        while alive(role) <= fit * SIZE or role.statistics()["media_admission"]["shares_in_use"]:
            await asyncio.sleep(0.001)
            most = max(most, alive(role))
    await turns(100)  # the engine computes nothing, and nobody begins
    assert fit * SIZE < most <= (fit + shares) * SIZE
    assert fit < len(engine.submitted) <= fit + shares
    assert role.statistics()["media_admission"]["waiting"] == count - len(engine.submitted)

    async def end(answer: Any) -> bool:
        *_, last = [event async for event in answer]
        await answer.aclose()
        return isinstance(last, Finished)

    ends = [asyncio.create_task(end(answer)) for answer in answers]
    for _ in range(count):
        await submitted(engine)
        engine.answer()
        engine.submitted.pop(0)
        most = max(most, alive(role))
    assert all(await asyncio.gather(*ends))
    assert most <= (fit + shares) * SIZE
    await until(role)
    assert role.statistics()["media_prepared"] == {"bytes": 0, "arrays": 0}
    await role.drain(0)


async def test_who_waits_too_long_for_less_is_refused_and_told_why() -> None:
    engine = FakeEngine()
    limits = MediaLimits(max_prepared_bytes=1, prepared_cache_bytes=1, max_waiting_seconds=0.05)
    role = fake_role(engine, limits=limits)
    first = await role.accept(large(1))
    await submitted(engine)
    late = await role.accept(large(2))
    (event,) = await rest(late)
    assert isinstance(event, Failed)
    assert isinstance(event.error, Overloaded)
    for words in (f"take {SIZE} bytes; at most 1 (--max-prepared-bytes)", "--max-waiting-seconds", "retry later"):
        assert words in str(event.error)
    engine.answer()
    engine.submitted.clear()
    for answer in (first, late):
        await answer.aclose()
    await until(role)
    again = await role.accept(large(3))
    await submitted(engine)
    engine.answer()
    engine.submitted.clear()
    await again.aclose()
    await role.drain(0)


async def test_who_leaves_while_it_waits_leaves_nothing() -> None:
    engine = FakeEngine()
    role = fake_role(engine, limits=MediaLimits(max_prepared_bytes=1, prepared_cache_bytes=1))
    first = await role.accept(large(1))
    await submitted(engine)
    for end in (role.abort, None):
        waiting = await role.accept(large(2))
        await turns()
        assert role.statistics()["media_admission"]["waiting"] == 1
        if end is not None:
            await end("2")
        await waiting.aclose()
        assert role.statistics()["media_admission"]["waiting"] == 0
    engine.submitted.clear()
    await first.aclose()
    await until(role)
    await role.drain(0)


async def test_what_is_kept_holds_nobody_up() -> None:
    engine = FakeEngine()
    role = fake_role(engine, limits=MediaLimits(max_prepared_bytes=1, prepared_cache_bytes=2 * SIZE))
    for number in range(5):
        answer = await role.accept(large(number))
        await submitted(engine)
        engine.answer()
        engine.submitted.clear()
        await answer.aclose()
    assert SIZE <= alive(role) <= 2 * SIZE
    assert role.statistics()["prepared_items"]["evicted"] >= 3
    await role.drain(0)


async def test_who_weighs_holds_nothing_that_others_wait_for() -> None:
    """What it knew, and nobody keeps any more when its turn comes, is prepared once more, and weighed."""
    front = frontend()
    limits = replace(
        front.limits, max_item_pixels=2 * SIDE**2, max_prepared_bytes=1, prepared_cache_bytes=SIZE + 10_000
    )
    intake = MediaIntake(replace(front, limits=limits), MediaPool([InProcess(limits)], 100), None, OptionLayer())
    weights: list[int] = []

    async def prepare(*numbers: int) -> None:
        request = replace(large(0), media=tuple(one_of(number) for number in numbers))
        ticket = intake.enter(request.media)
        weigh = ticket.weigh

        async def counted(weight: int) -> None:
            weights.append(weight)
            if weights == [2, 2]:
                await prepare(3)  # takes the place of the first, while this one waits for its shares
                assert alive(intake) == SIZE
            await weigh(weight)

        async def work() -> None:
            with intake.holding() as holding:
                await intake.open(ticket, await intake.look(await intake.read(request, ticket, holding)))

        ticket.weigh = counted  # type: ignore[method-assign]
        await ticket.run(work())

    await prepare(1)
    await prepare(1, 2)
    assert weights == [2, 2, 2, 4]
    await intake.close()


async def test_an_encoder_request_that_holds_an_item_opens_the_others_however_much_there_is() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine, limits=MediaLimits(max_prepared_bytes=1, prepared_cache_bytes=1))
    first = await role.accept(ask(1, request_id="before"))
    await submitted(engine)
    engine.encoded()
    await ready_of(first)
    await first.aclose()
    engine.submitted[0] = ()
    answer = await role.accept(ask(2))  # the first item is known, and the second one is open
    await submitted(engine, 2)
    held = await role.accept(ask(media=PICTURES[2:3], request_id="held"))
    await turns()
    assert role.statistics()["media_admission"]["waiting"] == 1
    engine.encoded(gone={0})
    await submitted(engine, 3)
    assert role.statistics()["media_admission"]["waiting"] == 1
    engine.encoded()
    assert len((await ready_of(answer)).references) == 2
    await answer.aclose()
    engine.submitted[1:] = [(), ()]
    await submitted(engine, 4)
    engine.encoded()
    await ready_of(held)
    await held.aclose()
    engine.submitted.clear()
    await until(role)
    await role.drain(0)


@pytest.mark.parametrize("end", ["bad", "too many", "aborted", "left", "answered"])
async def test_no_end_of_a_request_keeps_what_was_prepared_for_it(end: str) -> None:
    engine = FakeEngine()
    role = fake_role(engine, limits=MediaLimits(prepared_cache_bytes=1))
    media = tuple(one_of(number, 128) for number in range(3))
    if end == "bad":
        media = (*media, MediaItem(Modality.IMAGE, RawBytes(shape_png("circle", "red")[:-30])))
    answer = await role.accept(GenerateRequest("r", "demo", MARKER * len(media), media=media))
    if end in ("bad", "too many"):
        engine.room = 0 if end == "too many" else engine.room
        (event,) = await rest(answer)
        assert isinstance(event, Failed)
        assert isinstance(event.error, Overloaded if end == "too many" else MediaError)
        await until(role)  # whoever still looks at the error
    else:
        await submitted(engine)
        assert alive(role) == 3 * 16 * ROW_BYTES
        if end == "aborted":
            await role.abort("r")
        elif end == "answered":
            engine.answer()
            assert isinstance((await rest(answer))[-1], Finished)
        engine.submitted.clear()
    await answer.aclose()
    await until(role)
    await role.drain(0)


class Mark:
    """Of a file, so that it is known whether anybody has it."""


class File(bytes):
    """Has a mark."""

    mark: Mark


@pytest.mark.parametrize("make", [fake_role, fake_encoder])
async def test_nobody_has_what_was_encoded_once_it_is_open(make: Callable[..., Desk]) -> None:
    engine = FakeEngine()
    role = make(engine)
    processor, planning, gate = role._intake.frontend.processor, threading.Event(), threading.Event()

    class Slow:
        """Plans when the test says so; an encoder plans nothing."""

        def __getattr__(self, name: str) -> Any:
            return getattr(processor, name)

        def plan(self, token_ids: Any, inputs: Any) -> Any:
            planning.set()
            assert gate.wait(20)
            return processor.plan(token_ids, inputs)

    role._intake._front = replace(role._intake.frontend, processor=Slow())
    sent = File(shape_png("circle", "red"))
    sent.mark = Mark()
    file = weakref.ref(sent.mark)
    media = [MediaItem(Modality.IMAGE, RawBytes(sent))]
    del sent
    encode = EncodeOptions() if make is fake_encoder else None
    answer = await role.accept(GenerateRequest("r", "demo", MARKER, media=(media.pop(),), encode=encode))
    assert file() is not None
    if make is fake_role:
        assert await asyncio.to_thread(planning.wait, 20)
        assert file() is None  # a plan may wait for its turn, and nobody counts the file any more
        gate.set()
    await submitted(engine)
    await turns()
    assert file() is None
    await answer.aclose()
    await role.drain(0)


class Second:
    """A processor for which the second item of a request is trouble, once the first is prepared."""

    def __init__(self, role: Desk, end: str) -> None:
        self._role, self._end = role, end
        self._processor = role._intake.frontend.processor
        self.begun, self.gate = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def encoder_input(self, index: int, picture: Any, key: bytes) -> Any:
        if index == 1:
            while not alive(self._role):
                time.sleep(0.001)
            if self._end == "fails":
                raise MemoryError("no room")
            self.begun.set()
            assert self.gate.wait(20)
        return self._processor.encoder_input(index, picture, key)


@pytest.mark.parametrize("end", ["aborted", "left", "fails", "damaged", "narrow"])
@pytest.mark.parametrize("make", [fake_role, fake_encoder])
async def test_a_request_that_ends_while_it_is_opened_keeps_nothing(
    make: Callable[..., Desk], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.log, "disabled", True)  # the test's own logs keep tracebacks
    role = make(FakeEngine(), limits=MediaLimits(prepared_cache_bytes=1))
    media = role._intake.media
    assert media is not None
    slow = Second(role, end)
    if end not in ("damaged", "narrow"):
        media._processor = slow  # type: ignore[assignment]
    sent = File(
        {"damaged": shape_png("circle", "red")[:-30], "narrow": NARROW.getvalue()}.get(end, shape_png("circle", "red"))
    )
    sent.mark = Mark()
    file = weakref.ref(sent.mark)
    items = [one_of(1), MediaItem(Modality.IMAGE, RawBytes(sent))]
    del sent
    encode = EncodeOptions() if make is fake_encoder else None
    asked = GenerateRequest("r", "demo", MARKER * 2, media=(items.pop(0), items.pop()), encode=encode)
    answer = await role.accept(asked)
    del asked
    if end in ("aborted", "left"):
        assert await asyncio.to_thread(slow.begun.wait, 20)
        assert alive(role)
        await (role.abort("r") if end == "aborted" else asyncio.wait({asyncio.create_task(answer.aclose())}, timeout=0))
        await turns()
        slow.gate.set()
    else:
        assert isinstance((await rest(answer))[-1], Failed)
    await answer.aclose()
    await until(role)
    async with asyncio.timeout(20):
        while file() is not None:
            await asyncio.sleep(0.001)
    await role.drain(0)


Loaded = TypeVar("Loaded", LoadedModel, LoadedTower)


def scarce(loaded: Loaded) -> Loaded:
    """Nothing is kept, and there is room for one picture."""
    limits = replace(loaded.frontend.limits, prepared_cache_bytes=1, max_prepared_bytes=SIZE)
    return replace(loaded, frontend=replace(loaded.frontend, limits=limits))


async def test_a_real_engine_keeps_nothing_of_what_it_has_computed() -> None:
    """Nor while it idles: whoever waits for less waits for what is really in use."""
    async with running(scarce(load_model(options()))) as role:
        asked = [large(number, stopping=Stopping(max_tokens=3)) for number in range(8)]
        answers = await asyncio.gather(*(ask_engine(role, one) for one in asked))
        assert all(isinstance(one.end, Finished) for one in answers)
        await until(role)


async def test_nor_does_one_that_computes_prompts_for_others() -> None:
    models = load_models(options())
    async with running_pair(models._replace(prefill=scarce(models.prefill))) as pair:
        for number in range(3):
            await begin(pair.prefill, large(number))
            await until(pair.prefill)


async def test_nor_does_one_that_encodes_for_others() -> None:
    async with running_encoder(scarce(load_tower(model_directory(DEMO)))) as bench:
        for number in range(3):
            references = await bench.encode(large(number, encode=EncodeOptions()))
            await until(bench.role)
            await bench.role.abort_rows(references[0].item.handle.session_id)


# -- before anything is decoded ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Tag data larger")
async def test_headers_tell_how_many_tokens_come_of_everything_in_the_corpus(tmp_path: Path) -> None:
    front = replace(frontend(), processor=video_processor(tmp_path))
    intake = MediaIntake(front, MediaPool([InProcess(front.limits)], 10), None, OptionLayer())
    files = [(good.name, Modality.IMAGE, good.data) for good in pictures()]
    files += [(name, Modality.VIDEO, data) for name, (data, _) in good_clips().items()]
    equal = narrow = 0
    for name, kind, data in files:
        request = GenerateRequest("r", "demo", "x", media=(MediaItem(kind, RawBytes(data)),))
        ticket = intake.enter(request.media)

        async def work(request: GenerateRequest = request, ticket: Ticket = ticket) -> tuple[int, int]:
            with intake.holding() as holding:
                jobs = await intake.look(await intake.read(request, ticket, holding))
                (item,) = await intake.open(ticket, jobs)
                return intake.fewest_tokens(jobs), front.processor.fewest_tokens(item.layout)

        try:
            told, are = await ticket.run(work())
        except MediaError as error:
            narrow += "too narrow" in error.reason
        else:
            assert told == are, name
            equal += 1
    assert equal + narrow == len(files)
    assert equal > 0.9 * len(files)
    await intake.close()


class Counting(InProcess):
    """Counts the frames that it decodes, and what shares are in use then."""

    def __init__(self, limits: MediaLimits) -> None:
        super().__init__(limits)
        self.clips = 0
        self.begun, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def clip(self, index: int, data: bytes, sampling: FrameSampling, fit: FrameFit | None) -> Clip:
        self.clips += 1
        self.begun.set()
        assert self.gate.wait(20)
        return super().clip(index, data, sampling, fit)


def film(**video: int) -> GenerateRequest:
    media = (MediaItem(Modality.VIDEO, RawBytes(good_clips()["growing"][0])),)
    options = OptionLayer(video=ClipLayer(**video))
    return GenerateRequest(
        "r", "demo", "<|vision_start|><|video_pad|><|vision_end|>", media=media, media_options=options
    )


async def test_a_prompt_that_is_too_long_is_refused_before_anything_is_decoded(tmp_path: Path) -> None:
    front = replace(frontend(), processor=video_processor(tmp_path))
    worker = Counting(front.limits)
    media = MediaIntake(front, MediaPool([worker], 10), None, OptionLayer())
    intake = Intake(front, Adapters(lambda info: pytest.fail(f"{info}"), 0), None, media)

    async def prepare(request: GenerateRequest) -> int:
        draft = await intake.validate(request, 0.0)
        return len((await intake.prepare(draft, intake.line_up(draft))).request.plan)

    room, fitting = front.model.max_context, await prepare(large(1))
    with pytest.raises(PromptTooLong, match=rf"the prompt has {2 * fitting} tokens; the context window"):
        await prepare(replace(large(2), prompt=MARKER * 2, media=(one_of(2), one_of(3))))
    assert media.counts["image_loads"] == 1
    exact = replace(large(1), stopping=Stopping(min_tokens=room - fitting))
    assert await prepare(exact) == fitting
    with pytest.raises(PromptTooLong, match=rf"has {fitting} tokens and min_tokens asks for {room - fitting + 1}"):
        await prepare(replace(exact, stopping=Stopping(min_tokens=room - fitting + 1)))
    assert await prepare(film(num_frames=2)) < room
    assert worker.clips == 1
    with pytest.raises(PromptTooLong, match=r"the prompt has at least \d+ tokens; the context window"):
        await prepare(film(num_frames=2, min_pixels=4_000_000))
    assert worker.clips == 1
    assert media.statistics()["media_held"]["bytes"] == 0
    await intake.close()


async def test_a_small_film_that_is_made_large_has_as_many_shares_as_a_picture_of_its_size(tmp_path: Path) -> None:
    front = replace(frontend(), processor=video_processor(tmp_path))
    limits = replace(front.limits, max_item_pixels=1_000_000)
    worker = Counting(limits)
    worker.gate.clear()
    media = MediaIntake(replace(front, limits=limits), MediaPool([worker], 10), None, OptionLayer())
    request = film(num_frames=2, min_pixels=700_000)
    ticket = media.enter(request.media)

    async def work() -> None:
        with media.holding() as holding:
            await media.open(ticket, await media.look(await media.read(request, ticket, holding)))

    task = asyncio.create_task(ticket.run(work()))
    assert await asyncio.to_thread(worker.begun.wait, 20)
    assert media.statistics()["media_admission"]["shares_in_use"] == 3
    worker.gate.set()
    await task
    await media.close()
