"""What an engine and its decode processes say to each other: bytes, and to the process two descriptors with each task.

    engine -> process    Settings                        once
    process -> engine    Ready                           once
    engine -> process    Asked: a task                   with the encoded bytes, and memory for what comes out
    process -> engine    Answered: Working               of a video or a sound, once it is known what it needs
                         Survey                          of a video that is only looked at
                         Pixels, Frames, Samples         what was decoded lies in that memory, from its first byte on
                         Failed, OutOfMemory, OutOfFiles in their place

What the process says goes into a pipe, and the length of each message stands before it. Each task has a number that
nobody can guess, and its answers repeat it: what a process sent before it was asked is no answer. Messages are strict:
a field too many, one too few or one of another type is none. Neither end believes the other: the process reads the
length that it was told, and the engine seals the memory, which is its own, and takes from it (decode_output.py) exactly
the bytes that the numbers come to:

    Pixels     a PPM file: a line of text, then [height, width, 3] bytes
    Frames     [frames, height, width, 3] bytes, then indices, [frames] int64, then timestamps, [frames] float64
    Samples    [samples] float32
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

# Messages are made of these: they are looked up when the decoders below are built.
from triptych.core.clip import FrameFit, FrameSampling  # noqa: TC001
from triptych.core.config import DecodeConfig, MediaLimits  # noqa: TC001
from triptych.core.media import Stage  # noqa: TC001
from triptych.core.picture_fit import PictureFit  # noqa: TC001
from triptych.media.header import Format  # noqa: TC001

MAX_MESSAGE = 4096
"""Bytes of the longest message."""
HEAD = 2
"""Bytes of the length that stands before an answer."""
NUMBER = 8
"""Bytes of a task's number."""
MAX_REASON = 800
"""Bytes of the longest reason."""
CHANNELS = 3
INDEX, TIMESTAMP, SAMPLE = "<i8", "<f8", "<f4"
"""Numbers as they stand in what was decoded."""

Side = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
Number = Annotated[bytes, msgspec.Meta(min_length=NUMBER, max_length=NUMBER)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Any of them."""


class Settings(_Message, frozen=True):
    """What the process is held to for good."""

    limits: MediaLimits
    config: DecodeConfig


class PictureTask(_Message, frozen=True, tag="picture"):
    """A picture to decode."""

    length: int
    """Encoded bytes."""
    kind: Format
    width: int
    """As its header claims; likewise the height."""
    height: int
    background: tuple[int, int, int]
    fit: PictureFit | None


class ClipTask(_Message, frozen=True, tag="clip"):
    """A video of which frames are to be decoded."""

    length: int
    sampling: FrameSampling
    fit: FrameFit | None


class SurveyTask(_Message, frozen=True, tag="survey"):
    """A video that is only looked at."""

    length: int
    sampling: FrameSampling
    fit: FrameFit | None


class SoundTask(_Message, frozen=True, tag="sound"):
    """A sound to decode."""

    length: int
    rate: int
    """Samples a second that the model hears."""
    of_film: bool


Task = PictureTask | ClipTask | SurveyTask | SoundTask


class Asked(_Message, frozen=True):
    """One task."""

    number: Number
    task: Task


class Ready(_Message, frozen=True, tag="ready"):
    """The process can be used."""


class Working(_Message, frozen=True, tag="working"):
    """The file is read as far as its packets; the rest may take so many seconds of processor time."""

    seconds: Annotated[float, msgspec.Meta(gt=0)]


class Pixels(_Message, frozen=True, tag="pixels"):
    """A picture."""

    width: Side
    height: Side
    source_width: Side
    """Before it was resized; likewise the height."""
    source_height: Side


class Survey(_Message, frozen=True, tag="surveyed"):
    """What decoding the video will cost."""

    frames: Count
    kept_pixels: Count
    decoded_pixels: Count


class Frames(_Message, frozen=True, tag="frames"):
    """The chosen frames of a video, and what their plan says of the whole."""

    frames: Count
    height: Side
    width: Side
    fps: float
    total: Count
    duration: float


class Samples(_Message, frozen=True, tag="samples"):
    """A sound."""

    samples: Count


class Failed(_Message, frozen=True, tag="failed"):
    """The bytes are no good item, or over a limit."""

    stage: Stage
    reason: str


class OutOfMemory(_Message, frozen=True, tag="memory"):
    """The limit of memory was met."""


class OutOfFiles(_Message, frozen=True, tag="files"):
    """The process, or the machine, has too many open files."""


Answer = Working | Pixels | Survey | Frames | Samples | Failed | OutOfMemory | OutOfFiles


class Answered(_Message, frozen=True):
    """What came of one task, or will."""

    number: Number
    """The task's."""
    answer: Answer


Message = TypeVar("Message", Ready, Answered)

_settings = msgspec.msgpack.Decoder(Settings)
_ready = msgspec.msgpack.Decoder(Ready)
_asked = msgspec.msgpack.Decoder(Asked)
_answered = msgspec.msgpack.Decoder(Answered)


def pack(message: Settings | Ready | Asked | Answered) -> bytes:
    """As bytes; a reason is cut where it is too long."""
    if isinstance(message, Answered) and isinstance(message.answer, Failed):
        short = message.answer.reason.encode(errors="replace")[:MAX_REASON].decode(errors="ignore")
        message = Answered(message.number, Failed(message.answer.stage, short))
    return msgspec.msgpack.encode(message)


def framed(message: bytes) -> bytes:
    """As it goes into a pipe."""
    return len(message).to_bytes(HEAD, "little") + message


def length_after(head: bytes) -> int:
    """Of the message that follows.

    Raises:
        ValueError: none is so long.
    """
    length = int.from_bytes(head, "little")
    if length > MAX_MESSAGE:
        raise ValueError(f"a message of {length} bytes")
    return length


def unpack_settings(message: bytes) -> Settings:
    """From bytes.

    Raises:
        ValueError: they are no such message.
    """
    return _settings.decode(message)


def unpack_ready(message: bytes) -> Ready:
    """From bytes.

    Raises:
        ValueError: they are no such message.
    """
    return _read(_ready, message)


def unpack_asked(message: bytes) -> Asked:
    """From bytes.

    Raises:
        ValueError: they are no such message.
    """
    return _asked.decode(message)


def unpack_answered(message: bytes) -> Answered:
    """From bytes.

    Raises:
        ValueError: they are no such message.
    """
    return _read(_answered, message)


def _read(decoder: msgspec.msgpack.Decoder[Message], message: bytes) -> Message:
    """What the process says, which may be anything."""
    try:
        return decoder.decode(message)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def pixels_header(width: int, height: int) -> bytes:
    """What stands before the pixels: they are a PPM file."""
    return b"P6\n%d %d\n255\n" % (width, height)
