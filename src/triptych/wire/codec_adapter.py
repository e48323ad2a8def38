"""LoRA adapters by name: protobuf <-> core, both ways."""

from __future__ import annotations

import posixpath

from triptych.core.adapter import AdapterInfo
from triptych.core.errors import InvalidRequest
from triptych.core.request import MAX_ADAPTER_NAME_BYTES
from triptych.wire.gen import lora_pb2 as pb

MAX_PATH_BYTES = 4096
"""Longer ones name nothing on any system of ours."""


def decode_adapter(message: pb.LoraAdapter) -> AdapterInfo:
    """Read what a client calls an adapter by.

    Raises:
        InvalidRequest: a field is absent or wrong; the message names it.
    """
    if message.lora_id < 1:
        raise InvalidRequest(f"adapter.lora_id must be positive, not {message.lora_id}")
    name = decode_name("adapter.lora_name", message.lora_name)
    size = len(message.source_path.encode())
    if size > MAX_PATH_BYTES:
        raise InvalidRequest(f"adapter.source_path has {size} bytes; at most {MAX_PATH_BYTES}")
    if not posixpath.isabs(message.source_path):
        raise InvalidRequest(f"adapter.source_path must be an absolute directory, not {message.source_path!r}")
    return AdapterInfo(message.lora_id, name, message.source_path)


def decode_name(field: str, name: str) -> str:
    """Check the name of an adapter.

    Raises:
        InvalidRequest: it is empty or too long.
    """
    if not name:
        raise InvalidRequest(f"{field} must not be empty")
    size = len(name.encode())
    if size > MAX_ADAPTER_NAME_BYTES:
        raise InvalidRequest(f"{field} has {size} bytes; at most {MAX_ADAPTER_NAME_BYTES}")
    return name


def encode_adapter(info: AdapterInfo) -> pb.LoraAdapter:
    """Write what a client calls an adapter by."""
    return pb.LoraAdapter(lora_id=info.lora_id, lora_name=info.name, source_path=info.path)
