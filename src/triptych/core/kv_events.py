"""What happens to cached KV blocks, for whoever routes requests to where their prefix lies.

The engine's ledger says what changed; the changes of one step are a batch, and batches are numbered without gaps.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block's content can be found by its hash from now on."""

    block_hash: bytes
    """32 bytes, chained: it covers everything before it."""
    parent: bytes | None
    """The hash of the block before it; None for a first block."""
    token_ids: tuple[int, ...]
    """One block's worth; positions of media rows hold the placeholder id."""
    item_keys: tuple[bytes, ...]
    """Content keys of the media items that lie in the block, in order."""
    lora_id: int
    """0 without an adapter."""
    lora_name: str
    request_id: str
    """The engine's name for the request that computed it; the client's once it leaves the role; empty if unknown."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The content can no longer be found."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing that was stored before can be found."""


KvChange = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KvBatch:
    """The changes of one moment.

    A snapshot is several batches that all bear the number of the last batch whose changes they include (before the
    first one, the number before its). It begins with AllBlocksCleared, goes on with what is stored, parents before
    their children, and is complete with a batch without changes; the next number follows. Who lost it half-way needs
    another snapshot.
    """

    sequence: int
    """Without gaps within one start of an engine, and above all numbers of earlier ones. A heartbeat (no changes) bears
    the number of the batch before it."""
    unix_nanos: int
    changes: tuple[KvChange, ...]
