"""What an engine does of a request, as it says itself, and whose work it can go on from.

    media    --------->  encoder, prefill, aggregated       a modality that they read, from a source that they open
    encoder  --rows-->   prefill, aggregated                one fingerprint, a transport in common
    prefill  --KV-->     decode                             one transport

Two engines would find out for themselves that they do not fit, and each time a request would be lost over it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import Internal, UnsupportedFeature
from triptych.core.media import MediaSource, Modality
from triptych.wire.gen import server_pb2
from triptych.wire.modality import MODALITIES, SOURCES, read_markers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triptych.core.media import MediaItem
    from triptych.wire.gen import model_pb2


class Part(enum.Enum):
    """What an engine does of a request."""

    WHOLE = "aggregated"
    ENCODE = "encoder"
    PREFILL = "prefill"
    DECODE = "decode"


READERS = (Part.WHOLE, Part.PREFILL)
"""The parts that read prompts, and so take media or what encoders made of them."""

_PARTS = {
    server_pb2.ENGINE_ROLE_AGGREGATED: Part.WHOLE,
    server_pb2.ENGINE_ROLE_UNSPECIFIED: Part.WHOLE,  # engines that serve every role say so
    server_pb2.ENGINE_ROLE_ENCODER: Part.ENCODE,
    server_pb2.ENGINE_ROLE_PREFILL: Part.PREFILL,
    server_pb2.ENGINE_ROLE_DECODE: Part.DECODE,
}


class Kind(NamedTuple):
    """What engines tell media by before they open them."""

    modality: Modality
    source: type[MediaSource]


def kind_of(item: MediaItem) -> Kind:
    """The kind of one item."""
    return Kind(item.modality, type(item.source))


def kinds(modalities: Iterable[Modality], sources: Iterable[type[MediaSource]]) -> frozenset[Kind]:
    """All of these modalities, from all of these sources."""
    return frozenset(Kind(*pair) for pair in product(modalities, sources))


@dataclass(frozen=True, slots=True)
class RowEnd:
    """One end of the way that encoder rows go: where they are made, or where they are taken in place of media."""

    modalities: frozenset[Modality]
    fingerprint: str
    """Of model revision and processor settings."""
    backends: frozenset[str]
    """The transports that are there."""

    def misfit(self, other: RowEnd) -> str:
        """Why no rows go from one end to the other; empty when they do."""
        if self.fingerprint != other.fingerprint:
            return "their fingerprints differ: another model revision, or other processor settings"
        if not self.backends & other.backends:
            return f"encoder rows move by {_words(self.backends)} here and by {_words(other.backends)} there"
        return ""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What one start of an engine can do."""

    part: Part
    sources: frozenset[type[MediaSource]]
    """Of media that it opens."""
    media: frozenset[Kind]
    """Taken as they are, in requests that are answered; so none by an encoder."""
    rows: RowEnd | None
    """What an encoder makes; of others, what they take in place of media."""
    kv_backend: str
    """The transport that moves its KV; empty where it names none."""

    @classmethod
    def read(cls, server: server_pb2.ServerInfo, model: model_pb2.ModelInfo) -> Abilities:
        """What an engine says.

        Raises:
            UnsupportedFeature: it has a role that is not known here.
            Internal: it says too little.
        """
        part = _PARTS.get(server.engine_role)
        if part is None:
            raise UnsupportedFeature(f"this gateway knows no engines of the role {server.engine_role}")
        encoder, capabilities = model.encoder, model.multimodal_capabilities
        moves_rows = encoder.producer if part is Part.ENCODE else encoder.consumer and part in READERS
        if part is Part.ENCODE and not moves_rows:
            raise Internal("an encoder engine that says nothing of what it makes (ModelInfo.encoder.producer)")
        read = _modalities((*capabilities.aggregate_modalities, *capabilities.prefill_decode_modalities))
        sources = frozenset(SOURCES[number] for number in capabilities.source_types if number in SOURCES)
        moved = _modalities(encoder.modalities)
        if part is Part.ENCODE:
            moved &= read_markers(model).keys()  # an encoder is asked with the item's marker
        if part is Part.ENCODE and not sources:
            raise Internal("an encoder engine that names no sources of media (multimodal_capabilities.source_types)")
        takes_media = part in READERS and not encoder.requires_handoff
        return cls(
            part=part,
            sources=sources,
            media=kinds(read, sources) if takes_media else frozenset(),
            rows=RowEnd(moved, encoder.fingerprint, frozenset(encoder.transfer_backends)) if moves_rows else None,
            kv_backend=server.kv_connector.transfer_backend,
        )

    @property
    def modalities(self) -> frozenset[Modality]:
        """Of media in requests that it can read, by itself or with an encoder's help."""
        moved = self.rows.modalities if self.rows is not None else frozenset[Modality]()
        return moved.union(kind.modality for kind in self.media)

    def misfit(self, user: Abilities) -> str:
        """Why the user of what this engine makes cannot take it; empty when it can, or never would."""
        if self.part is Part.ENCODE and user.part in READERS:
            if self.rows is None or user.rows is None:
                return "the latter takes no encoder outputs"
            return self.rows.misfit(user.rows)
        if self.part is Part.PREFILL and user.part is Part.DECODE:
            named = self.kv_backend and user.kv_backend
            if named and self.kv_backend != user.kv_backend:
                return f"KV moves by {self.kv_backend} here and by {user.kv_backend} there"
        return ""


def _modalities(numbers: Iterable[int]) -> frozenset[Modality]:
    return frozenset(MODALITIES[number] for number in numbers if number in MODALITIES)


def _words(backends: frozenset[str]) -> str:
    return " or ".join(sorted(backends)) or "nothing"
