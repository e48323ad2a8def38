"""Videos made on the spot, each with what must come of it.

Every frame shows its own number, in bars that any codec keeps, and a red corner at the top left: so a test can see
which frame it got and which way up it is.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING

import av
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

BITS = 8
WIDTH, HEIGHT = 96, 64
"""Of the drawings, before they are turned: three rows of blocks, the uppermost with the corner, the others bars."""


def drawing(number: int) -> npt.NDArray[np.uint8]:
    """[height, width, 3]: the number in black and white bars, most significant first, below a red corner on grey."""
    picture = np.full((HEIGHT, WIDTH, 3), 128, dtype=np.uint8)
    picture[:16, :24] = (224, 32, 32)
    bar = WIDTH // BITS
    for at in range(BITS):
        picture[24:, at * bar : (at + 1) * bar] = 235 if number >> (BITS - 1 - at) & 1 else 20
    return picture


def number_in(picture: npt.NDArray[np.uint8]) -> int:
    """The number that a decoded frame shows; fails where it shows none or lies on its side."""
    height, width, _ = picture.shape
    red, green, blue = (int(value) for value in picture[height // 10, width // 10])
    assert red > 150 > 100 > max(green, blue), f"no red corner at the top left: {red}, {green}, {blue}"
    row = picture[height * 3 // 4].mean(axis=1)
    levels = [float(row[int(width * (at + 0.5) / BITS)]) for at in range(BITS)]
    assert all(level < 80 or level > 175 for level in levels), f"no bars: {levels}"
    return int("".join("1" if level > 127 else "0" for level in levels), 2)


@dataclass(frozen=True)
class Recipe:
    """How a clip is encoded."""

    container: str = "mp4"
    codec: str = "libx264"
    pixels: str = "yuv420p"
    frames: int = 30
    fps: Fraction = Fraction(30)
    milliseconds: tuple[int, ...] | None = None
    """When each frame is shown, where the rate varies."""
    degrees: int | None = None
    """Display rotation, counter-clockwise, in the file's matrix; frames are stored so that it turns them upright."""
    mirrored: bool = False
    options: tuple[tuple[str, str], ...] = ()
    """Of the codec."""
    flags: str = ""
    """Of an MP4 muxer."""
    title: str = ""

    def encode(self) -> bytes:
        """The file."""
        with _same_priority():
            return self._encode()

    def _encode(self) -> bytes:
        buffer = io.BytesIO()
        options = {"movflags": self.flags} if self.flags else {}
        with av.open(buffer, "w", format=self.container, options=options) as file:
            if self.title:
                file.metadata["title"] = self.title
            stream = file.add_stream(self.codec, rate=self.fps)
            stored = [self._stored(drawing(number)) for number in range(max(self.frames, 1))]
            stream.height, stream.width = stored[0].shape[:2]
            stream.pix_fmt = self.pixels
            stream.options = dict(self.options)
            clock = Fraction(1, 1000) if self.milliseconds else 1 / self.fps
            stream.codec_context.time_base = clock
            if self.degrees is not None or self.mirrored:
                stream.set_display_rotation(self.degrees or 0, hflip=self.mirrored)
            file.start_encoding()
            for number in range(self.frames):
                frame = av.VideoFrame.from_ndarray(stored[number], "rgb24").reformat(format=self.pixels)
                frame.pts = self.milliseconds[number] if self.milliseconds else number
                frame.time_base = clock
                file.mux(stream.encode(frame))
            file.mux(stream.encode())
        return buffer.getvalue()

    def _stored(self, picture: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """What the display matrix turns into the picture."""
        mirrored = picture[:, ::-1] if self.mirrored else picture
        return np.ascontiguousarray(np.rot90(mirrored, -(self.degrees or 0) // 90))


@contextlib.contextmanager
def _same_priority() -> Iterator[None]:
    """Undo what SVT-AV1 does where it may: it gives the thread that calls it the highest real-time priority.

    All threads and processes that are begun afterwards would have it too, and two that wait in a loop for a third
    would wait forever on two cores.
    """
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, priority)


@cache
def encoded(recipe: Recipe = Recipe()) -> bytes:
    """The file, encoded once."""
    return recipe.encode()


VARIABLE = (0, 40, 80, 120, 1000, 1040, 5000, 5040, 9000, 9033)
"""Milliseconds: bursts and long stills."""
FAST = (("preset", "ultrafast"),)
KINDS = {
    "mp4 h264 with B frames": Recipe(),
    "mp4 h264 lossless": Recipe(codec="libx264rgb", pixels="rgb24", options=(("qp", "0"), *FAST)),
    "mp4 mpeg4": Recipe(codec="mpeg4"),
    "mp4 hevc": Recipe(codec="libx265", options=(("x265-params", "log-level=none:pools=1"), *FAST)),
    "mp4 av1": Recipe(codec="libsvtav1", options=(("preset", "12"), ("svtav1-params", "lp=1"))),
    "mp4 in fragments": Recipe(codec="mpeg4", flags="frag_keyframe+empty_moov+default_base_moof"),
    "mov prores 10 bit": Recipe("mov", "prores_ks", "yuv422p10le"),
    "matroska h264": Recipe("matroska"),
    "webm vp8": Recipe("webm", "libvpx"),
    "webm vp9": Recipe("webm", "libvpx-vp9"),
    "avi mpeg4": Recipe("avi", "mpeg4"),
    "avi h264 with B frames": Recipe("avi"),
    "avi mjpeg": Recipe("avi", "mjpeg", "yuvj420p"),
    "gif": Recipe("gif", "gif", "rgb8", fps=Fraction(25)),
}
"""One clip of thirty frames in each kind of file that is read."""
VARYING = {
    "mp4": Recipe(frames=10, milliseconds=VARIABLE, options=(("bf", "2"),)),
    "matroska": Recipe("matroska", frames=10, milliseconds=VARIABLE),
    "webm": Recipe("webm", "libvpx-vp9", frames=10, milliseconds=VARIABLE),
}


def truncations(data: bytes, count: int = 20) -> list[bytes]:
    """The file cut off at as many points, evenly spread."""
    return [data[: len(data) * at // count] for at in range(count)]


_SHOWN = {"libvpx": 0x10, "libvpx-vp9": 0x02}
"""The bit in a frame's first byte that says: show it. The muxer packs a VP9 frame without it with the next one."""


def changing(*scales: int, codec: str = "libvpx", header: int = 1, hidden: int = 0) -> bytes:
    """A frame for each scale, stored so many times as large as the drawings; the first ones may not be shown.

    Args:
        scales: Of each frame.
        codec: One that may change size on the way.
        header: The scale that the header of the file says.
        hidden: Frames, from the first on, that only serve others.
    """
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="webm") as file:
        stream = file.add_stream(codec, rate=10)
        stream.height, stream.width = HEIGHT * header, WIDTH * header
        for at, scale in enumerate(scales):
            encoder = av.CodecContext.create(codec, "w")
            encoder.height, encoder.width, encoder.pix_fmt = HEIGHT * scale, WIDTH * scale, "yuv420p"
            encoder.time_base = Fraction(1, 10)
            picture = drawing(at).repeat(scale, axis=0).repeat(scale, axis=1)
            frame = av.VideoFrame.from_ndarray(picture, "rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = 0, Fraction(1, 10)
            for packet in [*encoder.encode(frame), *encoder.encode(None)]:
                if at < hidden:
                    packet.update(bytes([bytes(packet)[0] & ~_SHOWN[codec]]) + bytes(packet)[1:])
                packet.stream = stream
                packet.pts = packet.dts = at
                packet.time_base = Fraction(1, 10)
                file.mux(packet)
    return buffer.getvalue()


def growing() -> bytes:
    """Four frames, the last two stored twice as large: what a shared screen does in the middle of a recording."""
    return changing(1, 1, 2, 2)


def with_hidden_frames(*numbers: int) -> bytes:
    """A clip some of whose frames are decoded and not shown, as encoders write frames that only serve others."""
    data = bytearray(encoded(Recipe("webm", "libvpx")))
    with av.open(io.BytesIO(bytes(data))) as file:
        packets = [bytes(packet) for packet in file.demux(video=0)]
    at = 0
    for number, packet in enumerate(packets):
        at = data.index(packet, at)
        data[at] &= 0xFF & ~(_SHOWN["libvpx"] if number in numbers else 0)
        at += len(packet)
    return bytes(data)


class _Box:
    """Boxes of an MP4 file whose index stands last, so that boxes in it may grow."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    def at(self, kind: bytes) -> int:
        """Where the first one's contents begin."""
        return self.data.index(kind) + 4

    def write(self, kind: bytes, offset: int, *values: int) -> None:
        """Overwrite 32-bit numbers in its contents."""
        struct.pack_into(f">{len(values)}I", self.data, self.at(kind) + offset, *values)

    def grow(self, path: Sequence[bytes], offset: int, old: int, new: bytes) -> None:
        """Replace a stretch of the contents of the last box of the path, and correct the sizes of all of them."""
        at = self.at(path[-1]) + offset
        self.data[at : at + old] = new
        for kind in path:
            start = self.at(kind) - 8
            size = struct.unpack_from(">I", self.data, start)[0] + len(new) - old
            struct.pack_into(">I", self.data, start, size)


MOST = 0x7FFFFFFF


def sample_bomb() -> bytes:
    """Three kilobytes that claim two thousand million frames of one byte each."""
    boxes = _Box(encoded(Recipe(codec="mpeg4")))
    boxes.write(b"stsz", 4, 1, MOST)
    boxes.write(b"stsc", 12, MOST)
    boxes.write(b"stts", 8, MOST)
    return bytes(boxes.data)


def fragment_bomb() -> bytes:
    """The same claim made by one fragment."""
    boxes = _Box(encoded(KINDS["mp4 in fragments"]))
    boxes.write(b"trun", 0, 0x05, MOST)
    return bytes(boxes.data)


def edit_bomb(edits: int = 100_000) -> bytes:
    """An edit list that plays the whole clip so many times."""
    boxes = _Box(encoded())
    (old,) = struct.unpack_from(">I", boxes.data, boxes.at(b"elst") + 4)
    entry = struct.pack(">IiI", 1000, 1024, 0x10000)
    boxes.grow((b"moov", b"trak", b"edts", b"elst"), 8, 12 * old, entry * edits)
    boxes.write(b"elst", 4, edits)
    return bytes(boxes.data)


def refers_to(path: str) -> bytes:
    """An MP4 file that says its frames are in another one, by a Macintosh alias."""
    boxes = _Box(encoded(Recipe(codec="mpeg4")))
    name = path.encode() + bytes(len(path) % 2)
    alias = bytes(10) + bytes(28) + bytes(12) + bytes(64) + bytes(16) + bytes(4) + bytes(16)
    alias += struct.pack(">HH", 2, len(name)) + name + struct.pack(">HH", 0xFFFF, 0)
    entry = struct.pack(">I", 12 + len(alias)) + b"alis" + bytes(4) + alias
    boxes.grow((b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"), 8, 12, entry)
    return bytes(boxes.data)


def broken_index(recipe: Recipe, mark: bytes) -> bytes:
    """The file with the index that follows the mark overwritten by noise."""
    data = bytearray(encoded(recipe))
    at = data.rindex(mark) + len(mark) + 8
    length = min(300, len(data) - at)
    data[at : at + length] = np.random.default_rng(5).bytes(length)
    return bytes(data)


def wrong_index(kind: bytes, offset: int, *values: int) -> bytes:
    """An MP4 file with other numbers in one table of its index."""
    boxes = _Box(encoded(Recipe(codec="mpeg4")))
    boxes.write(kind, offset, *values)
    return bytes(boxes.data)


def small_header(size: int = 512) -> bytes:
    """A header of 16 x 16 over frames of ``size`` x ``size``."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=30)
        stream.height = stream.width = size
        stream.options = dict(FAST)
        file.mux(stream.encode(av.VideoFrame(size, size, "yuv420p")))
        file.mux(stream.encode())
    boxes = _Box(buffer.getvalue())
    struct.pack_into(">HH", boxes.data, boxes.at(b"avc1") + 24, 16, 16)
    return bytes(boxes.data)


def many_tracks(container: str, count: int = 33) -> bytes:
    """So many videos of one frame in one file."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        streams = [file.add_stream("mpeg4", rate=10) for _ in range(count)]
        for stream in streams:
            stream.width = stream.height = 16
        for stream in streams:
            frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), "rgb24")
            file.mux(stream.encode(frame.reformat(format="yuv420p")))
            file.mux(stream.encode(None))
    return buffer.getvalue()


def with_cover(kind: str = "ipod") -> bytes:
    """A second of sound, and a picture that is its cover, in a file of the kind of videos."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as file:
        sound = file.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), dtype=np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        file.mux(sound.encode(frame))
        file.mux(sound.encode())
    boxes = _Box(buffer.getvalue())
    jpeg = io.BytesIO()
    av.VideoFrame.from_ndarray(drawing(1), "rgb24").to_image().save(jpeg, "JPEG")
    data = _box(b"data", struct.pack(">II", 13, 0), jpeg.getvalue())
    handler = _box(b"hdlr", bytes(8), b"mdirappl", bytes(9))
    meta = _box(b"meta", bytes(4), handler, _box(b"ilst", _box(b"covr", data)))
    end = len(boxes.data) - (boxes.at(b"moov"))
    boxes.grow((b"moov",), end, 0, _box(b"udta", meta))
    return bytes(boxes.data)


def _box(kind: bytes, *contents: bytes) -> bytes:
    body = b"".join(contents)
    return struct.pack(">I", 8 + len(body)) + kind + body


def transparent_gif() -> bytes:
    """Two frames of a red square on nothing."""
    from PIL import Image

    layers = []
    for at in (4, 20):
        layer = Image.new("RGBA", (40, 30), (0, 0, 0, 0))
        layer.paste((255, 0, 0, 255), (at, 5, at + 10, 15))
        layers.append(layer)
    buffer = io.BytesIO()
    layers[0].save(buffer, "GIF", save_all=True, append_images=layers[1:], duration=500, disposal=2)
    return buffer.getvalue()


def narrow() -> bytes:
    """One frame, 201 times as wide as it is high."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="gif") as file:
        stream = file.add_stream("gif", rate=1)
        stream.width, stream.height, stream.pix_fmt = 402, 2, "rgb8"
        file.mux(stream.encode(av.VideoFrame(402, 2, "rgb8")))
        file.mux(stream.encode())
    return buffer.getvalue()


@dataclass(frozen=True)
class Bad:
    """A file that must be refused, and how the reason reads."""

    make: Callable[[], bytes]
    reason: str


HOSTILE: dict[str, Bad] = {
    "nothing": Bad(lambda: b"", "decode: the item is empty"),
    "noise": Bad(lambda: np.random.default_rng(1).bytes(5000), "decode: not a video that can be read; supported: MP4"),
    "text": Bad(lambda: b"hello", "decode: not a video"),
    "a picture": Bad(lambda: b"\x89PNG\r\n\x1a\n" + bytes(100), "decode: not a video"),
    "a playlist": Bad(lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", "decode: not a video"),
    "a list of files": Bad(lambda: b"ffconcat version 1.0\nfile /etc/hostname\n", "decode: not a video"),
    "a session description": Bad(lambda: b"v=0\nm=video 5000 RTP/AVP 96\n", "decode: not a video"),
    "a manifest": Bad(lambda: b'<?xml version="1.0"?><MPD><BaseURL>file:///etc/</BaseURL></MPD>', "not a video"),
    "four thousand million samples": Bad(
        sample_bomb, "limit: MP4 file: its index claims 2147483647 samples; at most 1000000 are read"
    ),
    "as many in a fragment": Bad(fragment_bomb, "limit: MP4 file: its index claims 21474836.. samples"),
    "a hundred thousand edits": Bad(edit_bomb, "limit: MP4 file: its index claims 3000000 samples"),
    "more tracks than are read": Bad(lambda: many_tracks("mp4"), "limit: MP4 file: it has 33 tracks; at most 32 are"),
    "more tracks than are read, avi": Bad(lambda: many_tracks("avi"), "limit: AVI file: it has 33 tracks; at most 32"),
    "frames larger than their header": Bad(
        lambda: changing(8, 8, 8, 8), "decode: its header says 96 x 64, but its frames are 768 x 512"
    ),
    "frames that shrink to their header": Bad(
        lambda: changing(4, 4, 1, 1), "decode: its header says 96 x 64, but its frames are 384 x 256"
    ),
    "frames that grow before the first is shown": Bad(
        lambda: changing(1, 2, 2, 2, hidden=1), "decode: its header says 96 x 64, but its frames are 192 x 128"
    ),
    "an index that is compressed": Bad(
        lambda: encoded().replace(b"mvhd", b"cmov"), "its index is compressed, which is not supported"
    ),
    "another file's frames": Bad(lambda: refers_to("/etc/hostname"), "decode: damaged"),
    "no frames": Bad(lambda: Recipe(frames=0).encode(), "decode: it has no video: nothing to show"),
    "no frames, matroska": Bad(lambda: Recipe("matroska", frames=0).encode(), "decode: damaged or cut off Matroska"),
    "no frames, avi": Bad(lambda: Recipe("avi", "mpeg4", frames=0).encode(), "decode: it has no frames"),
    "sound with a cover": Bad(with_cover, "it has no video: only sound and a still picture"),
    "an index with a wrong place": Bad(lambda: wrong_index(b"stco", 8, 3), "decode: damaged"),
    "an index with a place outside": Bad(lambda: wrong_index(b"stco", 8, 1 << 30), "decode: "),
    "an index with wrong sizes": Bad(lambda: wrong_index(b"stsz", 12, *[7] * 30), "decode: damaged"),
    "a codec that is not read": Bad(
        lambda: encoded(Recipe("matroska", "ffv1")), "its video has the codec 'ffv1'; supported: h264"
    ),
}
