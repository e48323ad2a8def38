"""The corpus of pictures through the whole path: queue, process, normaliser, pixels."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.contract.corpus_run import LIMITS, Run
from tests.corpus.make_pictures import DIRECTORY, TABLE, bad, codecs, digest, files, good, is_near
from tests.corpus.pictures import TRAILER
from triptych.core.config import MIB
from triptych.core.errors import MediaError, MediaUnavailable
from triptych.core.media import Picture
from triptych.core.media_options import PictureOptions
from triptych.media.decode import admit_picture
from triptych.media.limits import RequestBudget
from triptych.processors.identity import content_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.media.workers import MediaPool

CUTS = 20
TAKEN = 256 * MIB
"""More resident memory than any of these pictures may take."""


@functools.cache
def table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


async def decoded(pool: MediaPool, data: bytes) -> Picture:
    return await pool.picture(0, data, admit_picture(0, data, RequestBudget(LIMITS)), PictureOptions())


def test_the_committed_files_are_what_is_made() -> None:
    made = files()
    assert {path.name for path in DIRECTORY.iterdir()} == set(made)
    assert sum(map(len, made.values())) < 2 * MIB
    if codecs() != table()["codecs"]:
        pytest.skip("these codecs write other bytes")
    for name, data in made.items():
        assert (DIRECTORY / name).read_bytes() == data, name


def test_the_table_is_of_these_files_and_of_their_samples() -> None:
    assert set(table()["good"]) == set(good())
    assert set(table()["bad"]) == set(bad())
    for name, case in good().items():
        row = table()["good"][name]
        assert (row["what"], row["exact"]) == (case.what, case.exact is not None)
        if case.exact is not None:
            assert row["size"] == [case.exact.shape[1], case.exact.shape[0]]
            assert row["sha256"] == digest(case.exact), name
    for name, wrong in bad().items():
        assert table()["bad"][name] == {"what": wrong.what, "stage": wrong.stage.value, "words": wrong.words}


def test_every_picture_gives_its_pixels_and_every_hostile_one_fails_by_itself(
    measured: Callable[[str], None],
) -> None:
    everything = {name: case.data for name, case in (*good().items(), *bad().items())}
    run = Run(everything, decoded)
    same_codecs = codecs() == table()["codecs"]
    for name, row in table()["good"].items():
        result, case = run.results[name], good()[name]
        assert isinstance(result, Picture), f"{name}: {result}"
        assert [result.width, result.height] == row["size"]
        if row["exact"] or same_codecs:
            assert digest(result.pixels) == row["sha256"], name
        if case.near is not None:
            assert is_near(result.pixels, case.near), name
    for name, row in table()["bad"].items():
        result = run.results[name]
        assert isinstance(result, MediaError), name
        assert not isinstance(result, MediaUnavailable), f"{name}: {result}"
        assert str(result).startswith(f"media item 0: {row['stage']}: "), f"{name}: {result}"
        assert row["words"] in result.reason, f"{name}: {result}"
        assert str(result).isprintable()
    measured(run.summary("pictures", bad()))
    assert run.peak < TAKEN
    assert run.grown < TAKEN


def test_what_is_cut_off_anywhere_is_refused_or_whole() -> None:
    bases = [name for name, case in good().items() if case.committed and 100 < len(case.data) < 20_000]
    assert len(bases) > 100
    cut = {
        f"{name} {point}": good()[name].data[: len(good()[name].data) * point // CUTS]
        for name in bases
        for point in range(CUTS)
    }
    whole = Run({name: good()[name].data for name in bases}, decoded).results
    counts = {Picture: 0, MediaError: 0}
    for name, result in Run(cut, decoded).results.items():
        full = whole[name.split()[0]]
        if isinstance(result, Picture):
            assert isinstance(full, Picture)
            assert (result.pixels == full.pixels).all(), name
        else:
            assert not isinstance(result, MediaUnavailable)
        counts[type(result)] += 1
    assert counts[MediaError] > counts[Picture]


def test_trailing_bytes_are_no_part_of_the_picture_but_of_its_identity() -> None:
    trailing = [name for name, case in good().items() if case.data.endswith(TRAILER)]
    assert len(trailing) == 7
    files = {name: good()[name].data for name in trailing}
    bare = {name: data.removesuffix(TRAILER) for name, data in files.items()}
    with_trailer, without = Run(files, decoded).results, Run(bare, decoded).results
    for name in trailing:
        one, other = with_trailer[name], without[name]
        assert isinstance(one, Picture)
        assert isinstance(other, Picture)
        assert (one.pixels == other.pixels).all()
        assert content_key(files[name], options=b"", fingerprint=b"") != content_key(
            bare[name], options=b"", fingerprint=b""
        )
