"""How busy an engine is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """A snapshot of how busy the engine is."""

    running_requests: int
    queued_requests: int
    """Waiting for the scheduler or for media preparation; each output of a request counts."""
    used_blocks: int
    """KV blocks held by live requests; cached blocks that can be reclaimed at once do not count."""
    total_blocks: int
    running_tokens: int
    """Tokens whose KV is held by running requests."""
    waiting_tokens: int
    """Tokens of queued requests that are not computed yet; outputs that wait for the prompt of another add none."""
    prefill_batch: int
    """Requests in the latest step that were still computing their prompt."""
    decode_batch: int
