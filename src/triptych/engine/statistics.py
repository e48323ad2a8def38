"""A snapshot of what the scheduler has done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.engine.blocks import BlockStatistics
    from triptych.engine.encoder_cache import EncoderCacheStatistics


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counters since the start."""

    steps: int
    accepted: int
    finished: int
    cancelled: int
    failed: int
    preemptions: int
    prompt_tokens: int
    """Of requests that were admitted; the outputs of one request count once together, as the first of them does."""
    cached_prompt_tokens: int
    """Of those prompt tokens, the ones whose KV was reused."""
    computed_tokens: int
    """All that steps computed: again after a preemption, and the end of its prompt by every output."""
    generated_tokens: int
    encoded_items: int
    encode_seconds: float
    token_seconds: float
    blocks: BlockStatistics
    encoder_cache: EncoderCacheStatistics
