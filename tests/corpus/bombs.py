"""Small videos and sounds that claim, or come to, far more than they look like. Made on the spot, in milliseconds.

Each is within all that is checked before a packet is read; what ends it is a limit on the way, or a ceiling.
"""

from __future__ import annotations

import io
import struct
import zlib
from fractions import Fraction
from typing import TYPE_CHECKING

import av

from tests.corpus import sounds
from tests.corpus.clips import Recipe, encoded

if TYPE_CHECKING:
    from collections.abc import Callable

EBML, SEGMENT, TRACKS, TRACK = 0x1A45DFA3, 0x18538067, 0x1654AE6B, 0xAE
NUMBER, UID, KIND, CODEC, DURATION = 0xD7, 0x73C5, 0x83, 0x86, 0x23E383
VIDEO, WIDTH, HEIGHT, AUDIO, RATE, CHANNELS, BITS = 0xE0, 0xB0, 0xBA, 0xE1, 0xB5, 0x9F, 0x6264
ENCODINGS, ENCODING, COMPRESSION = 0x6D80, 0x6240, 0x5034
CLUSTER, TIME, BLOCK = 0x1F43B675, 0xE7, 0xA3


def element(ident: int, *contents: bytes) -> bytes:
    """One part of a Matroska file."""
    body = b"".join(contents)
    return ident.to_bytes((ident.bit_length() + 7) // 8, "big") + (len(body) | 1 << 56).to_bytes(8, "big") + body


def number(ident: int, value: int) -> bytes:
    """A part that is a number."""
    return element(ident, value.to_bytes(4, "big"))


def matroska(track: bytes, blocks: bytes) -> bytes:
    """A file of one track and one cluster."""
    header = element(EBML, element(0x4282, b"matroska"))
    track = element(TRACK, number(NUMBER, 1), number(UID, 1), track)
    return header + element(SEGMENT, element(TRACKS, track), element(CLUSTER, number(TIME, 0), blocks))


def block(content: bytes, at: int = 0) -> bytes:
    """One packet of the first track."""
    return element(BLOCK, b"\x81" + struct.pack(">hB", at, 0x80) + content)


def film_track(width: int, height: int, codec: bytes = b"V_MJPEG", *more: bytes) -> bytes:
    """Of a video."""
    picture = element(VIDEO, number(WIDTH, width), number(HEIGHT, height))
    return number(KIND, 1) + element(CODEC, codec) + picture + b"".join(more)


def sound_track(channels: int = 1, rate: float = 8000.0) -> bytes:
    """Of plain samples."""
    layout = element(AUDIO, element(RATE, struct.pack(">d", rate)), number(CHANNELS, channels), number(BITS, 16))
    return number(KIND, 2) + element(CODEC, b"A_PCM/INT/LIT") + layout


def endless_frames() -> bytes:
    """Half a million frames of two bytes each."""
    return matroska(film_track(16, 16), block(b"\xff\xd8") * 500_000)


def endless_packets() -> bytes:
    """A million packets of a sound, of one sample each: two minutes, in as many parts as of no other sound."""
    return matroska(sound_track(), block(b"\0\0") * 1_000_000)


def packed_frames() -> bytes:
    """Packets of 9 MB each, packed into 9 kB: together they would be four gigabytes."""
    unpack = element(ENCODINGS, element(ENCODING, element(COMPRESSION, number(0x4254, 0))))
    return matroska(film_track(16, 16, b"V_MJPEG", unpack), block(zlib.compress(bytes(9_000_000))) * 450)


def huge_frames() -> bytes:
    """Frames of four thousand million pixels, as the header says."""
    return matroska(film_track(65_535, 65_535), block(b"\xff\xd8"))


def huge_gif() -> bytes:
    """A GIF of 65535 x 65535."""
    data = bytearray(encoded(Recipe("gif", "gif", "rgb8", frames=2)))
    data[6:10] = b"\xff" * 4
    return bytes(data)


def sudden_frames() -> bytes:
    """A header and a frame of 16 x 16, then a thousand grey frames of 4096 x 2304, in a few bytes each."""
    small, _ = _grey(16, 16)
    whole, same = _grey(4096, 2304)
    blocks = [block(small), block(whole, 30), *(block(same, at * 30) for at in range(2, 1000))]
    return matroska(film_track(16, 16, b"V_VP8"), b"".join(blocks))


def _grey(width: int, height: int) -> list[bytes]:
    """The packets of two frames."""
    encoder = av.CodecContext.create("libvpx", "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = width, height, "yuv420p", Fraction(1, 25)
    encoder.options = {"cpu-used": "8", "deadline": "realtime", "lag-in-frames": "0"}
    frame = av.VideoFrame(width, height, "yuv420p")
    for plane in frame.planes:
        plane.update(b"\x80" * plane.buffer_size)
    packets = []
    for frame.pts in range(2):
        packets += [bytes(packet) for packet in encoder.encode(frame)]
    return packets


def silent_hour() -> bytes:
    """An hour of silence, in a megabyte."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="flac") as file:
        stream = file.add_stream("flac", rate=8000, layout="mono")
        frame = av.AudioFrame(format="s16", layout="mono", samples=4096)
        frame.planes[0].update(bytes(8192))
        for at in range(3600 * 8000 // 4096):
            frame.rate, frame.pts = 8000, at * 4096
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return buffer.getvalue()


CLIPS: dict[str, tuple[Callable[[], bytes], str]] = {
    "endless frames": (endless_frames, "limit: 36001 frames and more; at most 36000 (--max-source-frames)"),
    "packed frames": (packed_frames, "limit: decoding this video took more than"),
    "huge frames": (huge_frames, "decode: damaged or cut off: the size of its frames cannot be told"),
    "a huge gif": (huge_gif, "decode: damaged or cut off: the size of its frames cannot be told"),
    "sudden frames": (sudden_frames, "limit: decoding this video took more than"),
}
"""Each with how its reason begins, after the item."""
SOUNDS: dict[str, tuple[Callable[[], bytes], str]] = {
    "endless packets": (endless_packets, "limit: 601."),
    "packed frames": (packed_frames, "decode: it has no sound"),
    "a silent hour": (silent_hour, "limit: 601."),
    "ten minutes and more of eight channels": (lambda: sounds.wav(8000, 8, 601.5, "u1"), "limit: 601."),
}
