"""What a decode process answered, checked: nothing that it says is believed.

    room     before it is asked: how many bytes may come out
    answer   -> its numbers within what was asked for -> so many bytes, taken from the process -> Picture, Clip or Sound

A process runs what strangers wrote, so it may have been taken over. From then until it ends it reads every file that
it is given, whoever sent it, and answers what it likes. What is checked here and in decode_channel.py keeps that from
spreading: an answer is to the task that was asked, within its limits, in memory of the engine's that the process can
no longer change; neither the rest of that memory nor what other processes decode is touched. A process has the rights
of the user who started the engine, though: who does not trust the decoders of Pillow and FFmpeg with other people's
files, the disk and the network has to confine the user.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from triptych.core.clip import Clip, ClipSurvey, FramePlan, FrameSize
from triptych.core.errors import InvalidRequest
from triptych.core.media import Picture
from triptych.core.sound import Sound
from triptych.media.decode_wire import (
    CHANNELS,
    INDEX,
    SAMPLE,
    TIMESTAMP,
    Frames,
    Pixels,
    Samples,
    Survey,
    pixels_header,
)
from triptych.media.windows import plan_windows

if TYPE_CHECKING:
    from triptych.core.clip import FrameFit, FrameSampling
    from triptych.core.config import MediaLimits
    from triptych.core.picture_fit import PictureFit
    from triptych.media.decode_output import Output
    from triptych.media.header import Size

_PLACE = np.dtype(INDEX).itemsize + np.dtype(TIMESTAMP).itemsize
"""Bytes that say which frame it is."""
_LENGTH_PER_AREA = 15
"""More than both sides of the narrowest picture that is resized come to, by the root of its area: 1 : 200."""


def picture_room(claimed: Size, fit: PictureFit | None) -> int:
    """Bytes that the picture may come to whose header claims a size; it may still be smaller than that, or turned."""
    pixels = claimed.pixels
    if fit is not None:  # the nearest size within its bounds, and then whole cells along both sides
        pixels = max(min(pixels, fit.max_pixels), fit.min_pixels)
        pixels += _LENGTH_PER_AREA * fit.cell * (math.isqrt(pixels) + 4 * fit.cell)
    return len(pixels_header(pixels, pixels)) + pixels * CHANNELS


def clip_room(sampling: FrameSampling, limits: MediaLimits) -> int:
    """Bytes that the frames of a video may come to, with their indices and times."""
    return limits.max_clip_pixels * CHANNELS + _most_frames(sampling, limits) * _PLACE


def sound_room(rate: int, limits: MediaLimits) -> int:
    """Bytes that the samples of a sound may come to."""
    return _most_samples(rate, limits) * np.dtype(SAMPLE).itemsize


def picture_of(answer: Pixels, output: Output, claimed: Size, fit: PictureFit | None) -> Picture:
    """The pixels where they lie.

    Raises:
        ValueError: they are not what was asked for.
        OSError: they cannot be mapped just now.
    """
    width, height = answer.width, answer.height
    source = FrameSize(answer.source_height, answer.source_width)
    if source.width * source.height > claimed.pixels:
        raise ValueError(f"{source.width} x {source.height} where its header says {claimed.width} x {claimed.height}")
    if (height, width) != (source if fit is None else fit.size(source)):
        raise ValueError(f"{width} x {height} pixels of a picture of {source.width} x {source.height}")
    start = len(pixels_header(width, height))
    pages = output.taken(start + width * height * CHANNELS)
    return Picture(np.frombuffer(pages, np.uint8, offset=start).reshape(height, width, CHANNELS))


def survey_of(answer: Survey, sampling: FrameSampling, limits: MediaLimits) -> ClipSurvey:
    """What decoding a video will cost.

    Raises:
        ValueError: more than was asked for or is allowed, which the process would have refused.
    """
    survey = ClipSurvey(answer.frames, answer.kept_pixels, answer.decoded_pixels)
    most = (_most_frames(sampling, limits), limits.max_clip_pixels, limits.max_decoded_pixels)
    if any(value > limit for value, limit in zip(survey, most, strict=True)):
        raise ValueError(f"a video of {survey.frames} frames and {survey.decoded_pixels} pixels")
    return survey


def clip_of(answer: Frames, output: Output, sampling: FrameSampling, fit: FrameFit | None, limits: MediaLimits) -> Clip:
    """The frames where they lie.

    Raises:
        ValueError: they are not what was asked for, or contradict themselves.
        OSError: they cannot be mapped just now.
    """
    count, height, width = answer.frames, answer.height, answer.width
    most = _most_frames(sampling, limits)
    if count > most or count * height * width > limits.max_clip_pixels:
        raise ValueError(f"{count} frames of {width} x {height} where at most {most} were asked for")
    if fit is not None and (height % fit.cell or width % fit.cell):
        raise ValueError(f"frames of {width} x {height} are not of whole cells of {fit.cell}")
    if answer.total > limits.max_source_frames or not answer.duration <= limits.max_clip_seconds:
        raise ValueError(f"{answer.total} frames of {answer.duration} s in the file")
    length = count * height * width * CHANNELS
    pages = output.taken(length + count * _PLACE)
    indices = np.frombuffer(pages, INDEX, count, length)
    timestamps = np.frombuffer(pages, TIMESTAMP, count, length + indices.nbytes)
    if not np.isfinite(timestamps).all():
        raise ValueError("times that are not finite numbers")
    try:
        plan = FramePlan(tuple(indices.tolist()), tuple(timestamps.tolist()), answer.fps, answer.total, answer.duration)
    except InvalidRequest as error:
        raise ValueError(str(error)) from error
    frames = np.frombuffer(pages, np.uint8, length).reshape(count, height, width, CHANNELS)
    return Clip(frames, plan)


def sound_of(answer: Samples, output: Output, rate: int, window: int | None, limits: MediaLimits) -> Sound:
    """The samples where they lie.

    Raises:
        ValueError: they are not what was asked for.
        OSError: they cannot be mapped just now.
    """
    if answer.samples > _most_samples(rate, limits):
        raise ValueError(f"{answer.samples} samples where {limits.max_sound_seconds} s may be heard")
    pages = output.taken(answer.samples * np.dtype(SAMPLE).itemsize)
    samples = np.frombuffer(pages, SAMPLE)
    if not np.isfinite(samples).all():
        raise ValueError("samples that are not finite numbers")
    return Sound(samples, rate, plan_windows(answer.samples, window))


def _most_frames(sampling: FrameSampling, limits: MediaLimits) -> int:
    return min(limits.max_clip_frames, sampling.num_frames or sampling.max_frames or limits.max_clip_frames)


def _most_samples(rate: int, limits: MediaLimits) -> int:
    """Within the limits at a model's rate; the resampler rounds up, and may add its last one."""
    return limits.max_sound_seconds * rate + 2
