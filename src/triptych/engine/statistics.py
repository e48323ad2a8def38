"""Snapshots of what schedulers have done."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.engine.blocks import BlockStatistics
    from triptych.engine.encoder_cache import EncoderCacheStatistics


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counters since the start, unless they say otherwise."""

    steps: int
    accepted: int
    finished: int
    """Outputs that were handed to another engine among them."""
    cancelled: int
    failed: int
    preemptions: int
    prompt_tokens: int
    """Of requests that were admitted; the outputs of one request count once together, as the first of them does."""
    cached_prompt_tokens: int
    """Of those prompt tokens, the ones whose KV this engine had."""
    computed_tokens: int
    """All that steps computed: again after a preemption, and the end of its prompt by every output."""
    generated_tokens: int
    encoded_items: int
    imported_items: int
    """Media items whose rows another engine had encoded, as often as they were put into the encoder cache."""
    exported_sessions: int
    """Prompts that another engine may take."""
    imported_sessions: int
    """Prompts that came from another engine."""
    imported_blocks: int
    """KV blocks that were fetched for them."""
    sessions: int
    """Now: those that another engine may take or is taking, or whose withdrawal is not confirmed."""
    leased_blocks: int
    """Now: KV blocks held for these; one that two of them share counts twice."""
    loads: int
    """Now: prompts of other engines on their way, whether or not somebody still waits for them."""
    loading_blocks: int
    """Now: KV blocks held for these."""
    encode_seconds: float
    token_seconds: float
    blocks: BlockStatistics
    encoder_cache: EncoderCacheStatistics

    def ledgers(self) -> dict[str, dict[str, float]]:
        """All of it, by ledger."""
        counters = asdict(self)
        blocks, encoder_cache = counters.pop("blocks"), counters.pop("encoder_cache")
        return {"scheduler": counters, "kv_blocks": blocks, "encoder_cache": encoder_cache}


@dataclass(frozen=True, slots=True)
class EncodeStatistics:
    """Of an encoder engine: counters of media items since the start, unless they say otherwise."""

    steps: int
    accepted: int
    handed_over: int
    """Whose rows another engine may take."""
    cancelled: int
    failed: int
    gone: int
    """Sent back, because rows of their group were thought to be cached and were not."""
    encoded_items: int
    sessions: int
    """Now: items whose rows another engine may take or is taking, or whose withdrawal is not confirmed."""
    leased_bytes: int
    """Now: held for these."""
    held_bytes: int
    """Now: held for these and for items that were admitted."""
    quota_bytes: int
    """All that can be held."""
    encode_seconds: float
    blocks: BlockStatistics
    encoder_cache: EncoderCacheStatistics

    def ledgers(self) -> dict[str, dict[str, float]]:
        """All of it, by ledger."""
        counters = asdict(self)
        blocks, encoder_cache = counters.pop("blocks"), counters.pop("encoder_cache")
        return {"scheduler": counters, "row_blocks": blocks, "encoder_cache": encoder_cache}
