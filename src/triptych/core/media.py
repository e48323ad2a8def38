"""One media item on its way from the wire to the encoder."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Modality(enum.Enum):
    """What kind of item it is. The value is the word used in messages."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


class Stage(enum.Enum):
    """How far an item had come when it was found that it cannot be used. The value is the word used in messages."""

    FETCH = "fetch"
    """Its bytes were to be had: from a URL, a ``data:`` URI or the message."""
    DECODE = "decode"
    """Its bytes were to become pixels, frames or samples."""
    LIMIT = "limit"
    """It is over a limit, at whatever point that was seen; the reason has the value, the limit and its flag, if any."""
    PREPROCESS = "preprocess"
    """What was decoded was to become the model's input."""


@dataclass(frozen=True, slots=True)
class Url:
    """An ``http(s)`` address that the engine would fetch."""

    url: str


@dataclass(frozen=True, slots=True)
class DataUri:
    """A ``data:`` URI, not yet decoded."""

    uri: str


@dataclass(frozen=True, slots=True)
class RawBytes:
    """The encoded file itself (PNG, JPEG, ...)."""

    data: bytes


MediaSource = Url | DataUri | RawBytes


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, video or audio clip as the client sent it; atomic."""

    modality: Modality
    source: MediaSource
    mime: str = ""
    """A hint only; the bytes decide."""
    uuid: str = ""
    """The caller's own name for the item, part of its identity when given."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A decoded and normalised still picture."""

    pixels: npt.NDArray[np.uint8]
    """Shape [height, width, 3], RGB, upright, opaque."""

    @property
    def height(self) -> int:
        """Pixels from top to bottom."""
        return int(self.pixels.shape[0])

    @property
    def width(self) -> int:
        """Pixels from left to right."""
        return int(self.pixels.shape[1])
