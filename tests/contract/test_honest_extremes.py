"""Honest videos and sounds at the limits, through processes with the ceilings that an engine has by default."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import av
import numpy as np
import pytest

from triptych.core.clip import FrameFit, FrameSampling
from triptych.core.config import DecodeConfig, MediaLimits
from triptych.media.decode_host import DecodeProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = MediaLimits()
FIT = FrameFit(cell=32, temporal=2, min_pixels=4096, max_pixels=60_000_000)


@pytest.fixture(scope="module")
def worker() -> Iterator[DecodeProcess]:
    worker = DecodeProcess(LIMITS, DecodeConfig())
    yield worker
    assert (worker.starts, worker.deaths) == (1, 0)
    worker.close()


def film(container: str, codec: str, pixels: str, *, side: tuple[int, int], frames: int, **options: str) -> bytes:
    """A drawing that moves sideways."""
    width, height = side
    picture = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    picture = picture.repeat(8, axis=0).repeat(8, axis=1)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=60)
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        stream.options = options
        drawn = [
            av.VideoFrame.from_ndarray(np.roll(picture, 5 * at, axis=1), "rgb24").reformat(format=pixels)
            for at in range(min(frames, 8))
        ]
        for at in range(frames):
            frame = drawn[at % len(drawn)]
            frame.pts = at
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


REFERENCES = {"preset": "ultrafast", "x264-params": "ref=16:bframes=4:keyint=250:rc-lookahead=1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("container", "codec", "pixels", "frames", "options"),
    [
        ("mp4", "libx264", "yuv444p10le", 24, REFERENCES),
        ("mp4", "libx264", "yuv420p", 30, REFERENCES),
        ("mov", "prores_ks", "yuva444p10le", 4, {}),
        ("avi", "mjpeg", "yuvj444p", 8, {}),
        ("gif", "gif", "rgb8", 4, {}),
    ],
)
def test_the_largest_frames(
    worker: DecodeProcess, container: str, codec: str, pixels: str, frames: int, options: dict[str, str]
) -> None:
    data = film(container, codec, pixels, side=(4096, 2304), frames=frames, **options)
    looked_at = min(frames, 20)
    clip = worker.clip(0, data, FrameSampling(num_frames=looked_at), FIT)
    assert clip.frames.shape == (looked_at, *FIT.size(looked_at, (2304, 4096)), 3)
    assert len(set(clip.plan.indices)) == looked_at


@pytest.mark.slow
@pytest.mark.parametrize(("container", "codec"), [("mp4", "libx264"), ("matroska", "mpeg4"), ("webm", "libvpx")])
def test_the_most_frames(worker: DecodeProcess, container: str, codec: str) -> None:
    options = {"libx264": {"preset": "ultrafast"}, "libvpx": {"cpu-used": "8", "deadline": "realtime"}}
    frames = LIMITS.max_source_frames
    data = film(container, codec, "yuv420p", side=(32, 32), frames=frames, **options.get(codec, {}))
    clip = worker.clip(0, data, FrameSampling(num_frames=LIMITS.max_clip_frames), None)
    assert (len(clip.frames), clip.plan.total, clip.plan.indices[-1]) == (768, frames, frames - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("container", "codec", "rate", "layout", "options"),
    [
        ("ogg", "libopus", 48_000, "mono", {"frame_duration": "2.5"}),
        ("flac", "flac", 192_000, "7.1", {}),
        ("adts", "aac", 8_000, "mono", {}),
    ],
)
def test_the_longest_sounds(
    worker: DecodeProcess, container: str, codec: str, rate: int, layout: str, options: dict[str, str]
) -> None:
    seconds = LIMITS.max_sound_seconds - 1
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout=layout)
        stream.options = options
        frame = av.AudioFrame(format=stream.format.name, layout=layout, samples=4800)
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        for at in range(seconds * rate // 4800):
            frame.rate, frame.pts = rate, at * 4800
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    sound = worker.sound(0, buffer.getvalue(), 16_000, 30.0)
    assert sound.seconds == pytest.approx(seconds, abs=1)
    assert len(sound.windows) == 20
