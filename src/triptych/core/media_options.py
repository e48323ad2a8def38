"""How items are read: what a request asks for, over what the server says, over what the model's processor prefers.

    request  --+
    server   --+--> OptionLayer.over(...) --> resolve --> PictureOptions, ClipOptions
    processor -+    field by field                        what is decoded, and enters content keys

A layer says something or leaves it to the one below. Of ``fps`` and ``num_frames`` a layer that sets exactly one drops
the other one of the layers below, which would be an accidental cap.
"""

from __future__ import annotations

import struct
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, TypeVar

from triptych.core.clip import FrameSampling
from triptych.core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

Layer = TypeVar("Layer", "PictureLayer", "ClipLayer")

_PICTURE = b"picture 2"
"""Changes whenever the same bytes and options give other pixels."""
_CLIP = b"clip 1"
_MAX_PIXELS = 2**40
"""Of a bound that is asked for; what may really be read is bounded by the limits on media."""
Colour = tuple[int, int, int]
WHITE: Colour = (255, 255, 255)


def _check_pixels(what: str, least: int | None, most: int | None) -> None:
    for name, value in (("min_pixels", least), ("max_pixels", most)):
        if value is not None and not 1 <= value <= _MAX_PIXELS:
            raise InvalidRequest(f"{what}.{name} must be in [1, 2^40], not {value}")
    if least is not None and most is not None and least > most:
        raise InvalidRequest(f"{what}.min_pixels {least} is more than max_pixels {most}")


@dataclass(frozen=True, slots=True)
class PictureOptions:
    """How a picture is turned into the model's input; all that this depends on besides its bytes and the model."""

    background: Colour = WHITE
    """What shows through where the picture is transparent: red, green and blue, 0 to 255 each."""
    min_pixels: int | None = None
    """The picture is made at least as large. None: as the model prefers."""
    max_pixels: int | None = None
    """The picture is made at most as large. None: as the model prefers."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            InvalidRequest: naming the field.
        """
        if len(self.background) != 3 or not all(0 <= part <= 255 for part in self.background):
            raise InvalidRequest(f"image.background must be three numbers from 0 to 255, not {self.background}")
        _check_pixels("image", self.min_pixels, self.max_pixels)

    def canonical(self) -> bytes:
        """The same bytes for the same pixels, in every process: what a content key covers besides the encoded bytes.

        No two options give the same; where they stand in a key, their length stands before them.
        """
        return _PICTURE + struct.pack("<3BQQ", *self.background, self.min_pixels or 0, self.max_pixels or 0)


@dataclass(frozen=True, slots=True)
class ClipOptions:
    """How a video is turned into the model's input."""

    sampling: FrameSampling
    """Which frames are looked at."""
    min_pixels: int | None = None
    """Of all frames together, as they are made for the model. None: as the model prefers."""
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            InvalidRequest: naming the field.
        """
        _check_pixels("video", self.min_pixels, self.max_pixels)

    def canonical(self) -> bytes:
        """See ``PictureOptions.canonical``."""
        asked = self.sampling
        numbers = (asked.num_frames, asked.min_frames, asked.max_frames, self.min_pixels, self.max_pixels)
        return _CLIP + struct.pack("<d5Q", asked.fps or 0.0, *(number or 0 for number in numbers))


ItemOptions = PictureOptions | ClipOptions


@dataclass(frozen=True, slots=True)
class PictureLayer:
    """What one layer says about pictures; None is nothing."""

    background: Colour | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, slots=True)
class ClipLayer:
    """What one layer says about videos; None is nothing."""

    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, slots=True)
class OptionLayer:
    """What one layer says. Sound has no options."""

    image: PictureLayer = field(default_factory=PictureLayer)
    video: ClipLayer = field(default_factory=ClipLayer)

    def over(self, lower: OptionLayer) -> OptionLayer:
        """This layer, and the lower one where this says nothing."""
        video = lower.video
        if (self.video.fps is None) != (self.video.num_frames is None):
            video = replace(video, fps=None, num_frames=None)
        return OptionLayer(_over(self.image, lower.image), _over(self.video, video))

    def picture(self, where: str = "media_options") -> PictureOptions:
        """What holds for pictures where there is no layer below.

        Args:
            where: how its author calls the layer, for messages.

        Raises:
            InvalidRequest: naming ``WHERE.image.KEY``.
        """
        image = self.image
        with _naming(where):
            return PictureOptions(image.background or WHITE, image.min_pixels, image.max_pixels)

    def clip(self, where: str = "media_options") -> ClipOptions:
        """What holds for videos where there is no layer below.

        Args:
            where: how its author calls the layer, for messages.

        Raises:
            InvalidRequest: naming ``WHERE.video.KEY``.
        """
        video = self.video
        with _naming(f"{where}.video"):
            sampling = FrameSampling(video.fps, video.num_frames, video.min_frames or 1, video.max_frames)
        with _naming(where):
            return ClipOptions(sampling, video.min_pixels, video.max_pixels)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Say where the field stands that an error names."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}.{error}") from None


def _over(higher: Layer, lower: Layer) -> Layer:
    said = {one.name: getattr(higher, one.name) for one in fields(higher) if getattr(higher, one.name) is not None}
    return replace(lower, **said)
