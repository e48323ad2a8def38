"""The corpus of videos and sounds through the whole path: queue, process, decoder, frames and samples."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.contract.corpus_run import LIMITS, Run
from tests.corpus import bombs
from tests.corpus.clips import number_in
from tests.corpus.make_clips import (
    DIRECTORY,
    FOUR,
    RATE,
    TABLE,
    bad_clips,
    bad_sounds,
    clip_row,
    codecs,
    files,
    good_clips,
    good_sounds,
    path_of,
    sound_row,
)
from triptych.core.clip import Clip
from triptych.core.config import MIB, DecodeConfig
from triptych.core.errors import MediaError, MediaUnavailable
from triptych.core.sound import Sound
from triptych.media.decode_ceiling import file_ceiling

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.media.workers import MediaPool

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


def check_refused(run: Run, bad: dict[str, tuple[bytes, str]]) -> None:
    for name, (_, reason) in bad.items():
        result = run.results[name]
        assert isinstance(result, MediaError), name
        assert not isinstance(result, MediaUnavailable), f"{name}: {result}"
        assert str(result).startswith("media item 0: "), name
        assert re.search(reason, str(result)), f"{name}: {result}"
        assert str(result).isprintable()


def test_every_video_gives_its_frames_and_every_hostile_one_fails_by_itself(
    measured: Callable[[str], None],
) -> None:
    good, bad = good_clips(), bad_clips()
    run = Run({name: case[0] for name, case in (*good.items(), *bad.items())}, clip_of)
    measured(run.summary("videos", bad))
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
    measured: Callable[[str], None],
) -> None:
    good, bad = good_sounds(), bad_sounds()
    run = Run({name: case[0] for name, case in (*good.items(), *bad.items())}, sound_of)
    measured(run.summary("sounds", bad))
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


def test_what_is_committed_comes_out_as_the_table_says() -> None:
    table = json.loads(TABLE.read_text())
    rows = {**table["videos"], **table["sounds"]}
    wanted = {*rows, *table["bad"]}
    assert {path.name for path in DIRECTORY.iterdir()} == {path_of(name).name for name in wanted}
    if codecs() == table["codecs"]:
        assert wanted == set(files())
    committed = {name: path_of(name).read_bytes() for name in wanted}
    heard = {*table["sounds"], *(f"bad {name}" for name in bad_sounds())} & wanted
    results: dict[str, object] = {}
    for names, decode in ((wanted - heard, clip_of), (heard, sound_of)):
        run = Run({name: committed[name] for name in names}, decode)
        check_refused(run, {name: (committed[name], table["bad"][name]) for name in names & {*table["bad"]}})
        results |= run.results
    for name, row in rows.items():
        result = results[name]
        assert isinstance(result, Clip | Sound), f"{name}: {result}"
        found = clip_row(result) if isinstance(result, Clip) else sound_row(result)
        if codecs() != table["codecs"]:
            found["sha256"] = row["sha256"]
        assert found == row, name
