from __future__ import annotations

import contextlib
import pickle
from dataclasses import replace

import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus import clips, sounds
from tests.corpus.sounds import Recipe, encoded, loudness, tone, wav
from tests.decoding_here import decode_sound
from triptych.core.config import MediaLimits
from triptych.core.errors import MediaError
from triptych.core.media import Stage
from triptych.core.sound import Sound, Window
from triptych.media.windows import plan_windows

LIMITS = MediaLimits()
RATE = 16000


def decode(data: bytes, rate: int = RATE, limits: MediaLimits = LIMITS, **more: object) -> Sound:
    return decode_sound(0, data, rate, limits, **more)  # type: ignore[arg-type]


def peak(sound: Sound) -> float:
    """Of the middle, where a codec has settled."""
    third = len(sound.samples) // 3
    return float(np.abs(sound.samples[third : 2 * third]).max())


@pytest.mark.parametrize("channels", range(1, 9))
@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000])
def test_every_rate_and_number_of_channels_becomes_one_channel_at_the_model_s_rate(rate: int, channels: int) -> None:
    sound = decode(wav(rate, channels))
    assert sound.samples.shape == (RATE,)
    assert sound.samples.dtype == np.float32
    assert sound.rate == RATE
    assert peak(sound) == pytest.approx(loudness(channels), rel=0.01)
    expected = tone(RATE, RATE)[:, 0] * loudness(channels) * 10
    middle = slice(RATE // 3, 2 * RATE // 3)
    assert np.abs(sound.samples[middle] - expected[middle]).max() < 2e-3


@pytest.mark.parametrize("kind", sounds.KINDS)
def test_every_kind_of_file_is_heard_from_all_its_channels(kind: str) -> None:
    recipe = sounds.KINDS[kind]
    sound = decode(encoded(recipe))
    assert sound.seconds == pytest.approx(1.0, abs=0.1)
    assert peak(sound) == pytest.approx(loudness(recipe.channels), rel=0.06)


@pytest.mark.parametrize("kind", ["u1", "i2", "f4"])
def test_full_scale_is_one_whatever_the_samples_are_stored_in(kind: str) -> None:
    assert np.abs(decode(wav(RATE, kind=kind)).samples - tone(RATE, RATE)[:, 0]).max() < 0.01


def test_a_sound_at_the_model_s_rate_is_not_resampled() -> None:
    assert (decode(wav(RATE, kind="f4")).samples == tone(RATE, RATE)[:, 0]).all()


@given(st.sampled_from([8000, 11025, 22050, 44100, 48000, 96000]), st.integers(6, 20000))
@settings(max_examples=40, deadline=None)
def test_any_length_is_resampled_as_if_it_were_one_piece(rate: int, samples: int) -> None:
    sound = decode(wav(rate, seconds=samples / rate, kind="f4"))
    whole = soxr.resample(tone(rate, samples)[:, 0], rate, RATE, quality="HQ")
    assert abs(len(sound.samples) - samples * RATE / rate) <= 1
    assert len(sound.samples) == len(whole)
    assert np.abs(sound.samples - whole).max() < 1e-6


def test_forty_seconds_come_in_windows() -> None:
    sound = decode(wav(8000, seconds=40), window_seconds=30)
    assert len(sound.samples) == 40 * RATE
    assert sound.windows == (Window(0, 30 * RATE), Window(30 * RATE, 10 * RATE))


@given(st.integers(1, 10_000), st.one_of(st.none(), st.integers(1, 3000)))
def test_windows_cover_every_sample_once(samples: int, window: int | None) -> None:
    windows = plan_windows(samples, window)
    assert [at for one in windows for at in range(one.start, one.end)] == list(range(samples))
    assert {one.length for one in windows[:-1]} <= {window}
    assert 1 <= windows[-1].length <= (window or samples)


@pytest.mark.parametrize("name", sounds.HOSTILE)
def test_what_is_no_good_sound_says_why(name: str) -> None:
    bad = sounds.HOSTILE[name]
    with pytest.raises(MediaError, match=bad.reason) as refused:
        decode(bad.make())
    assert refused.value.stage is (Stage.LIMIT if bad.reason.startswith("limit: ") else Stage.DECODE)


def test_the_sound_of_a_film_is_read_where_it_is_asked_for() -> None:
    sound = decode(encoded(Recipe("mp4", "aac", film=True)), of_film=True)
    assert peak(sound) == pytest.approx(0.1, rel=0.05)


def test_a_film_without_sound_has_none() -> None:
    with pytest.raises(MediaError, match="decode: it has no sound"):
        decode(clips.encoded(), of_film=True)


def test_a_cover_does_not_make_a_sound_a_film() -> None:
    assert decode(clips.with_cover()).seconds == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("data", [wav(8000, seconds=40), encoded(Recipe(seconds=4.0))])
def test_a_sound_that_is_too_long_names_the_limit_and_its_flag(data: bytes) -> None:
    message = r"media item 0: limit: .* seconds and more; at most 2 \(--max-sound-seconds\)"
    with pytest.raises(MediaError, match=message) as refused:
        decode(data, limits=replace(LIMITS, max_sound_seconds=2))
    assert refused.value.stage is Stage.LIMIT


def test_a_length_that_the_header_makes_up_costs_nothing() -> None:
    data = bytearray(encoded())
    # STREAMINFO: 36 bits of samples, here as many as fit.
    data[21] |= 0x0F
    data[22:26] = b"\xff" * 4
    with pytest.raises(MediaError, match="cut off: 48000 samples of 68719476735"):
        decode(bytes(data))


@pytest.mark.parametrize(
    "recipe",
    [Recipe(), sounds.KINDS["m4a"], sounds.KINDS["ogg opus"], sounds.KINDS["webm opus"], sounds.KINDS["avi mp3"]],
)
def test_a_sound_cut_off_anywhere_is_an_error(recipe: Recipe) -> None:
    for part in clips.truncations(encoded(recipe)):
        with pytest.raises(MediaError):
            decode(part)


@pytest.mark.parametrize("kind", ["mp3", "aac"])
def test_a_stream_that_never_says_how_long_it_is_may_end_anywhere(kind: str) -> None:
    parts = clips.truncations(encoded(sounds.KINDS[kind]))[4:]
    lengths = [decode(part).seconds for part in parts]
    assert lengths == sorted(lengths)
    assert 0.1 < lengths[0] < lengths[-1] < 1.1


@pytest.mark.parametrize("after", [b"TAG" + bytes(125), bytes(500), b"and so on" * 20])
@pytest.mark.parametrize("kind", ["mp3", "aac", "flac", "m4a", "ogg opus", "wav, 24 bits"])
def test_bytes_after_the_end_do_no_harm(kind: str, after: bytes) -> None:
    data = encoded(sounds.KINDS[kind])
    assert (decode(data + after).samples == decode(data).samples).all()


def test_damage_in_the_middle_of_an_endless_stream_is_not_its_end() -> None:
    data = encoded(Recipe("adts", "aac", 44100, 2))
    third = len(data) // 3
    with pytest.raises(MediaError, match="damaged"):
        decode(data[:third] + bytes(60) + data[third + 60 :])


def test_a_rate_that_changes_on_the_way_is_refused() -> None:
    data = encoded(Recipe("adts", "aac", 44100)) + encoded(Recipe("adts", "aac", 48000))
    with pytest.raises(MediaError, match="its rate changes from 44100 to 48000 samples a second"):
        decode(data)


def test_a_recording_through_a_pipe_says_nothing_about_its_length() -> None:
    data = wav(8000)
    size = data.index(b"data") + 4
    streamed = data[:4] + b"\xff" * 4 + data[8:size] + b"\xff" * 4 + data[size + 4 :]
    assert (decode(streamed).samples == decode(data).samples).all()


def test_a_tag_before_the_sound_is_passed_over() -> None:
    tag = b"ID3\x03\0\0\0\0\x01\x02" + bytes(130)
    for kind in ("mp3", "aac"):
        assert decode(tag + encoded(sounds.KINDS[kind])).seconds == pytest.approx(1.0, abs=0.1)


def test_a_sound_survives_the_way_from_a_worker() -> None:
    sound = decode(wav(8000))
    back = pickle.loads(pickle.dumps(sound))
    assert (back.samples == sound.samples).all()
    assert (back.rate, back.windows) == (sound.rate, sound.windows)


@pytest.mark.parametrize("kind", ["flac", "mp3", "m4a", "ogg opus", "webm opus", "wav, 24 bits"])
def test_damage_is_an_error_or_samples_never_anything_else(kind: str) -> None:
    data = encoded(sounds.KINDS[kind])
    random = np.random.default_rng(len(data))
    for _ in range(40):
        damaged = bytearray(data)
        for at in random.integers(0, len(data), random.integers(1, 12)):
            damaged[at] = random.integers(0, 256)
        with contextlib.suppress(MediaError):
            assert np.isfinite(decode(bytes(damaged)).samples).all()
