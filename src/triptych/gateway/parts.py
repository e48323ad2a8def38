"""The parts of a message's content, and the media among them as core values. Nothing is opened, no text is searched.

What an engine can open decides about its source, not the gateway: here a URL only has to be one that engines know.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from triptych.core.media import DataUri, MediaItem, MediaSource, Modality, Url
from triptych.gateway.errors import BadRequest

PART_TYPES = "'text', 'image_url', 'video_url' and 'input_audio'"
_FORMAT = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9.+-]{0,31}")


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a picture is."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None
    """A hint about cost; pictures are always read in full."""


class VideoUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a video is."""

    url: str


class InputAudio(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sound itself."""

    data: str
    """Base64."""
    format: str
    """A hint; the bytes decide."""


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A stretch of text."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    """A picture."""

    image_url: ImageUrl


class VideoPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="video_url"):
    """A video."""

    video_url: VideoUrl


class AudioPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_audio"):
    """A sound."""

    input_audio: InputAudio


ContentPart = TextPart | ImagePart | VideoPart | AudioPart


def read_part(part: ContentPart, where: str) -> str | MediaItem:
    """A text, or a media item.

    Args:
        part: as it was sent.
        where: its place in the JSON.

    Raises:
        BadRequest: its source is none that an engine could know.
    """
    match part:
        case TextPart(text=text):
            return text
        case ImagePart(image_url=image):
            return MediaItem(Modality.IMAGE, _source(image.url, "a picture", where, "image_url.url"))
        case VideoPart(video_url=video):
            return MediaItem(Modality.VIDEO, _source(video.url, "a video", where, "video_url.url"))
        case AudioPart(input_audio=sound):
            return MediaItem(Modality.AUDIO, _sound(sound, where))


def _source(url: str, what: str, where: str, field: str) -> MediaSource:
    scheme = url[:8].lower()
    if scheme.startswith("data:"):
        return DataUri(url)
    if scheme.startswith(("http://", "https://")):
        return Url(url)
    raise BadRequest(f"{where}: {what}'s url begins with data:, http:// or https://", param=f"{where}.{field}")


def _sound(sound: InputAudio, where: str) -> DataUri:
    if not _FORMAT.fullmatch(sound.format):
        raise BadRequest(
            f"{where}: the format of a sound is a word such as 'wav' or 'mp3'", param=f"{where}.input_audio.format"
        )
    if sound.data[:5].lower() == "data:":
        raise BadRequest(
            f"{where}: the data of a sound is base64 and nothing before it, not a data: URI",
            param=f"{where}.input_audio.data",
        )
    return DataUri(f"data:audio/{sound.format.lower()};base64,{sound.data}")
