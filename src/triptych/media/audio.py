"""An encoded sound to one channel at the model's rate. Pure: bytes in, a sound out; made to run in a worker process.

    bytes -> container known and whole -> packets counted -> samples of all channels -> mean -> resampled

The packets are read once before anything is decoded: they tell how long the sound plays, whatever its header says, so
one that is far too long costs nothing. Each decoded stretch is mixed, resampled and handed on as it comes: memory holds
one packet, and a sound whose packets lied is found to be too long when it is.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, cast

import av
import numpy as np
import soxr
from av.error import InvalidDataError

from triptych.core.errors import MediaError
from triptych.core.media import Stage
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
from triptych.media.limits import MAX_CHANNELS, SOUND_RATES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer

    from triptych.core.config import MediaLimits

    Samples = npt.NDArray[np.float32]
    """Shape [samples]."""

_PACKET_SECONDS = 0.001
"""What a packet counts for at least, whatever it says: the shortest that are made play 2.5 milliseconds."""
_SLACK_SECONDS = 1.0
"""By which packets may claim more than is heard: encoders fill up their last one, and say how much to leave out."""


class _Stretch(NamedTuple):
    """What one packet sounds like, its channels mixed."""

    samples: Samples
    rate: int


class OpenSound:
    """A sound whose packets are counted and of which nothing is decoded yet; see ``open_sound``."""

    def __init__(self, index: int, samples: int, packets: int, stretches: Iterator[_Stretch]) -> None:
        self._index = index
        self._stretches = stretches
        self.samples = samples
        """Of all channels, as the packets claim them."""
        self.packets = packets

    def decode(self, rate: int, keep: Callable[[Samples], object]) -> int:
        """Decode once; hands on each stretch as it comes, and returns how many samples came.

        Args:
            rate: Samples a second that the model hears.
            keep: Takes a stretch, which is nobody's after.

        Raises:
            MediaError: damaged, over a limit, or without one sample.
        """
        count = 0
        for samples in _resampled(self._stretches, rate):
            if not np.isfinite(samples).all():
                raise MediaError(self._index, "damaged: its samples are not finite numbers", Stage.DECODE)
            keep(samples)
            count += len(samples)
        if not count:
            raise MediaError(self._index, f"it has no sound: not one sample at {rate} a second", Stage.DECODE)
        return count


@contextmanager
def open_sound(index: int, data: bytes, limits: MediaLimits, *, of_film: bool = False) -> Iterator[OpenSound]:
    """Open a sound; whatever goes wrong inside the block is a MediaError too.

    Args:
        index: Of the item in its request.
        data: The file.
        limits: Checked before and while decoding.
        of_film: Whether the sound of a video is asked for. Unasked it is an error, never a guess.

    Raises:
        MediaError: not a sound, damaged, cut off, or over a limit; ``index`` names the item.
        MediaUnavailable: memory is short.
    """
    with open_file(index, data, SOUND_CONTAINERS, limits, "sound") as file:
        stream = _sound_stream(index, file, of_film=of_film)
        packets, seconds = _counted(index, file, stream, limits)
    with open_file(index, data, SOUND_CONTAINERS, limits, "sound") as file:
        stream = _sound_stream(index, file, of_film=of_film)
        start_decoder(stream.codec_context, limits)
        samples = round(seconds * stream.codec_context.sample_rate * stream.codec_context.layout.nb_channels)
        yield OpenSound(index, samples, packets, _mixed(index, file, stream, limits))


class _Counted(NamedTuple):
    """The packets of a sound, and how long they say that they play."""

    packets: int
    seconds: float


def _counted(index: int, file: InputContainer, stream: AudioStream, limits: MediaLimits) -> _Counted:
    packets, seconds = 0, 0.0
    tick = float(stream.time_base or 0)
    for packet in packets_of(index, file, stream):
        packets += 1
        seconds += max((packet.duration or 0) * tick, _PACKET_SECONDS)
        if seconds > limits.max_sound_seconds + _SLACK_SECONDS:
            raise _too_long(index, f"{seconds:.1f} seconds and more", limits)
    return _Counted(packets, seconds)


def _too_long(index: int, what: str, limits: MediaLimits) -> MediaError:
    return MediaError(index, f"{what}; at most {limits.max_sound_seconds} (--max-sound-seconds)", Stage.LIMIT)


def _sound_stream(index: int, file: InputContainer, *, of_film: bool) -> AudioStream:
    stream = first_of(file.streams.audio)
    if stream is None:
        raise MediaError(index, "it has no sound", Stage.DECODE)
    if not of_film and any(is_film(one) for one in file.streams):
        raise MediaError(index, "it is a video; its sound is read where it is asked for", Stage.DECODE)
    check_codec(index, stream, SOUND_CODECS)
    only(file, stream)
    return cast("AudioStream", stream)


def _mixed(index: int, file: InputContainer, stream: AudioStream, limits: MediaLimits) -> Iterator[_Stretch]:
    """The mean of all channels, stretch by stretch, at the rate of its frames; a header may say half of it."""
    rate, heard = None, 0
    # Interleaved floats, whatever the codec gives: the binding reads past its table of planes where there are eight.
    interleave = av.AudioResampler(format="flt")
    for frame in _frames(index, file, stream):
        channels = frame.layout.nb_channels
        if channels > MAX_CHANNELS:
            raise MediaError(index, f"{channels} channels; at most {MAX_CHANNELS} are mixed", Stage.LIMIT)
        rate = _checked_rate(index, frame.sample_rate, rate)
        heard += frame.samples
        if heard > limits.max_sound_seconds * rate:
            raise _too_long(index, f"{heard / rate:.1f} seconds and more", limits)
        for part in interleave.resample(frame):
            yield _Stretch(part.to_ndarray().reshape(-1, channels).mean(axis=1, dtype=np.float32), rate)
    # Of the containers that say nothing about their own size, this one counts its samples.
    stated = stream.duration or 0
    if file.format.name == "flac" and heard < stated:
        raise MediaError(index, f"cut off: {heard} samples of {stated}", Stage.DECODE)


def _checked_rate(index: int, rate: int, before: int | None) -> int:
    if before is not None and rate != before:
        what = f"its rate changes from {before} to {rate} samples a second, which is not supported"
        raise MediaError(index, what, Stage.DECODE)
    if not SOUND_RATES[0] <= rate <= SOUND_RATES[1]:
        raise MediaError(
            index, f"{rate} samples a second; at least {SOUND_RATES[0]}, at most {SOUND_RATES[1]}", Stage.LIMIT
        )
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


def _resampled(stretches: Iterator[_Stretch], rate: int) -> Iterator[Samples]:
    """All stretches at another rate."""
    resampler: soxr.ResampleStream | None = None
    for samples, source in stretches:
        if source == rate:
            yield samples
            continue
        if resampler is None:
            resampler = soxr.ResampleStream(source, rate, 1, dtype="float32", quality="HQ")
        yield resampler.resample_chunk(samples)
    if resampler is not None:
        yield resampler.resample_chunk(np.empty(0, dtype=np.float32), last=True)
