"""LoRA adapters by name: protobuf <-> core, both ways."""

from __future__ import annotations

from triptych.core.adapter import AdapterInfo
from triptych.wire.gen import lora_pb2 as pb


def decode_adapter(message: pb.LoraAdapter) -> AdapterInfo:
    """Read what a client calls an adapter by.

    Raises:
        InvalidRequest: a field is absent or wrong; the message names it.
    """
    return AdapterInfo(message.lora_id, message.lora_name, message.source_path)


def encode_adapter(info: AdapterInfo) -> pb.LoraAdapter:
    """Write what a client calls an adapter by."""
    return pb.LoraAdapter(lora_id=info.lora_id, lora_name=info.name, source_path=info.path)
