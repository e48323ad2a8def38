"""A LoRA adapter as everybody but the model sees it."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import Protocol

from triptych.core.errors import InvalidRequest

MAX_ADAPTER_NAME_BYTES = 1024
MAX_PATH_BYTES = 4096
"""Longer ones name nothing on any system of ours."""


def check_adapter_name(field: str, name: str) -> None:
    """Refuse what can be no adapter's name.

    Raises:
        InvalidRequest: it is empty or too long; names the field.
    """
    if not name:
        raise InvalidRequest(f"{field} must not be empty")
    size = len(name.encode(errors="surrogatepass"))
    if size > MAX_ADAPTER_NAME_BYTES:
        raise InvalidRequest(f"{field} has {size} bytes; at most {MAX_ADAPTER_NAME_BYTES}")


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What a client calls an adapter by."""

    lora_id: int
    """Positive."""
    name: str
    path: str
    """Absolute directory, visible to the engine."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            InvalidRequest: naming the field.
        """
        if self.lora_id < 1:
            raise InvalidRequest(f"adapter.lora_id must be positive, not {self.lora_id}")
        check_adapter_name("adapter.lora_name", self.name)
        size = len(self.path.encode(errors="surrogatepass"))
        if size > MAX_PATH_BYTES:
            raise InvalidRequest(f"adapter.source_path has {size} bytes; at most {MAX_PATH_BYTES}")
        if not posixpath.isabs(self.path) or "\0" in self.path:
            raise InvalidRequest(
                f"adapter.source_path must be an absolute directory of the engine's, not {self.path!r}"
            )


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
