"""A video or sound file, opened so that nothing but its own bytes is ever read.

The demuxer is the one that media/containers.py names, decoders are those listed here, and whatever a file refers to
(another file, an address) is refused at the one place where the library could open it.
"""

from __future__ import annotations

import errno
import io
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import av
from av.stream import Discard, Disposition

from triptych.core.errors import MediaError, MediaUnavailable, one_line
from triptych.core.media import Stage
from triptych.media.containers import MAX_STREAMS
from triptych.media.limits import check_item_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from av.codec.context import CodecContext
    from av.container import InputContainer
    from av.packet import Packet
    from av.stream import Stream

    from triptych.core.config import MediaLimits
    from triptych.media.containers import Container

VIDEO_CODECS = (
    "h264", "hevc", "vp8", "vp9", "libdav1d", "mpeg4", "mpeg2video", "mpeg1video", "h263", "mjpeg", "prores", "gif",
)  # fmt: skip
SOUND_CODECS = (
    "aac", "mp3float", "mp2float", "opus", "vorbis", "flac", "alac", "pcm_u8", "pcm_s8", "pcm_s16le", "pcm_s16be",
    "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be", "pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be",
    "pcm_alaw", "pcm_mulaw",
)  # fmt: skip
OPEN_ENDED = ("mp3", "aac", "wav")
"""Demuxers whose files may end in the middle of a packet: two never say how long they are, and what a WAV file says was
compared with what there is before, but for those recorded through a pipe, which say nothing."""
_PADDING = 1 << 16
"""Pixels by which a small frame may grow in a decoder's memory."""
_NOT_FILM = Disposition.attached_pic | Disposition.timed_thumbnails
"""Pictures that go with a sound or a film, such as a cover."""


@contextmanager
def open_file(
    index: int, data: bytes, kinds: Sequence[Container], limits: MediaLimits, wanted: str
) -> Iterator[InputContainer]:
    """Recognise, check and open the file; whatever goes wrong inside the block is a MediaError too.

    Args:
        index: Of the item in its request.
        data: The file.
        kinds: The containers to try.
        limits: Bounds on its bytes, and on the pixels of a frame.
        wanted: What it should be, in words.

    Raises:
        MediaError: empty, too large, of another kind, cut off, or damaged; ``index`` names the item.
        MediaUnavailable: memory is short.
    """
    check_item_bytes(index, len(data), limits)
    if not data:
        raise MediaError(index, "the item is empty", Stage.DECODE)
    kind = next((one for one in kinds if one.matches(data)), None)
    if kind is None:
        names = ", ".join(one.name for one in kinds)
        raise MediaError(index, f"not a {wanted} that can be read; supported: {names}", Stage.DECODE)
    if (flaw := kind.flaw(data)) is not None:
        what, stage = (kind.name, Stage.LIMIT) if flaw.over else (f"damaged or cut off {kind.name}", Stage.DECODE)
        raise MediaError(index, f"{what} file: {flaw.reason}", stage)
    try:
        with av.open(
            _Sequential(data) if kind.sequential else io.BytesIO(data),
            "r",
            format=kind.demuxer,
            options=_options(kind, limits),
            metadata_errors="replace",
            io_open=_refuse,
        ) as file:
            yield file
    except MediaError:
        raise
    except Exception as error:
        # A library that is loaded when it is first needed, and finds no room, raises ImportError.
        if isinstance(error, MemoryError | ImportError) or getattr(error, "errno", None) == errno.ENOMEM:
            reason = f"not enough memory for this {kind.name} file; retry later"
            raise MediaUnavailable(index, reason, Stage.DECODE) from error
        # Hostile bytes reach a library written by others: whatever it raises means that they are no good file.
        reason = getattr(error, "strerror", None) or one_line(error)
        raise MediaError(index, f"damaged or cut off {kind.name} file: {reason[:200]}", Stage.DECODE) from error


class _Sequential(io.BytesIO):
    """A file that cannot be moved about in, so that an index that only serves moving about is never read."""

    def seekable(self) -> bool:
        """Say no."""
        return False


def _options(kind: Container, limits: MediaLimits) -> dict[str, str]:
    return {
        "format_whitelist": kind.demuxer,
        "codec_whitelist": ",".join(VIDEO_CODECS + SOUND_CODECS),
        "protocol_whitelist": "none",
        "max_streams": str(MAX_STREAMS),
        "max_pixels": str(_most_pixels(limits)),
    }


def _most_pixels(limits: MediaLimits) -> int:
    """Of a frame as a decoder stores it, which may be some columns and rows more than it shows.

    This bounds what is allocated; which frames are taken is checked by what they show.
    """
    return 2 * limits.max_frame_pixels + _PADDING


def _refuse(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    raise PermissionError("it refers to another file")


def is_film(stream: Stream) -> bool:
    """Whether it is moving pictures; a cover is not."""
    return stream.type == "video" and not stream.disposition & _NOT_FILM


def first_of(streams: Sequence[Stream]) -> Stream | None:
    """The stream that a player would take: the first one marked as default, else the first."""
    return next((one for one in streams if one.disposition & Disposition.default), next(iter(streams), None))


def only(file: InputContainer, stream: Stream) -> None:
    """Leave the file's other streams unread."""
    for other in file.streams:
        if other.index != stream.index:
            other.discard = Discard.all


def check_codec(index: int, stream: Stream, known: Sequence[str]) -> None:
    """Refuse a stream that none of the listed decoders reads; no other decoder is ever started.

    Raises:
        MediaError: naming its codec.
    """
    codec: CodecContext | None = stream.codec_context
    if codec is None or codec.name not in known:
        name = "an unknown codec" if codec is None else f"the codec {codec.name!r}"
        raise MediaError(index, f"its {stream.type} has {name}; supported: {', '.join(known)}", Stage.DECODE)


def start_decoder(codec: CodecContext, limits: MediaLimits) -> None:
    """Bound the decoder before it opens: one thread, and no frame larger than allowed, whatever the stream says."""
    codec.thread_count = 1
    codec.options = {"max_pixels": str(_most_pixels(limits))}


def packets_of(index: int, file: InputContainer, stream: Stream) -> Iterator[Packet[Stream]]:
    """The stream's packets in file order, without the empty ones.

    Raises:
        MediaError: one is damaged.
    """
    for packet in file.demux(stream):
        if packet.is_corrupt and file.format.name not in OPEN_ENDED:
            raise MediaError(index, f"damaged or cut off: a packet of its {stream.type} is incomplete", Stage.DECODE)
        if packet.size:
            yield packet
