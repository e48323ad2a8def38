"""A LoRA adapter as everybody but the model sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What a client calls an adapter by."""

    lora_id: int
    """Positive."""
    name: str
    path: str
    """Absolute directory, visible to the engine."""


class Adapter(Protocol):
    """A loaded adapter. Requests that use it keep it alive after it was unloaded."""

    @property
    def info(self) -> AdapterInfo:
        """Its names."""
        ...

    @property
    def digest(self) -> bytes:
        """32 bytes over its weights and settings: equal digests, equal answers."""
        ...
