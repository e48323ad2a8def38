"""Which container a file is, whether the file is whole, and whether its tables are sane. Pure: bytes in, words out.

The demuxer is chosen here and named to the library, which then guesses nothing: playlists, scripts that name other
files, and the several hundred formats that nobody sends are out of reach. What a container says about its own size
is compared with what there is, because most demuxers read half a file without a word. And the sample tables of an
MP4 file, in which sixteen bytes can claim four thousand million samples, are counted before they are expanded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_MP4_SAMPLES = 1_000_000
"""Samples of all tracks, times the edits of a track; ten minutes have fifty thousand."""
MAX_PARTS = 200_000
"""Boxes or tables of a file, which are walked one by one; an hour in fragments has a tenth of it."""
_MAX_GIF_BLOCKS = 5 * MAX_PARTS
"""Likewise of a GIF, whose blocks have 255 bytes at most."""
MAX_STREAMS = 32
"""Tracks of a file. The library calls more of them a lack of memory, so they are counted before."""
_MP4_STARTS = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp", b"pnot")
_MP4_ROOTS = (*_MP4_STARTS, b"moof", b"uuid", b"sidx", b"meta", b"mfra")
_MP4_TABLES = re.compile(rb"trak|stsz|stz2|trun|elst|stts|cmov|vide|soun")
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_UNKNOWN_RIFF_SIZES = (0, 0xFFFFFFFF)
"""What a recorder that cannot go back leaves there."""


class Flaw(NamedTuple):
    """Why a file is not opened."""

    reason: str
    over: bool = False
    """Whether it is more than is read, and not damaged."""


@dataclass(frozen=True, slots=True)
class Container:
    """How one container is recognised, checked and opened."""

    name: str
    demuxer: str
    """The library's name for it."""
    matches: Callable[[bytes], bool]
    flaw: Callable[[bytes], Flaw | None]
    """Why the file is not opened; None where nothing speaks against it."""
    sequential: bool = False
    """Whether it can be read from the first byte to the last, without its index, which is wrong often enough."""


class _Box(NamedTuple):
    """One box at the top of an MP4 file."""

    kind: bytes
    start: int
    end: int


def _cut_off(have: int, want: int) -> Flaw:
    return Flaw(f"cut off: {have} bytes of {want}")


def _too_many(most: int) -> Flaw:
    return Flaw(f"it is made of {most + 1} parts and more; at most {most} are read", over=True)


def _tracks_flaw(tracks: int) -> Flaw | None:
    return Flaw(f"it has {tracks} tracks; at most {MAX_STREAMS} are read", over=True) if tracks > MAX_STREAMS else None


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")


def _mp4_boxes(data: bytes) -> Iterator[_Box]:
    at = 0
    while at + 8 <= len(data):
        size, kind = _u32(data, at), data[at + 4 : at + 8]
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        end = len(data) if size == 0 else at + max(size, 8)
        yield _Box(kind, at, end)
        at = end


def _mp4_flaw(data: bytes) -> Flaw | None:
    kinds: set[bytes] = set()
    counted = _Mp4Samples()
    for count, box in enumerate(_mp4_boxes(data)):
        if max(count, counted.tables) > MAX_PARTS:
            return _too_many(MAX_PARTS)
        if box.end > len(data) and box.kind in _MP4_ROOTS:
            return _cut_off(len(data), box.end)
        kinds.add(box.kind)
        if box.kind != b"mdat":
            counted.read(data, box.start, min(box.end, len(data)))
    if counted.tables > MAX_PARTS:
        return _too_many(MAX_PARTS)
    if counted.packed:
        return Flaw("its index is compressed, which is not supported")
    if counted.total > MAX_MP4_SAMPLES:
        return Flaw(f"its index claims {counted.total} samples; at most {MAX_MP4_SAMPLES} are read", over=True)
    if b"moov" not in kinds:
        return Flaw("it has no index: cut off, or never finished by its recorder")
    return _tracks_flaw(counted.tracks)


class _Mp4Samples:
    """Counts the samples that the tables of an MP4 file claim, wherever they stand: hostile files nest as they like.

    A track of plain PCM sound counts each of its samples, which the demuxer reads by the thousand; it is let through
    by the marks that make the demuxer do so: a track of sound, and every sample one tick long.
    """

    def __init__(self) -> None:
        self.packed = False
        self.tables = 0
        self.tracks = 0
        self._samples = 0
        self._most_edits = 1

    @property
    def total(self) -> int:
        """Samples of all tracks, times the edits of a track."""
        return self._samples * self._most_edits

    def read(self, data: bytes, start: int, end: int) -> None:
        """Count in one stretch of the file that holds no media."""
        samples, plain = 0, True
        kinds: set[bytes] = set()
        for found in _MP4_TABLES.finditer(data, start, end):
            word, at = found.group(), found.end()
            self.tables += 1
            if self.tables > MAX_PARTS:
                break
            if word == b"trak":
                self._samples += 0 if plain and kinds == {b"soun"} else samples
                samples, kinds, plain = 0, set(), True
                self.tracks += 1
            elif word in (b"stsz", b"stz2"):
                samples += _u32(data, at + 8)
            elif word == b"trun":
                samples += _u32(data, at + 4)
            elif word == b"stts":
                plain = plain and (_u32(data, at + 4), _u32(data, at + 12)) == (1, 1)
            elif word == b"elst":
                self._most_edits = max(self._most_edits, _u32(data, at + 4))
            elif word == b"cmov":
                self.packed = True
            else:
                kinds.add(word)
        self._samples += 0 if plain and kinds == {b"soun"} else samples


def _ebml_size(data: bytes, at: int) -> tuple[int | None, int]:
    """The length field at a place, None where it says unknown, and one past the field."""
    first = data[at] if at < len(data) else 0
    width = 9 - first.bit_length()
    value = int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
    return (None if value == (1 << 7 * width) - 1 else value), at + width


def _matroska_flaw(data: bytes) -> Flaw | None:
    header, at = _ebml_size(data, len(_EBML))
    at += header or 0
    for _ in range(MAX_PARTS + 1):
        if at >= len(data):
            break
        width = 9 - data[at].bit_length()
        ident = data[at : at + width]
        size, body = _ebml_size(data, at + width)
        if ident == _SEGMENT:
            if size is not None and body + size > len(data):
                return _cut_off(len(data), body + size)
            return None
        if size is None:
            break
        at = body + size
    else:
        return _too_many(MAX_PARTS)
    return Flaw("it has no segment: cut off, or damaged")


def _riff_flaw(data: bytes) -> Flaw | None:
    size = int.from_bytes(data[4:8], "little")
    # The last chunk's padding byte is counted by some writers who do not write it.
    if size not in _UNKNOWN_RIFF_SIZES and 8 + size > len(data) + 1:
        return _cut_off(len(data), 8 + size)
    return None


def _avi_flaw(data: bytes) -> Flaw | None:
    return _riff_flaw(data) or _tracks_flaw(data.count(b"strh", 0, data.find(b"movi")))


def _gif_flaw(data: bytes) -> Flaw | None:
    at, inside = 13 + _colours(data, 10), False
    for _ in range(_MAX_GIF_BLOCKS + 1):
        if at >= len(data):
            return Flaw("cut off: it has no end mark")
        if inside:
            inside = data[at] > 0
            at += data[at] + 1
        elif data[at] == 0x3B:
            return None
        elif data[at] in (0x2C, 0x21):
            at += 11 + _colours(data, at + 9) if data[at] == 0x2C else 2
            inside = True
        else:
            return Flaw("damaged: a block of an unknown kind")
    return _too_many(_MAX_GIF_BLOCKS)


def _colours(data: bytes, at: int) -> int:
    """Bytes of the colour table that the flags at a place announce."""
    flags = data[at] if at < len(data) else 0
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _ogg_flaw(data: bytes) -> Flaw | None:
    at = data.rfind(b"OggS")
    table = data[at + 27 : at + 27 + data[at + 26]] if at + 26 < len(data) else b""
    want = at + 27 + len(table) + sum(table)
    whole = len(table) > 0 and want <= len(data)
    return None if whole else _cut_off(len(data), max(want, len(data) + 1))


def _is_mpeg_audio(data: bytes) -> bool:
    if data[:3] == b"ID3":
        return not _is_adts(data)
    return data[:1] == b"\xff" and data[1:2] > b"\xdf" and data[1] & 0x06 != 0


def _is_adts(data: bytes) -> bool:
    at = _past_id3(data)
    return len(data) > at + 1 and data[at] == 0xFF and data[at + 1] & 0xF6 == 0xF0


def _past_id3(data: bytes) -> int:
    if data[:3] != b"ID3" or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size


def _nothing(_: bytes) -> Flaw | None:
    return None


VIDEO_CONTAINERS = (
    Container("MP4", "mov", lambda data: data[4:8] in _MP4_STARTS, _mp4_flaw),
    Container("Matroska", "matroska", lambda data: data.startswith(_EBML), _matroska_flaw),
    Container("AVI", "avi", lambda data: data[:4] == b"RIFF" and data[8:12] == b"AVI ", _avi_flaw, sequential=True),
    Container("GIF", "gif", lambda data: data[:6] in (b"GIF87a", b"GIF89a"), _gif_flaw),
)
SOUND_CONTAINERS = (
    Container("WAV", "wav", lambda data: data[:4] == b"RIFF" and data[8:12] == b"WAVE", _riff_flaw),
    Container("FLAC", "flac", lambda data: data.startswith(b"fLaC"), _nothing),
    Container("Ogg", "ogg", lambda data: data.startswith(b"OggS"), _ogg_flaw),
    Container("MP3", "mp3", _is_mpeg_audio, _nothing),
    Container("AAC", "aac", _is_adts, _nothing),
    *VIDEO_CONTAINERS[:3],
)
