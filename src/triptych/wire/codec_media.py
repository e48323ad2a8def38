"""Media of a request and how they are to be read: protobuf <-> core, both ways. Nothing is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.errors import InvalidRequest, MediaError
from triptych.core.media import DataUri, MediaItem, MediaSource, Modality, RawBytes, Stage, Url
from triptych.core.option_names import read_options, write_options
from triptych.wire.modality import MODALITIES, NUMBERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf import struct_pb2

    from triptych.core.media_options import OptionLayer
    from triptych.wire.gen import generation_pb2 as pb

MAX_MEDIA_ITEMS = 1024
"""References count as well. Above any configured limit: a message of a million empty items must not occupy the event
loop."""


def decode_media(items: Sequence[pb.MediaItem]) -> tuple[MediaItem, ...]:
    """Read the items of a request.

    Raises:
        InvalidRequest: there are too many of them.
        MediaError: one has no source.
    """
    if len(items) > MAX_MEDIA_ITEMS:
        raise InvalidRequest(f"{len(items)} media items; at most {MAX_MEDIA_ITEMS}")
    return tuple(
        MediaItem(
            # Clients that leave the field alone mean an image; a number that is not known counts as absent.
            modality=MODALITIES.get(item.modality, Modality.IMAGE),
            source=_decode_source(index, item),
            mime=item.mime_type,
            uuid=item.uuid,
        )
        for index, item in enumerate(items)
    )


def _decode_source(index: int, item: pb.MediaItem) -> MediaSource:
    match item.WhichOneof("source"):
        case "url":
            return Url(item.url)
        case "data_uri":
            return DataUri(item.data_uri)
        case "raw_bytes":
            return RawBytes(item.raw_bytes)
        case _:
            raise MediaError(index, "the source is absent: set url, data_uri or raw_bytes", Stage.FETCH)


def encode_media(item: MediaItem, message: pb.MediaItem) -> None:
    """Write one item.

    Raises:
        ValueError: a text is not Unicode.
    """
    message.modality = NUMBERS[item.modality]
    message.mime_type = item.mime
    message.uuid = item.uuid
    match item.source:
        case Url(url):
            message.url = url
        case DataUri(uri):
            message.data_uri = uri
        case RawBytes(data):
            message.raw_bytes = data


def decode_media_options(message: struct_pb2.Struct) -> OptionLayer:
    """Read what a request says about its media.

    Raises:
        InvalidRequest: naming ``media_options.image.KEY``, which is unknown, the server's own or has a wrong value.
    """
    return read_options({key: _plain(value) for key, value in message.fields.items()}, "media_options")


def encode_media_options(options: OptionLayer, message: struct_pb2.Struct) -> None:
    """Write it; nothing for a layer that says nothing."""
    message.update(write_options(options))


def _plain(value: struct_pb2.Value) -> object:
    """The value as JSON would have it; protobuf bounds its depth."""
    match value.WhichOneof("kind"):
        case "number_value":
            return value.number_value
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return {key: _plain(inner) for key, inner in value.struct_value.fields.items()}
        case "list_value":
            return [_plain(inner) for inner in value.list_value.values]
        case _:
            return None
