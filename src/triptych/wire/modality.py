"""Modalities by their numbers on the wire."""

from __future__ import annotations

from triptych.core.media import Modality
from triptych.wire.gen import generation_pb2 as pb

NUMBERS: dict[Modality, pb.Modality.ValueType] = {
    Modality.IMAGE: pb.MODALITY_IMAGE,
    Modality.VIDEO: pb.MODALITY_VIDEO,
    Modality.AUDIO: pb.MODALITY_AUDIO,
}
MODALITIES: dict[int, Modality] = {int(number): modality for modality, number in NUMBERS.items()}
"""Other numbers may come from other releases of the contract; what they mean is the reader's decision."""
