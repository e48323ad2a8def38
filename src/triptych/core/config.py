"""Frozen settings, one class per layer. A default is written here and nowhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych.core.errors import StartupError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise StartupError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of one step and of what may be in flight."""

    max_batched_tokens: int = 2048
    """Tokens of one step, prefill and decode together."""
    max_running_requests: int = 64
    """Requests that hold KV at once."""
    max_waiting_requests: int = 1024
    """Requests in the queue; one more is refused as overloaded."""
    max_context: int = 4096
    """Prompt and answer together, in tokens."""
    block_size: int = 16
    """Tokens in one KV block."""
    num_blocks: int = 1024
    """Blocks in the KV pool."""
    encoder_items: int = 16
    """Items encoded in one step."""
    encoder_tokens: int = 16384
    """Pre-merge encoder tokens of one step; an item larger than this runs alone."""
    encoder_cache_bytes: int = 128 * MIB
    """Bytes of encoder rows kept, in use and reusable together."""
    priority_seconds: float = 60.0
    """The most a request of high priority is treated as older than it is, and one of low priority as younger; so this
    is also what bounds how long the one can keep the other waiting."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            StartupError: naming the field.
        """
        _positive(
            self, "max_batched_tokens", "max_running_requests", "max_waiting_requests", "max_context", "block_size"
        )
        _positive(self, "num_blocks", "encoder_items", "encoder_tokens", "encoder_cache_bytes")
        if not 0 <= self.priority_seconds < math.inf:
            raise StartupError(f"priority_seconds must be a finite number >= 0, not {self.priority_seconds}")


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What one request's media may cost; checked before anything is allocated."""

    max_item_bytes: int = 64 * MIB
    """Encoded bytes of one item."""
    max_item_pixels: int = 64_000_000
    """Width times height of one picture."""
    max_items: int = 64
    """Items of one request."""
    max_request_pixels: int = 128_000_000
    """Pixels of all pictures of one request together."""
    media_preparation_limit: int = 4
    """Requests whose media are prepared at once."""
    max_waiting_preparations: int = 256
    """Requests that wait for one of these places; one more is refused as overloaded."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            StartupError: naming the field.
        """
        _positive(self, "max_item_bytes", "max_item_pixels", "max_items", "max_request_pixels")
        _positive(self, "media_preparation_limit", "max_waiting_preparations")
