"""Who an item is: 256 bits over everything that determines its encoder rows. And which prompt a prompt is.

Fields are hashed with their lengths before them and a domain tag before all, so that no two different
lists of fields give the same bytes.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

from blake3 import blake3

from triptych.core.errors import CheckpointError
from triptych.core.layout import CONTENT_KEY_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from triptych.core.plan import PromptPlan

_ITEM_DOMAIN = b"triptych.media-item.v2"
"""Carries the version of this list of fields; that of what is done to pixels is in the options' own bytes."""
_PROCESSOR_DOMAIN = b"triptych.processor.v1"
_MODEL_DOMAIN = b"triptych.model.v1"
_PROMPT_DOMAIN = b"triptych.prompt.v1"
_PLACE = struct.Struct("<6I")
_SAMPLE_BYTES = 64
_MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own bound."""


def _digest(domain: bytes, *fields: bytes) -> bytes:
    hasher = blake3()
    for field in (domain, *fields):
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.digest(CONTENT_KEY_BYTES)


def content_key(data: bytes, *, options: bytes, fingerprint: bytes, salt: str = "", uuid: str = "") -> bytes:
    """32 bytes that name one item's rows.

    Args:
        data: The encoded file, however it arrived.
        options: How it is read: ``canonical()`` of what holds for it, whoever said so. Its first bytes say whether the
            file is read as a picture or as a video.
        fingerprint: The processor's, which covers the model revision and its own settings.
        salt: The tenant's namespace.
        uuid: The caller's own name for the item; two files under one name stay two items.
    """
    # Text from JSON may hold lone surrogates; they must hash, not raise.
    names = (salt.encode("utf-8", "surrogatepass"), uuid.encode("utf-8", "surrogatepass"))
    return _digest(_ITEM_DOMAIN, data, options, fingerprint, *names)


def prompt_digest(plan: PromptPlan) -> bytes:
    """32 bytes that name an expanded prompt of one model: its token ids, and who and where its items are.

    How each was read is in its content key, and where its runs lie in the token ids.
    """
    fields = [plan.token_ids.astype("<i4", copy=False).tobytes()]
    for item in plan.items:
        place = _PLACE.pack(*item.grid, item.rows, item.start, len(item.runs))
        fields += [item.modality.value.encode(), place, item.content_key]
    return _digest(_PROMPT_DOMAIN, *fields)


def processor_fingerprint(model_revision: bytes, *settings: bytes) -> bytes:
    """32 bytes over the model revision and the processor's settings, in a fixed order."""
    return _digest(_PROCESSOR_DOMAIN, model_revision, *settings)


def model_revision(directory: Path) -> bytes:
    """32 bytes that tell one checkpoint from another without reading it whole.

    They cover config.json, every weight file's size and header, and a few bytes from the middle of each tensor, so
    a fine-tune of the same shape differs too.

    Raises:
        CheckpointError: a file cannot be read or is no safetensors file.
    """
    paths = [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
    fields: list[bytes] = []
    for path in paths:
        try:
            content = path.read_bytes() if path.suffix == ".json" else _sample(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not a safetensors file: its header is damaged") from error
        fields += [path.name.encode("utf-8", "surrogateescape"), content]
    return _digest(_MODEL_DOMAIN, *fields)


def _sample(path: Path) -> bytes:
    """Size, header and the middle of every tensor of one safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if header_size > min(size, _MAX_HEADER_BYTES):
            raise ValueError
        header = file.read(header_size)
        parts = [size.to_bytes(8, "little"), header]
        for name, entry in sorted(json.loads(header).items()):
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                file.seek(8 + header_size + (first + last) // 2)
                parts.append(file.read(_SAMPLE_BYTES))
    return b"".join(parts)
