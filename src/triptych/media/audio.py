"""An encoded sound to one channel at the model's rate. Pure: bytes in, a sound out; made to run in a worker process.

    bytes -> container known and whole -> packets -> samples of all channels -> their mean -> resampled -> windows

Each decoded stretch is mixed and resampled as it comes, so that memory holds the result and one packet more, and a
sound is found to be too long when it is, whatever its header says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import av
import numpy as np
import soxr
from av.error import InvalidDataError

from triptych.core.errors import MediaError
from triptych.core.media import Stage
from triptych.core.sound import Sound
from triptych.media.av_file import (
    OPEN_ENDED,
    SOUND_CODECS,
    check_codec,
    first_of,
    is_film,
    only,
    open_file,
    packets_of,
    start_decoder,
)
from triptych.media.containers import SOUND_CONTAINERS
from triptych.media.windows import plan_windows

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer

    from triptych.core.config import MediaLimits

MAX_CHANNELS = 8
RATES = (4_000, 192_000)
"""Samples a second that are read."""


def decode_sound(
    index: int,
    data: bytes,
    rate: int,
    limits: MediaLimits,
    window_seconds: float | None = None,
    *,
    of_film: bool = False,
) -> Sound:
    """Decode a sound, mix its channels to one by averaging, and resample it.

    Args:
        index: Of the item in its request.
        data: The file.
        rate: Samples a second that the model hears.
        limits: Checked while decoding.
        window_seconds: What the model hears at a time; None where it hears any length.
        of_film: Whether the sound of a video is asked for. Unasked it is an error, never a guess.

    Raises:
        MediaError: not a sound, damaged, cut off, without samples, or over a limit; ``index`` names the item.
        MediaUnavailable: memory is short.
    """
    with open_file(index, data, SOUND_CONTAINERS, limits, "sound") as file:
        stream = _sound_stream(index, file, of_film=of_film)
        start_decoder(stream.codec_context, limits)
        samples = _resampled(_mixed(index, file, stream, limits), rate)
    if not len(samples):
        raise MediaError(index, f"it has no sound: not one sample at {rate} a second", Stage.DECODE)
    window = None if window_seconds is None else max(1, round(window_seconds * rate))
    return Sound(samples, rate, plan_windows(len(samples), window))


def _sound_stream(index: int, file: InputContainer, *, of_film: bool) -> AudioStream:
    stream = first_of(file.streams.audio)
    if stream is None:
        raise MediaError(index, "it has no sound", Stage.DECODE)
    if not of_film and any(is_film(one) for one in file.streams):
        raise MediaError(index, "it is a video; its sound is read where it is asked for", Stage.DECODE)
    check_codec(index, stream, SOUND_CODECS)
    only(file, stream)
    return cast("AudioStream", stream)


class _Stretch(NamedTuple):
    """What one packet sounds like, its channels mixed."""

    samples: npt.NDArray[np.float32]
    rate: int


def _mixed(index: int, file: InputContainer, stream: AudioStream, limits: MediaLimits) -> Iterator[_Stretch]:
    """The mean of all channels, stretch by stretch, at the rate of its frames; a header may say half of it."""
    rate, heard = None, 0
    # Interleaved floats, whatever the codec gives: the binding reads past its table of planes where there are eight.
    interleave = av.AudioResampler(format="flt")
    for frame in _frames(index, file, stream):
        channels = frame.layout.nb_channels
        if channels > MAX_CHANNELS:
            raise MediaError(index, f"{channels} channels; at most {MAX_CHANNELS} are mixed", Stage.DECODE)
        rate = _checked_rate(index, frame.sample_rate, rate)
        heard += frame.samples
        if heard > limits.max_sound_seconds * rate:
            what = f"{heard / rate:.1f} seconds and more; at most {limits.max_sound_seconds}"
            raise MediaError(index, f"{what} (--max-sound-seconds)", Stage.LIMIT)
        for part in interleave.resample(frame):
            mixed = part.to_ndarray().reshape(-1, channels).mean(axis=1, dtype=np.float32)
            if not np.isfinite(mixed).all():
                raise MediaError(index, "damaged: its samples are not finite numbers", Stage.DECODE)
            yield _Stretch(mixed, rate)
    # Of the containers that say nothing about their own size, this one counts its samples.
    stated = stream.duration or 0
    if file.format.name == "flac" and heard < stated:
        raise MediaError(index, f"cut off: {heard} samples of {stated}", Stage.DECODE)


def _checked_rate(index: int, rate: int, before: int | None) -> int:
    if before is not None and rate != before:
        what = f"its rate changes from {before} to {rate} samples a second, which is not supported"
        raise MediaError(index, what, Stage.DECODE)
    if not RATES[0] <= rate <= RATES[1]:
        raise MediaError(index, f"{rate} samples a second; {RATES[0]} to {RATES[1]} are supported", Stage.DECODE)
    return rate


def _frames(index: int, file: InputContainer, stream: AudioStream) -> Iterator[AudioFrame]:
    """All frames. What follows the last one that can be decoded is not sound, where a file may end anywhere."""
    broken: InvalidDataError | None = None
    for packet in packets_of(index, file, stream):
        try:
            frames = stream.codec_context.decode(packet)
        except InvalidDataError as error:
            if file.format.name not in OPEN_ENDED:
                raise
            broken = error
            continue
        if frames and broken is not None:
            raise broken
        yield from frames
    yield from stream.codec_context.decode(None)


def _resampled(stretches: Iterator[_Stretch], rate: int) -> npt.NDArray[np.float32]:
    """All stretches as one, at another rate."""
    parts = [np.empty(0, dtype=np.float32)]
    resampler: soxr.ResampleStream | None = None
    for samples, source in stretches:
        if source == rate:
            parts.append(samples)
            continue
        if resampler is None:
            resampler = soxr.ResampleStream(source, rate, 1, dtype="float32", quality="HQ")
        parts.append(resampler.resample_chunk(samples))
    if resampler is not None:
        parts.append(resampler.resample_chunk(np.empty(0, dtype=np.float32), last=True))
    return np.concatenate(parts)
