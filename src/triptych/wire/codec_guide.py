"""Guides: protobuf <-> core, both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.unknown_fields import UnknownFieldSet

from triptych.core.errors import InvalidRequest, UnsupportedFeature
from triptych.core.guide import MAX_CHOICES, MAX_GUIDE_BYTES, Guide, GuideKind

if TYPE_CHECKING:
    from triptych.wire.gen import generation_pb2 as pb

BACKEND = "xgrammar"
"""The grammar library that a request may ask for by name; it gets the same one unasked."""
_SPARE_BYTES = 64 * 1024
"""What a guide's message may have beside its text."""


def decode_guide(message: pb.GuidedDecoding) -> Guide | None:
    """Read a guide; None where there is none.

    Raises:
        InvalidRequest: it is empty or too large, or a backend is named and there is nothing for it to do.
        UnsupportedFeature: another backend, or a kind of guide that this release of the contract does not have.
    """
    size = message.ByteSize()
    if size > MAX_GUIDE_BYTES + _SPARE_BYTES:  # before any of it becomes text of ours
        raise InvalidRequest(f"guided has {size} bytes; its guide may have {MAX_GUIDE_BYTES}")
    kind = message.WhichOneof("guide")
    if kind is None and len(UnknownFieldSet(message)):
        raise UnsupportedFeature("guided has a guide that is not supported by this engine")
    if kind is None:
        if message.backend:
            raise InvalidRequest("guided.backend is set and guided has no guide")
        return None
    if message.backend not in ("", BACKEND):
        raise UnsupportedFeature(
            f"guided.backend {message.backend[:40]!r} is not supported by this engine; leave it empty, or {BACKEND!r}"
        )
    match GuideKind(kind):
        case GuideKind.CHOICE:
            count = len(message.choice.choices)
            if count > MAX_CHOICES:
                raise InvalidRequest(f"guided.choice has {count} choices; at most {MAX_CHOICES}")
            return Guide(GuideKind.CHOICE, choices=tuple(message.choice.choices))
        case GuideKind.JSON_OBJECT:
            return Guide(GuideKind.JSON_OBJECT)
        case text:
            return Guide(text, getattr(message, kind))


def encode_guide(guide: Guide, message: pb.GuidedDecoding) -> None:
    """Write a guide."""
    match guide.kind:
        case GuideKind.CHOICE:
            message.choice.choices.extend(guide.choices)
        case GuideKind.JSON_OBJECT:
            message.json_object.SetInParent()
        case text:
            setattr(message, text.value, guide.text)
