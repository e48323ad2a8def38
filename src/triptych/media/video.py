"""An encoded video to the frames that a plan chooses. Pure: bytes in, a clip out; made to run in a worker process.

    bytes -> container known and whole -> packets (nothing decoded yet) -> times of all frames -> FramePlan
                                             |                                                      |
                                             +--> decoded in file order, up to the last chosen one --+--> Clip

Nothing seeks. The packets are read first and all kept, they are the file itself; so the plan rests on what is in the
file, not on what its header says, and a limit on it is met before the first frame is decoded. A decoder
that gives a frame at another time than its packet promised (a frame that is never shown) is met by taking the frame
on display at that moment.
"""

from __future__ import annotations

import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from PIL import Image

from triptych.core.clip import ClipSurvey, FrameSize
from triptych.core.errors import MediaError
from triptych.core.media import Stage
from triptych.media.av_file import (
    VIDEO_CODECS,
    check_codec,
    first_of,
    is_film,
    only,
    open_file,
    packets_of,
    start_decoder,
)
from triptych.media.containers import VIDEO_CONTAINERS
from triptych.media.frame_plan import Timeline, on_display, plan_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

    from triptych.core.clip import FrameFit, FramePlan, FrameSampling
    from triptych.core.config import MediaLimits

    Frame = npt.NDArray[np.uint8]
    """Shape [height, width, 3]."""

_WHITE = (255, 255, 255, 255)
_PALETTE = "pal8"
"""The one format with transparency whose description does not say so."""


@dataclass(frozen=True, slots=True, eq=False)
class _Film:
    """The packets of one video stream, and when their frames are shown."""

    packets: Sequence[Packet[VideoStream]]
    ticks: npt.NDArray[np.int64]
    """When each frame is shown, by the stream's clock, [frames], ascending."""
    timeline: Timeline
    by_order: bool
    """Whether frames are told apart by their order: the container keeps no time of showing."""


class DecodedFrames(NamedTuple):
    """What became of a clip whose frames were kept as they came."""

    plan: FramePlan
    """Of the frames that they turned out to be."""
    size: FrameSize
    """Of each of them, as they were kept."""


class OpenClip:
    """A video whose packets are read and of which nothing is decoded yet; see ``open_clip``."""

    def __init__(
        self, film: _Film, plan: FramePlan, survey: ClipSurvey, decoded: Iterator[tuple[int, VideoFrame]], reel: _Reel
    ) -> None:
        self._film = film
        self._plan = plan
        self._decoded = decoded
        self._reel = reel
        self.survey = survey

    def decode(self, keep: Callable[[Frame], object]) -> DecodedFrames:
        """Decode once; hands on each chosen frame as it comes, [height, width, 3], which is nobody's after.

        Raises:
            MediaError: damaged, over a limit, or without some of its frames.
        """
        film, reel, places = self._film, self._reel, []
        wanted = [int(film.ticks[place]) for place in self._plan.indices]
        for tick, frame in on_display(wanted, self._decoded):
            place = int(np.searchsorted(film.ticks, tick, side="right")) - 1
            if frame.is_corrupt:
                when = f"{film.timeline.times[place]:.2f}"
                raise MediaError(reel.index, f"damaged: its frame at {when} s is incomplete", Stage.DECODE)
            keep(reel.fitted(frame))
            places.append(place)
        return DecodedFrames(film.timeline.plan(np.array(places)), reel.size(len(places)))


@contextmanager
def open_clip(
    index: int, data: bytes, sampling: FrameSampling, limits: MediaLimits, fit: FrameFit | None = None
) -> Iterator[OpenClip]:
    """Open a video and choose frames; whatever goes wrong inside the block is a MediaError too.

    Args:
        index: Of the item in its request.
        data: The file.
        sampling: Which frames are asked for.
        limits: Checked before what they guard is allocated.
        fit: Resizes each frame as it is decoded; without it frames keep the size of the first one.

    Raises:
        MediaError: not a video, damaged, cut off, without frames, or over a limit; ``index`` names the item.
        MediaUnavailable: memory is short.
    """
    if (sampling.num_frames or 0) > limits.max_clip_frames:
        raise _over(index, f"{sampling.num_frames} frames asked for", limits.max_clip_frames, "clip-frames")
    with open_file(index, data, VIDEO_CONTAINERS, limits, "video") as file:
        stream = _film_stream(index, file)
        size = FrameSize(stream.height, stream.width)
        _check_frame(index, size, limits)
        film = _read(index, file, stream, limits)
        if film.timeline.duration > limits.max_clip_seconds:
            raise _over(index, f"{film.timeline.duration:.1f} seconds", limits.max_clip_seconds, "clip-seconds")
        plan = plan_frames(film.timeline, sampling, limits.max_clip_frames)
        pixels = (plan.indices[-1] + 1) * size.pixels
        _check_work(index, pixels, limits)
        start_decoder(stream.codec_context, limits)
        decoded = _decoded(index, film, stream, limits)
        count = len(plan.indices)
        reel = _Reel(index, count, size, fit)
        kept = count * reel.announced.pixels
        if kept > limits.max_clip_pixels:
            what = f"{count} frames of {reel.announced.width} x {reel.announced.height} are {kept} pixels"
            raise _over(index, what, limits.max_clip_pixels, "clip-pixels")
        yield OpenClip(film, plan, ClipSurvey(count, kept, pixels), decoded, reel)


def _over(index: int, value: str, limit: int, flag: str) -> MediaError:
    return MediaError(index, f"{value}; at most {limit} (--max-{flag})", Stage.LIMIT)


def _check_frame(index: int, size: FrameSize, limits: MediaLimits) -> None:
    if min(size) < 1:
        raise MediaError(index, "damaged or cut off: the size of its frames cannot be told", Stage.DECODE)
    if size.pixels > limits.max_frame_pixels:
        what = f"frames of {size.width} x {size.height} are {size.pixels} pixels"
        raise _over(index, what, limits.max_frame_pixels, "frame-pixels")


def _check_work(index: int, pixels: int, limits: MediaLimits) -> None:
    if pixels > limits.max_decoded_pixels:
        raise _over(index, f"{pixels} pixels to decode", limits.max_decoded_pixels, "decoded-pixels")


def _film_stream(index: int, file: InputContainer) -> VideoStream:
    stream = first_of([one for one in file.streams if is_film(one)])
    if stream is None:
        what = "only sound" if file.streams.audio else "nothing to show"
        cover = " and a still picture" if file.streams.video else ""
        raise MediaError(index, f"it has no video: {what}{cover}", Stage.DECODE)
    check_codec(index, stream, VIDEO_CODECS)
    only(file, stream)
    return cast("VideoStream", stream)


def _read(index: int, file: InputContainer, stream: VideoStream, limits: MediaLimits) -> _Film:
    """All packets of the stream, and the times that they give their frames."""
    packets = []
    for packet in packets_of(index, file, stream):
        packets.append(cast("Packet[VideoStream]", packet))
        if len(packets) > limits.max_source_frames:
            raise _over(index, f"{len(packets)} frames and more", limits.max_source_frames, "source-frames")
    shown = [packet for packet in packets if not packet.is_discard]
    if not shown:
        raise MediaError(index, "it has no frames", Stage.DECODE)
    # An AVI file keeps only the order of decoding: the n-th frame shown is shown when the n-th packet was due.
    by_order = file.format.name == "avi" or any(packet.pts is None for packet in shown)
    due = [packet.dts if by_order else packet.pts for packet in shown]
    if any(tick is None for tick in due):
        due = list(range(len(shown)))
    ticks = np.unique(np.array(due, dtype=np.int64))
    tick = float(stream.time_base or 1 / (stream.average_rate or 24))
    timeline = Timeline.measured(
        ticks.astype(np.float64) * tick,
        tick=tick,
        rates=[float(rate) for rate in (stream.average_rate, stream.guessed_rate, stream.base_rate) if rate],
        last=max(packet.duration or 0 for packet, at in zip(shown, due, strict=True) if at == ticks[-1]) * tick,
    )
    return _Film(packets, ticks, timeline, by_order)


def _decoded(index: int, film: _Film, stream: VideoStream, limits: MediaLimits) -> Iterator[tuple[int, VideoFrame]]:
    """All frames in the order they are shown, each with the tick from which it is."""
    before, pixels = None, 0
    for order, frame in enumerate(_frames(film, stream)):
        pixels += frame.height * frame.width
        # Again: frames may grow on the way.
        _check_frame(index, FrameSize(frame.height, frame.width), limits)
        _check_work(index, pixels, limits)
        tick = int(film.ticks[min(order, len(film.ticks) - 1)])
        if not film.by_order and frame.pts is not None:
            tick = frame.pts
        if before is not None and tick <= before:
            raise MediaError(index, "damaged: the times of its frames run backwards", Stage.DECODE)
        before = tick
        yield tick, frame


def _frames(film: _Film, stream: VideoStream) -> Iterator[VideoFrame]:
    for packet in film.packets:
        yield from stream.codec_context.decode(packet)
    yield from stream.codec_context.decode(None)


class _Reel:
    """Turns decoded frames into those that are kept, all of one size, known once the first of them has shown its own.

    A header may say anything of it, and some codecs change it on the way. What a header announces is counted before
    anything is decoded, so no frame is kept that is larger; a stored one may be, where it is made as small.

    Args:
        index: Of the item in its request.
        count: Frames that are kept.
        header: The size that the header gives them.
        fit: As in ``open_clip``.

    Raises:
        MediaError: frames of this shape cannot be used.
    """

    def __init__(self, index: int, count: int, header: FrameSize, fit: FrameFit | None) -> None:
        self.index = index
        self._count = count
        self._header = header
        self._fit = fit
        self._size: FrameSize | None = None
        turned = FrameSize(header.width, header.height)
        self.announced = max(self._made(header), self._made(turned), key=lambda size: size.pixels)
        """What frames are kept in; the larger one, as it is not known yet whether they are turned."""

    def fitted(self, frame: VideoFrame) -> Frame:
        """One frame, converted, upright and resized.

        Raises:
            MediaError: frames of this shape cannot be used, or are larger than was announced.
        """
        picture = _upright(_rgb(frame), frame)
        if self._size is None:
            size = self._made(FrameSize(*picture.shape[:2]))
            if size.pixels > self.announced.pixels:
                header = f"{self._header.width} x {self._header.height}"
                what = f"its header says {header}, but its frames are {frame.width} x {frame.height}"
                raise MediaError(self.index, what, Stage.DECODE)
            self._size = size
        if picture.shape[:2] == self._size:
            return picture
        resample = Image.Resampling.BICUBIC if self._fit is None else Image.Resampling(self._fit.resample)
        wide, high = self._size.width, self._size.height
        return np.asarray(Image.fromarray(picture).resize((wide, high), resample=resample))

    def size(self, kept: int) -> FrameSize:
        """Of all frames, of which so many came.

        Raises:
            MediaError: some are missing.
        """
        if self._size is None or kept < self._count:
            what = f"damaged or cut off: {kept} of {self._count} chosen frames could be decoded"
            raise MediaError(self.index, what, Stage.DECODE)
        return self._size

    def _made(self, source: FrameSize) -> FrameSize:
        """What frames of one size are kept in."""
        if self._fit is None:
            return source
        try:
            return self._fit.size(self._count, source)
        except ValueError as error:
            raise MediaError(self.index, str(error), Stage.PREPROCESS) from error


def _rgb(frame: VideoFrame) -> Frame:
    """[height, width, 3], what is transparent on white."""
    if frame.format.name == _PALETTE or any(component.is_alpha for component in frame.format.components):
        layer = Image.fromarray(cast("Frame", frame.to_ndarray(format="rgba", threads=1)))
        flat = Image.alpha_composite(Image.new("RGBA", layer.size, _WHITE), layer)
        return np.asarray(flat.convert("RGB"))
    return cast("Frame", frame.to_ndarray(format="rgb24", threads=1))


def _upright(picture: Frame, frame: VideoFrame) -> Frame:
    """Turned and mirrored as the file's display matrix says, to the nearest quarter turn.

    The matrix sends the stored place (x, y) to (a x + c y, b x + d y), with a, b, c, d at 0, 1, 3 and 4 of nine.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return picture
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(cast("bytes", matrix)))
    if abs(b) + abs(c) > abs(a) + abs(d):
        picture, across, down = picture.swapaxes(0, 1), c, b
    else:
        across, down = a, d
    return np.ascontiguousarray(picture[:: -1 if down < 0 else 1, :: -1 if across < 0 else 1])
