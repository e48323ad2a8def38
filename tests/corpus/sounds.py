"""Sounds made on the spot, each with what must come of it.

Channel ``k`` of a sound is a sine of 60 Hz, which a channel for low sounds keeps too, ``k + 1`` tenths of full scale
loud: their mean tells whether every channel was heard, and heard alike.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING

import av
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

HERTZ = 60
LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}
_CHUNK = 4096


def loudness(channels: int) -> float:
    """Of the mean of all channels, at its peak."""
    return sum(range(1, channels + 1)) / channels / 10


def tone(rate: int, samples: int, channels: int = 1) -> npt.NDArray[np.float32]:
    """[samples, channels]."""
    wave = np.sin(2 * np.pi * HERTZ * np.arange(samples) / rate)
    return (wave[:, None] * np.arange(1, channels + 1) / 10).astype(np.float32)


def wav(rate: int, channels: int = 1, seconds: float = 1.0, kind: str = "i2") -> bytes:
    """A WAV file of plain samples, written here: no encoder makes every number of channels."""
    samples = tone(rate, round(rate * seconds), channels)
    if kind == "f4":
        data = samples.astype("<f4").tobytes()
    elif kind == "u1":
        data = (samples * 127 + 128).round().astype("u1").tobytes()
    else:
        data = (samples * 32767).round().astype("<i2").tobytes()
    width = int(kind[1])
    header = struct.pack(
        "<HHIIHH", 3 if kind == "f4" else 1, channels, rate, rate * channels * width, channels * width, 8 * width
    )
    chunks = b"WAVEfmt " + struct.pack("<I", 16) + header + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


@dataclass(frozen=True)
class Recipe:
    """How a sound is encoded."""

    container: str = "flac"
    codec: str = "flac"
    rate: int = 48000
    channels: int = 1
    seconds: float = 1.0
    film: bool = False
    """Whether there is a video beside it."""

    def encode(self) -> bytes:
        """The file."""
        buffer = io.BytesIO()
        layout = LAYOUTS[self.channels]
        with av.open(buffer, "w", format=self.container) as file:
            if self.film:
                video = file.add_stream("mpeg4", rate=10)
                video.height = video.width = 16
            stream = file.add_stream(self.codec, rate=self.rate, layout=layout)
            planes = av.AudioResampler(format=stream.format.name, layout=layout, rate=self.rate)
            samples = tone(self.rate, round(self.rate * self.seconds), self.channels)
            for at in range(0, len(samples), _CHUNK):
                part = samples[at : at + _CHUNK]
                frame = av.AudioFrame.from_ndarray(part.reshape(1, -1), "flt", layout)
                frame.sample_rate, frame.pts, frame.time_base = self.rate, at, Fraction(1, self.rate)
                for ready in planes.resample(frame):
                    file.mux(stream.encode(ready))
            for ready in planes.resample(None):
                file.mux(stream.encode(ready))
            file.mux(stream.encode(None))
            if self.film:
                file.mux(video.encode(av.VideoFrame(16, 16, "yuv420p")))
                file.mux(video.encode(None))
        return buffer.getvalue()


@cache
def encoded(recipe: Recipe = Recipe()) -> bytes:
    """The file, encoded once."""
    return recipe.encode()


KINDS = {
    "flac": Recipe(),
    "flac, 8 channels": Recipe(channels=8),
    "mp3": Recipe("mp3", "libmp3lame", 44100, 2),
    "mp3, 16 kHz": Recipe("mp3", "libmp3lame", 16000),
    "aac": Recipe("adts", "aac", 44100, 2),
    "m4a": Recipe("ipod", "aac", 44100, 2),
    "m4a, 8 channels": Recipe("ipod", "aac", 48000, 8),
    "m4a lossless": Recipe("ipod", "alac", 44100, 2),
    "ogg opus": Recipe("ogg", "libopus", 48000, 2),
    "ogg opus, 8 channels": Recipe("ogg", "libopus", 48000, 8),
    "ogg flac": Recipe("ogg", "flac", 44100, 2),
    "webm opus": Recipe("webm", "libopus", 48000, 2),
    "matroska aac, 6 channels": Recipe("matroska", "aac", 48000, 6),
    "mov plain": Recipe("mov", "pcm_s16be", 44100, 2),
    "avi mp3": Recipe("avi", "libmp3lame", 44100, 2),
    "wav, 24 bits": Recipe("wav", "pcm_s24le", 44100, 6),
    "wav, logarithmic": Recipe("wav", "pcm_mulaw", 8000),
}
"""A second of sound in each kind of file that is read."""


def not_finite() -> bytes:
    """Floats that are no numbers."""
    data = bytearray(wav(16000, kind="f4"))
    data[-4000:] = np.full(1000, np.nan, dtype="<f4").tobytes()
    return bytes(data)


@dataclass(frozen=True)
class Bad:
    """A file that must be refused, and how the reason reads."""

    make: Callable[[], bytes]
    reason: str


HOSTILE: dict[str, Bad] = {
    "nothing": Bad(lambda: b"", "decode: the item is empty"),
    "noise": Bad(lambda: b"\x01\x02" * 999, "decode: not a sound that can be read; supported: WAV, FLAC, Ogg, MP3"),
    "a playlist": Bad(lambda: b"#EXTM3U\nfile:///etc/hostname\n", "decode: not a sound"),
    "no samples": Bad(lambda: wav(16000, seconds=0), "decode: it has no sound: not one sample"),
    "no samples, flac": Bad(lambda: Recipe(seconds=0).encode(), "decode: "),
    "a rate of one": Bad(lambda: wav(1, seconds=100), "limit: 1 samples a second; at least 4000, at most 192000"),
    "a rate of a million": Bad(lambda: wav(1_000_000, seconds=0.01), "limit: 1000000 samples a second"),
    "nine channels": Bad(lambda: wav(8000, 9, 0.1), "limit: 9 channels; at most 8 are mixed"),
    "sixty-four channels": Bad(lambda: wav(8000, 64, 0.1), "limit: 64 channels"),
    "samples that are no numbers": Bad(not_finite, "decode: damaged: its samples are not finite numbers"),
    "a film's sound": Bad(
        lambda: encoded(Recipe("mp4", "aac", 16000, film=True)),
        "it is a video; its sound is read where it is asked for",
    ),
    "a codec that is not read": Bad(
        lambda: encoded(Recipe("matroska", "ac3")), "its audio has the codec 'ac3'; supported: aac"
    ),
}
