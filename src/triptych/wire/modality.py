"""Kinds of media by their numbers on the wire, and the tokens that stand for them in prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.media import DataUri, MediaSource, Modality, RawBytes, Url
from triptych.wire.gen import generation_pb2 as pb

if TYPE_CHECKING:
    from triptych.wire.gen import model_pb2

NUMBERS: dict[Modality, pb.Modality.ValueType] = {
    Modality.IMAGE: pb.MODALITY_IMAGE,
    Modality.VIDEO: pb.MODALITY_VIDEO,
    Modality.AUDIO: pb.MODALITY_AUDIO,
}
MODALITIES: dict[int, Modality] = {int(number): modality for modality, number in NUMBERS.items()}
"""Other numbers may come from other releases of the contract; what they mean is the reader's decision."""
SOURCES: dict[int, type[MediaSource]] = {
    pb.MEDIA_SOURCE_TYPE_URL: Url,
    pb.MEDIA_SOURCE_TYPE_DATA_URI: DataUri,
    pb.MEDIA_SOURCE_TYPE_RAW_BYTES: RawBytes,
}
"""How the bytes of an item are to be had; likewise."""
VIDEO_MARKER = "video_token_id"
"""Key in ``ModelInfo.extra``: the contract has a field for pictures only."""


def read_markers(model: model_pb2.ModelInfo) -> dict[Modality, int]:
    """The token that stands for one item in a prompt, for each modality of which the engine says it."""
    markers: dict[Modality, int] = {}
    if model.multimodal_capabilities.HasField("routing_image_token_id"):
        markers[Modality.IMAGE] = model.multimodal_capabilities.routing_image_token_id
    if VIDEO_MARKER in model.extra.fields:
        number = model.extra.fields[VIDEO_MARKER].number_value
        if number.is_integer() and 0 < number < 2**32:  # 0 is what anything but a number reads as
            markers[Modality.VIDEO] = int(number)
    return markers
