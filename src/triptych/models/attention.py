"""Causal attention over the paged KV cache.

A step is planned once (:class:`AttentionPlan`: which blocks to gather, which columns to hide) and the
plan serves every layer. Single tokens are one batched call; each longer slice is a call of its own:
over its own keys where it is the whole context, over the gathered context where tokens came before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from triptych.models.contract import KvCache, PackedBatch

_PADDING_ALLOWED = 1.25
"""Gathered columns over used ones, beyond which singles of unlike lengths are no longer one call."""
_FEWEST_COLUMNS = 4096
"""Columns of a call of singles below which splitting costs more than it saves."""


class _Singles(NamedTuple):
    """Some single-token sequences that attend in one call; N of them, W blocks each."""

    members: torch.Tensor | None
    """[N] packed indices, or None: the first N."""
    count: int
    rows: torch.Tensor
    """[N * kv_heads * W] rows of the cache seen as [num_blocks * kv_heads, block_size * head_size]."""
    hidden: torch.Tensor
    """[N, 1, 1, W * block_size]: 0 within the context, -inf after it."""


class _Slice(NamedTuple):
    """One sequence with several new tokens: packed [start, end)."""

    start: int
    end: int
    context: int
    rows: torch.Tensor | None
    """[kv_heads * W] rows of the cache to gather, or None: the slice is the whole context."""
    seen: torch.Tensor | None
    """[end - start, context] bool, with ``rows``."""


class AttentionPlan:
    """One step's reads and writes of the cache. Belongs to the device of the batch."""

    def __init__(self, batch: PackedBatch, kv: KvCache, dtype: torch.dtype) -> None:
        self._kv = kv
        _, self._kv_heads, self._block_size, self._head_size = kv.keys[0].shape
        self._dtype = dtype
        self._heads_at = torch.arange(self._kv_heads, device=batch.slots.device)
        self._writes = self._rows_of_slots(batch.slots)
        self._singles = self._plan_singles(batch)
        self._slices = [self._plan_slice(batch, s) for s in range(batch.singles, len(batch.contexts))]

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's keys and values, each [T, kv_heads, head_size], to their slots."""
        for cache, new in ((self._kv.keys[layer], keys), (self._kv.values[layer], values)):
            cache.view(-1, self._head_size).index_copy_(0, self._writes, new.reshape(-1, self._head_size))

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attend after :meth:`store`.

        Args:
            layer: Which pair of the cache.
            queries: [T, heads, head_size].
            keys: [T, kv_heads, head_size], as stored.
            values: The same shape.

        Returns:
            [T, heads * head_size].
        """
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for group in self._singles:
            picked = queries[: group.count] if group.members is None else queries.index_select(0, group.members)
            # the heads that share a KV head are the rows of one product: [N, kv_heads, group, head_size]
            grouped = picked.unflatten(1, (self._kv_heads, -1))
            result = scaled_dot_product_attention(
                grouped,
                self._gather(self._kv.keys[layer], group.rows, group.count),
                self._gather(self._kv.values[layer], group.rows, group.count),
                attn_mask=group.hidden,
            ).flatten(1, 2)
            if group.members is None:
                out[: group.count] = result
            else:
                out.index_copy_(0, group.members, result)
        for piece in self._slices:
            at = slice(piece.start, piece.end)
            if piece.rows is None:
                past_keys, past_values = keys[at].transpose(0, 1)[None], values[at].transpose(0, 1)[None]
            else:
                past_keys = self._gather(self._kv.keys[layer], piece.rows, 1)[:, :, : piece.context]
                past_values = self._gather(self._kv.values[layer], piece.rows, 1)[:, :, : piece.context]
            result = scaled_dot_product_attention(
                queries[at].transpose(0, 1)[None],
                past_keys,
                past_values,
                attn_mask=piece.seen,
                is_causal=piece.rows is None,
                enable_gqa=queries.shape[1] != self._kv_heads,
            )
            out[at] = result[0].transpose(0, 1)
        return out.flatten(1)

    def _gather(self, cache: torch.Tensor, rows: torch.Tensor, sequences: int) -> torch.Tensor:
        """[sequences, kv_heads, W * block_size, head_size]."""
        flat = cache.view(-1, self._block_size * self._head_size)
        return flat.index_select(0, rows).view(sequences, self._kv_heads, -1, self._head_size)

    def _rows_of_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of the cache seen as [num_blocks * kv_heads * block_size, head_size], token by token, head by head."""
        blocks = torch.div(slots, self._block_size, rounding_mode="floor")
        first = slots + blocks * (self._kv_heads - 1) * self._block_size
        return (first[:, None] + self._heads_at * self._block_size).flatten()

    def _rows_of_blocks(self, tables: torch.Tensor) -> torch.Tensor:
        """Rows for block tables [N, W], ordered sequence, head, block."""
        return (tables[:, None] * self._kv_heads + self._heads_at[:, None]).flatten()

    def _width(self, context: int) -> int:
        return -(-context // self._block_size)

    def _plan_singles(self, batch: PackedBatch) -> list[_Singles]:
        if not batch.singles:
            return []
        contexts = batch.contexts[: batch.singles]
        groups = _group_by_length([self._width(context) * self._block_size for context in contexts])
        if len(groups) == 1:
            return [self._single_group(batch.block_tables[: batch.singles], contexts, None)]
        plans = []
        for group in groups:
            members = torch.tensor(group, device=batch.slots.device)
            tables = batch.block_tables.index_select(0, members)
            plans.append(self._single_group(tables, tuple(contexts[s] for s in group), members))
        return plans

    def _single_group(self, tables: torch.Tensor, contexts: tuple[int, ...], members: torch.Tensor | None) -> _Singles:
        width = self._width(max(contexts))
        columns = torch.arange(width * self._block_size, device=tables.device)
        lengths = torch.tensor(contexts, device=tables.device)[:, None]
        hidden = torch.zeros((len(contexts), len(columns)), dtype=self._dtype, device=tables.device)
        hidden.masked_fill_(columns >= lengths, float("-inf"))
        rows = self._rows_of_blocks(tables[:, :width])
        return _Singles(members, len(contexts), rows, hidden[:, None, None])

    def _plan_slice(self, batch: PackedBatch, s: int) -> _Slice:
        start, end, context = batch.starts[s], batch.starts[s + 1], batch.contexts[s]
        new = end - start
        if new == context:
            return _Slice(start, end, context, None, None)
        rows = self._rows_of_blocks(batch.block_tables[s : s + 1, : self._width(context)])
        # the slice's i-th token stands at context - new + i and sees itself and all before it
        seen = torch.ones((new, context), dtype=torch.bool, device=rows.device).tril(context - new)
        return _Slice(start, end, context, rows, seen)


def _group_by_length(columns: list[int]) -> list[list[int]]:
    """Split sequences so that padding to the longest of each group stays a small share. Sorted inside a group."""
    everyone = list(range(len(columns)))
    if len(columns) * max(columns) <= max(_FEWEST_COLUMNS, _PADDING_ALLOWED * sum(columns)):
        return [everyone]
    groups: list[list[int]] = []
    used = 0
    for s in sorted(everyone, key=lambda s: -columns[s]):
        if groups:
            group = groups[-1]
            longest = columns[group[0]]
            if (len(group) + 1) * longest <= max(_FEWEST_COLUMNS, _PADDING_ALLOWED * (used + columns[s])):
                group.append(s)
                used += columns[s]
                continue
        groups.append([s])
        used = columns[s]
    return groups
