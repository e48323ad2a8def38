"""The corpus of videos and sounds through the whole path: queue, process, decoder, frames and samples."""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from tests.contract.corpus_run import LIMITS, Run
from tests.corpus import bombs, clips, sounds
from tests.corpus.clips import Recipe, encoded, number_in
from triptych.core.clip import Clip, FrameSampling
from triptych.core.config import MIB, DecodeConfig
from triptych.core.errors import MediaError, MediaUnavailable
from triptych.core.sound import Sound
from triptych.media.decode_ceiling import file_ceiling

if TYPE_CHECKING:
    from triptych.media.workers import MediaPool

FOUR = FrameSampling(num_frames=4)
RATE = 16000
TAKEN = file_ceiling(64 * MIB, LIMITS, DecodeConfig()).memory + 128 * MIB
"""Resident memory that no process may come to: its ceiling, and what it has before."""


async def clip_of(pool: MediaPool, data: bytes) -> Clip:
    """Surveyed first, as an engine does."""
    survey = await pool.survey(0, data, FOUR, None)
    clip = await pool.clip(0, data, FOUR, None)
    assert survey.frames == len(clip.frames)
    assert clip.frames.size // 3 <= survey.kept_pixels
    return clip


async def sound_of(pool: MediaPool, data: bytes) -> Sound:
    return await pool.sound(0, data, RATE)


@functools.cache
def good_clips() -> dict[str, tuple[bytes, list[int]]]:
    """Each with the numbers of the frames that are looked at."""
    evenly = [0, 10, 19, 29]
    files = {name: (encoded(recipe), evenly) for name, recipe in clips.KINDS.items()}
    for name, recipe in clips.VARYING.items():
        files[f"{name}, variable rate"] = (encoded(recipe), [0, 5, 7, 9])
    for degrees in (90, 180, 270):
        files[f"turned by {degrees}"] = (encoded(Recipe(degrees=degrees)), evenly)
    files["one frame"] = (encoded(Recipe(frames=1)), [0])
    files["ten seconds at one frame a second"] = (encoded(Recipe(frames=10, fps=Fraction(1))), [0, 3, 6, 9])
    files["avi, broken index"] = (clips.broken_index(Recipe("avi", "mpeg4"), b"idx1"), evenly)
    files["matroska, broken index"] = (clips.broken_index(Recipe("matroska", "mpeg4"), b"\x1c\x53\xbb\x6b"), evenly)
    files["growing"] = (clips.growing(), [0, 1, 2, 3])
    files["trailing bytes"] = (encoded() + b"and so on" * 9, evenly)
    return files


@functools.cache
def bad_clips() -> dict[str, tuple[bytes, str]]:
    """Each with a pattern of its reason."""
    files = {name: (bad.make(), bad.reason) for name, bad in clips.HOSTILE.items()}
    for name, (make, reason) in bombs.CLIPS.items():
        files[name] = (make(), re.escape(reason))
    for recipe in (Recipe(), clips.KINDS["mp4 in fragments"], Recipe("matroska", "mpeg4"), clips.KINDS["gif"]):
        for point, part in enumerate(clips.truncations(encoded(recipe))):
            files[f"{recipe.container} {recipe.flags} cut off at {point} of 20"] = (part, "decode: ")
    files["only sound"] = (sounds.encoded(sounds.KINDS["m4a"]), "decode: it has no video: only sound")
    return files


@functools.cache
def good_sounds() -> dict[str, tuple[bytes, float, float]]:
    """Each with its seconds and its loudness."""
    files = {
        name: (sounds.encoded(recipe), recipe.seconds, sounds.loudness(recipe.channels))
        for name, recipe in sounds.KINDS.items()
    }
    for rate in (8000, 16000, 44100, 48000):
        for channels in range(1, 9):
            name = f"wav, {rate} a second, {channels} channels"
            files[name] = (sounds.wav(rate, channels), 1.0, sounds.loudness(channels))
    files["forty seconds"] = (sounds.wav(8000, seconds=40), 40.0, 0.1)
    return files


@functools.cache
def bad_sounds() -> dict[str, tuple[bytes, str]]:
    """Each with a pattern of its reason."""
    files = {name: (bad.make(), bad.reason) for name, bad in sounds.HOSTILE.items()}
    for name, (make, reason) in bombs.SOUNDS.items():
        files[name] = (make(), re.escape(reason))
    for kind in ("flac", "m4a", "ogg opus", "webm opus", "avi mp3"):
        for point, part in enumerate(clips.truncations(sounds.encoded(sounds.KINDS[kind]))):
            files[f"{kind} cut off at {point} of 20"] = (part, "decode: ")
    return files


def check_refused(run: Run, bad: dict[str, tuple[bytes, str]]) -> None:
    for name, (_, reason) in bad.items():
        result = run.results[name]
        assert isinstance(result, MediaError), name
        assert not isinstance(result, MediaUnavailable), f"{name}: {result}"
        assert str(result).startswith("media item 0: "), name
        assert re.search(reason, str(result)), f"{name}: {result}"
        assert str(result).isprintable()


def test_every_video_gives_its_frames_and_every_hostile_one_fails_by_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good, bad = good_clips(), bad_clips()
    run = Run({name: case[0] for name, case in (*good.items(), *bad.items())}, clip_of)
    with capsys.disabled():
        print(run.summary("videos", bad))
    for name, (_, numbers) in good.items():
        result = run.results[name]
        assert isinstance(result, Clip), f"{name}: {result}"
        assert [number_in(frame) for frame in result.frames] == numbers, name
        assert len(result.plan.timestamps) == len(numbers)
        assert result.plan.indices == tuple(numbers), name
    check_refused(run, bad)
    assert run.deaths == sum("decoding this video" in reason for _, reason in bombs.CLIPS.values())
    assert run.peak < TAKEN
    assert run.grown < TAKEN


def test_every_sound_gives_its_samples_and_every_hostile_one_fails_by_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good, bad = good_sounds(), bad_sounds()
    run = Run({name: case[0] for name, case in (*good.items(), *bad.items())}, sound_of)
    with capsys.disabled():
        print(run.summary("sounds", bad))
    for name, (_, seconds, loudness) in good.items():
        result = run.results[name]
        assert isinstance(result, Sound), f"{name}: {result}"
        assert result.seconds == pytest.approx(seconds, abs=0.1), name
        third = len(result.samples) // 3
        assert abs(result.samples[third : 2 * third]).max() == pytest.approx(loudness, rel=0.06), name
    check_refused(run, bad)
    assert run.deaths == 0
    assert run.peak < TAKEN
    assert run.grown < TAKEN
