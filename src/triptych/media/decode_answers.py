"""What a decode process answered, checked and mapped: nothing that it says is believed.

    descriptor -> sealed for good, and as long as its numbers come to -> mapped, read-only -> Picture, Clip or Sound

A process runs what strangers wrote, so it may have been taken over. From then until it ends it reads every file that
it is given, whoever sent it, and answers what it likes. What is checked here and in decode_channel.py keeps that from
spreading: an answer is to the task that was asked, within its limits, in memory that can no longer be changed; neither
the engine's own memory nor what other processes decode is touched. A process has the rights of the user who started the
engine, though: who does not trust the decoders of Pillow and FFmpeg with other people's files, the disk and the network
has to confine the user.
"""

from __future__ import annotations

import fcntl
import mmap
import os
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
    from triptych.media.header import Size

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""What keeps a descriptor's content and length as they are, whoever else has it. F_SEAL_WRITE is refused by the kernel
while anybody has writable pages of it mapped; F_SEAL_FUTURE_WRITE, which leaves such pages be, does not do."""


def picture_of(answer: Pixels, descriptor: int, claimed: Size, fit: PictureFit | None) -> Picture:
    """The pixels where they lie.

    Raises:
        ValueError: they are not what was asked for.
    """
    width, height = answer.width, answer.height
    source = FrameSize(answer.source_height, answer.source_width)
    if source.width * source.height > claimed.pixels:
        raise ValueError(f"{source.width} x {source.height} where its header says {claimed.width} x {claimed.height}")
    if (height, width) != (source if fit is None else fit.size(source)):
        raise ValueError(f"{width} x {height} pixels of a picture of {source.width} x {source.height}")
    start = len(pixels_header(width, height))
    pages = _map(descriptor, start + width * height * CHANNELS)
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


def clip_of(
    answer: Frames, descriptor: int, sampling: FrameSampling, fit: FrameFit | None, limits: MediaLimits
) -> Clip:
    """The frames where they lie.

    Raises:
        ValueError: they are not what was asked for, or contradict themselves.
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
    pages = _map(descriptor, length + count * (np.dtype(INDEX).itemsize + np.dtype(TIMESTAMP).itemsize))
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


def sound_of(answer: Samples, descriptor: int, rate: int, window: int | None, limits: MediaLimits) -> Sound:
    """The samples where they lie.

    Raises:
        ValueError: they are not what was asked for.
    """
    if answer.samples > most_samples(rate, limits):
        raise ValueError(f"{answer.samples} samples where {limits.max_sound_seconds} s may be heard")
    pages = _map(descriptor, answer.samples * np.dtype(SAMPLE).itemsize)
    samples = np.frombuffer(pages, SAMPLE)
    if not np.isfinite(samples).all():
        raise ValueError("samples that are not finite numbers")
    return Sound(samples, rate, plan_windows(answer.samples, window))


def _most_frames(sampling: FrameSampling, limits: MediaLimits) -> int:
    return min(limits.max_clip_frames, sampling.num_frames or sampling.max_frames or limits.max_clip_frames)


def most_samples(rate: int, limits: MediaLimits) -> int:
    """Of a sound within the limits at a model's rate; the resampler rounds up, and may add its last one."""
    return limits.max_sound_seconds * rate + 2


def _map(descriptor: int, length: int) -> mmap.mmap:
    """Memory that its process cannot change, or take away, any more.

    Raises:
        ValueError: it could, or it is not of this length.
        OSError: it cannot be mapped just now; each mapping takes a descriptor of the engine's.
    """
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        sealed = False  # no memory of its own, but some other file
    if not sealed or os.fstat(descriptor).st_size != length:
        raise ValueError("the descriptor is not of what was decoded")
    # Private, which is the same where nobody can write: kernels before 6.7 refuse to share what is sealed.
    return mmap.mmap(descriptor, length, mmap.MAP_PRIVATE, mmap.PROT_READ)
