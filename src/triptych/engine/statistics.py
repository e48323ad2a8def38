"""Snapshots of the scheduler: how busy it is, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.engine.blocks import BlockStatistics
    from triptych.engine.encoder_cache import EncoderCacheStatistics


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """How busy the scheduler is, at most one step old."""

    running_requests: int
    waiting_requests: int
    used_blocks: int
    """Held by live requests; reclaimable blocks do not count."""
    total_blocks: int
    running_tokens: int
    """Tokens whose KV running requests hold."""
    waiting_tokens: int
    """Known tokens of waiting requests, all of them still to be computed or found."""
    prefill_batch: int
    """Requests of the latest step that were still computing their prompt."""
    decode_batch: int


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
    """Of requests that were admitted, counted once each."""
    cached_prompt_tokens: int
    """Of those prompt tokens, the ones whose KV was reused."""
    computed_tokens: int
    generated_tokens: int
    encoded_items: int
    encode_seconds: float
    token_seconds: float
    blocks: BlockStatistics
    encoder_cache: EncoderCacheStatistics
