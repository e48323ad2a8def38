"""What every kind of media worker does with pictures, videos and sounds, seen through a pool of them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from tests.corpus import clips, sounds
from tests.corpus.drawn import ALPHA, ON_WHITE, RGB, on_white
from tests.corpus.picture_files import PNG_RGB, PNG_RGB_ALPHA, png
from tests.decoding_here import InProcess, decode_clip, decode_sound
from triptych.core.clip import Clip, FrameFit, FrameSampling, FrameSize
from triptych.core.config import DecodeConfig, MediaLimits
from triptych.core.errors import MediaError
from triptych.core.media import Picture, Stage
from triptych.core.media_options import PictureOptions
from triptych.core.picture_fit import PictureFit
from triptych.core.sound import Sound, Window
from triptych.media.decode import admit_picture
from triptych.media.decode_host import DecodeProcess
from triptych.media.limits import RequestBudget
from triptych.media.workers import MediaPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from triptych.media.workers import MediaWorker

LIMITS = MediaLimits()
GOOD = png(RGB, PNG_RGB)
CLEAR = png(np.dstack([RGB, ALPHA]), PNG_RGB_ALPHA)
CUT = GOOD[: len(GOOD) // 2]
FOUR = FrameSampling(num_frames=4)
RATE = 16000

KINDS: dict[str, Callable[[MediaLimits], MediaWorker]] = {
    "process": lambda limits: DecodeProcess(limits, DecodeConfig()),
    "thread": InProcess,
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Callable[[MediaLimits], MediaWorker]:
    return KINDS[request.param]


@pytest.fixture
async def pool(kind: Callable[[MediaLimits], MediaWorker]) -> AsyncIterator[MediaPool]:
    pool = MediaPool([kind(LIMITS) for _ in range(2)], max_waiting=2000)
    yield pool
    await pool.close()


async def decode(
    pool: MediaPool, data: bytes = GOOD, index: int = 0, background: tuple[int, int, int] = (255, 255, 255)
) -> Picture:
    admitted = admit_picture(index, data, RequestBudget(LIMITS))
    return await pool.picture(index, data, admitted, PictureOptions(background))


def idle(pool: MediaPool) -> bool:
    now = pool.statistics()
    return (now.busy, now.waiting, now.bytes_held) == (0, 0, 0)


async def test_pixels_come_back(pool: MediaPool) -> None:
    picture = await decode(pool)
    assert (picture.pixels == RGB).all()
    assert picture.pixels.dtype == np.uint8
    assert (picture.height, picture.width) == RGB.shape[:2]


async def test_transparency_shows_the_background_that_was_asked_for(pool: MediaPool) -> None:
    assert ((await decode(pool, CLEAR)).pixels == ON_WHITE).all()
    dark = (await decode(pool, CLEAR, background=(0, 0, 0))).pixels
    assert (dark == 255 - on_white(255 - RGB, ALPHA)).all()


@pytest.mark.parametrize("resample", [Image.Resampling.BICUBIC, Image.Resampling.BILINEAR])
@pytest.mark.parametrize("bounds", [(1, 1), (64, 32 * 32 * 4), (32 * 32 * 90, 10**6)])
async def test_pictures_are_resized_where_they_are_decoded(
    pool: MediaPool, bounds: tuple[int, int], resample: Image.Resampling
) -> None:
    fit = PictureFit(32, *bounds, resample)
    admitted = admit_picture(0, GOOD, RequestBudget(LIMITS))
    pixels = (await pool.picture(0, GOOD, admitted, PictureOptions(), fit)).pixels
    height, width = fit.size(FrameSize(*RGB.shape[:2]))
    assert (pixels == np.asarray(Image.fromarray(RGB).resize((width, height), resample))).all()


async def test_a_picture_too_narrow_to_be_resized_is_refused(pool: MediaPool) -> None:
    data = png(np.zeros((1, 201, 3), np.uint8), PNG_RGB)
    admitted = admit_picture(3, data, RequestBudget(LIMITS))
    with pytest.raises(MediaError, match="media item 3: preprocess: 201 x 1 is too narrow") as refused:
        await pool.picture(3, data, admitted, PictureOptions(), PictureFit(32, 64, 10**6, 3))
    assert refused.value.stage is Stage.PREPROCESS


@pytest.mark.parametrize("name", ["mp4 h264 with B frames", "webm vp9", "avi mpeg4", "gif"])
@pytest.mark.parametrize("sampling", [FOUR, FrameSampling(fps=2, min_frames=4, max_frames=10), FrameSampling()])
async def test_the_frames_of_a_video_and_their_plan_come_back(
    pool: MediaPool, name: str, sampling: FrameSampling
) -> None:
    data = clips.encoded(clips.KINDS[name])
    expected = decode_clip(0, data, sampling, LIMITS)
    clip = await pool.clip(0, data, sampling, None)
    assert clip.plan == expected.plan
    assert clip.frames.dtype == np.uint8
    assert clip.frames.shape == expected.frames.shape
    assert (clip.frames == expected.frames).all()


@pytest.mark.parametrize("fit", [None, FrameFit(cell=8, temporal=2, min_pixels=64, max_pixels=4 * 24 * 32)])
@pytest.mark.parametrize("name", clips.KINDS)
async def test_a_survey_tells_what_a_video_costs(pool: MediaPool, name: str, fit: FrameFit | None) -> None:
    data = clips.encoded(clips.KINDS[name])
    survey = await pool.survey(0, data, FOUR, fit)
    clip = await pool.clip(0, data, FOUR, fit)
    assert survey.frames == len(clip.frames)
    assert clip.frames.size // 3 <= survey.kept_pixels
    assert survey.decoded_pixels >= len(clip.frames)


async def test_a_survey_refuses_what_decoding_would(pool: MediaPool) -> None:
    for data, match in ((CUT, "not a video"), (clips.encoded()[:500], "cut off"), (b"", "is empty")):
        with pytest.raises(MediaError, match=match):
            await pool.survey(1, data, FOUR, None)
    with pytest.raises(MediaError, match=r"769 frames asked for; at most 768 \(--max-clip-frames"):
        await pool.survey(1, clips.encoded(), FrameSampling(num_frames=769), None)
    assert idle(pool)


async def test_frames_are_resized_where_they_are_decoded(pool: MediaPool) -> None:
    fit = FrameFit(cell=8, temporal=2, min_pixels=64, max_pixels=4 * 24 * 32)
    clip = await pool.clip(0, clips.encoded(), FOUR, fit)
    assert clip.frames.shape == (4, 16, 32, 3)
    assert (clip.frames == decode_clip(0, clips.encoded(), FOUR, LIMITS, fit).frames).all()


@pytest.mark.parametrize("name", ["flac, 8 channels", "mp3", "m4a", "ogg opus"])
async def test_the_samples_of_a_sound_come_back(pool: MediaPool, name: str) -> None:
    data = sounds.encoded(sounds.KINDS[name])
    expected = decode_sound(0, data, RATE, LIMITS)
    sound = await pool.sound(0, data, RATE)
    assert sound.samples.dtype == np.float32
    assert (sound.samples == expected.samples).all()
    assert (sound.rate, sound.windows) == (RATE, expected.windows)


async def test_a_sound_comes_in_windows(pool: MediaPool) -> None:
    sound = await pool.sound(0, sounds.wav(8000, seconds=2.5), 8000, 1.0)
    assert sound.windows == (Window(0, 8000), Window(8000, 8000), Window(16000, 4000))


async def test_the_sound_of_a_film_is_read_where_it_is_asked_for(pool: MediaPool) -> None:
    film = sounds.encoded(sounds.Recipe("mp4", "aac", 16000, film=True))
    assert (await pool.sound(0, film, RATE, of_film=True)).seconds > 0.9
    with pytest.raises(MediaError, match="media item 5: decode: it is a video"):
        await pool.sound(5, film, RATE)


async def test_what_is_bad_fails_by_itself(pool: MediaPool) -> None:
    film, tone = clips.encoded(), sounds.encoded()

    async def one(index: int) -> Picture | Clip | Sound:
        bad = index % 2
        if index % 3 == 0:
            return await decode(pool, CUT if bad else GOOD, index)
        if index % 3 == 1:
            return await pool.clip(index, film[: len(film) // 2] if bad else film, FOUR, None)
        return await pool.sound(index, tone[: len(tone) // 2] if bad else tone, RATE)

    results = await asyncio.gather(*(one(index) for index in range(30)), return_exceptions=True)
    for index, result in enumerate(results):
        if index % 2:
            assert isinstance(result, MediaError)
            assert (result.index, result.stage) == (index, Stage.DECODE)
        else:
            assert isinstance(result, (Picture, Clip, Sound)[index % 3])
    now = pool.statistics()
    assert (now.decoded, now.failed, now.deaths) == (15, 15, 0)
    assert idle(pool)


@pytest.mark.parametrize(
    ("changed", "asked", "message"),
    [
        ({"max_frame_pixels": 6000}, FOUR, r"limit: frames of 96 x 64 .* \(--max-frame-pixels\)"),
        ({"max_clip_frames": 3}, FOUR, r"limit: 4 frames asked for; at most 3 \(--max-clip-frames\)"),
        ({"max_clip_pixels": 24000}, FOUR, r"limit: 4 frames of 96 x 64 .* \(--max-clip-pixels\)"),
        ({"max_item_bytes": 100}, RATE, r"limit: .* bytes; at most 100 \(--max-item-bytes\)"),
        ({"max_sound_seconds": 1}, RATE, r"limit: .* seconds and more; at most 1 \(--max-sound-seconds\)"),
    ],
)
async def test_a_limit_names_its_flag(
    kind: Callable[[MediaLimits], MediaWorker], changed: dict[str, int], asked: FrameSampling | int, message: str
) -> None:
    pool = MediaPool([kind(replace(LIMITS, **changed))], max_waiting=1)
    if isinstance(asked, FrameSampling):
        work: Coroutine[object, object, object] = pool.clip(2, clips.encoded(), asked, None)
    else:
        work = pool.sound(2, sounds.wav(8000, seconds=4), asked)
    with pytest.raises(MediaError, match=f"media item 2: {message}") as refused:
        await work
    assert refused.value.stage is Stage.LIMIT
    await pool.close()


async def test_a_shape_that_a_model_refuses_is_an_error_of_preprocessing(pool: MediaPool) -> None:
    fit = FrameFit(cell=8, temporal=2, min_pixels=64, max_pixels=4 * 24 * 32)
    assert (await pool.clip(0, clips.narrow(), FrameSampling(), None)).frames.shape == (1, 2, 402, 3)
    with pytest.raises(MediaError, match=r"media item 1: preprocess: .* is too narrow") as refused:
        await pool.clip(1, clips.narrow(), FrameSampling(), fit)
    assert refused.value.stage is Stage.PREPROCESS


async def test_what_was_decoded_outlives_the_workers(pool: MediaPool) -> None:
    picture = await decode(pool)
    clip = await pool.clip(0, clips.encoded(), FOUR, None)
    sound = await pool.sound(0, sounds.wav(RATE, kind="f4"), RATE)
    await pool.close()
    assert (picture.pixels == RGB).all()
    assert [clips.number_in(frame) for frame in clip.frames] == [0, 10, 19, 29]
    assert (sound.samples == sounds.tone(RATE, RATE)[:, 0]).all()


async def test_a_thousand_items_of_which_many_are_cancelled_leave_nothing_behind(pool: MediaPool) -> None:
    chance = random.Random(7)
    await pool.start()
    film, tone = clips.encoded(clips.Recipe(codec="mpeg4", frames=2)), sounds.wav(8000, seconds=0.1)

    async def begin(index: int) -> object:
        if index % 10 == 4:
            return await pool.clip(index, film, FrameSampling(), None)
        if index % 10 == 5:
            return await pool.sound(index, tone, RATE)
        return await decode(pool, CUT if index % 10 in (3, 6) else GOOD, index)

    async def one(index: int) -> None:
        task = asyncio.create_task(begin(index))
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
