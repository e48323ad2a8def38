"""Causal attention over the paged KV cache.

A step is planned once (:class:`AttentionPlan`: which blocks to gather, which columns to hide) and the plan
serves every layer. Single tokens of sequences of like lengths share a call; each longer slice is a call of its
own: over its own keys where it is the whole context, over the gathered context where tokens came before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.models.contract import KvCache, PackedBatch

_WORKSPACE_BYTES = 4 * 1024 * 1024
"""Keys gathered for one call of singles; a longer sequence has a call to itself."""
_CALL_COLUMNS = 256
"""Columns of padding that cost as much as one call more."""


class Workspace:
    """Memory for gathered blocks, kept over layers and steps: touching fresh pages costs more than the copy.

    One per model; a step uses it and leaves nothing in it.
    """

    def __init__(self) -> None:
        self._keys = torch.empty(0)
        self._values = torch.empty(0)

    def reserve(self, elements: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two flat tensors of at least this many elements, of ``like``'s type and device."""
        if self._keys.numel() < elements or self._keys.dtype != like.dtype or self._keys.device != like.device:
            self._keys = torch.empty(elements, dtype=like.dtype, device=like.device)
            self._values = torch.empty_like(self._keys)
        return self._keys, self._values


class _Singles(NamedTuple):
    """Some single-token sequences that attend in one call; N of them, W blocks each."""

    members: slice | torch.Tensor
    """Packed indices: a stretch, or [N]."""
    sequences: int
    """N."""
    rows: torch.Tensor
    """[N * kv_heads * W] of a layer's rows; see :class:`~triptych.models.contract.KvCache`."""
    hidden: torch.Tensor
    """[N, 1, 1, W * block_size]: 0 within the context, -inf after it."""


class _Slice(NamedTuple):
    """One sequence with several new tokens: packed [start, end)."""

    start: int
    end: int
    context: int
    rows: torch.Tensor | None
    """[kv_heads * W] of a layer's rows, or None: the slice is the whole context."""
    seen: torch.Tensor | None
    """[end - start, context] bool, with ``rows``."""


class AttentionPlan:
    """One step's reads and writes of the cache. Belongs to the device of the batch."""

    def __init__(self, batch: PackedBatch, kv: KvCache, workspace: Workspace) -> None:
        self._kv = kv
        *_, self._kv_heads, self._block_size, self._head_size = kv.storage.shape
        self._dtype = kv.storage.dtype
        self._heads_at = torch.arange(self._kv_heads, device=batch.slots.device)
        self._writes = self._rows_of_slots(batch.slots)
        self._singles = self._plan_singles(batch)
        self._slices = [self._plan_slice(batch, s) for s in range(batch.singles, len(batch.contexts))]
        gathers = [len(group.rows) for group in self._singles]
        gathers += [len(piece.rows) for piece in self._slices if piece.rows is not None]
        elements = max(gathers, default=0) * self._block_size * self._head_size
        self._keys, self._values = workspace.reserve(elements, kv.storage)

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's keys and values, each [T, kv_heads, head_size], to their slots."""
        for rows, new in ((self._kv.key_rows[layer], keys), (self._kv.value_rows[layer], values)):
            rows.view(-1, self._head_size).index_copy_(0, self._writes, new.reshape(-1, self._head_size))

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attend after :meth:`store`.

        Args:
            layer: Which of the cache's.
            queries: [T, heads, head_size].
            keys: [T, kv_heads, head_size], as stored.
            values: The same shape.

        Returns:
            [T, heads * head_size].
        """
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        key_rows, value_rows = self._kv.key_rows[layer], self._kv.value_rows[layer]
        for group in self._singles:
            at = group.members
            picked = queries[at] if isinstance(at, slice) else queries.index_select(0, at)
            result = scaled_dot_product_attention(
                # the heads that share a KV head are the rows of one product: [N, kv_heads, group, head_size]
                picked.unflatten(1, (self._kv_heads, -1)),
                self._gather(key_rows, group.rows, group.sequences, self._keys),
                self._gather(value_rows, group.rows, group.sequences, self._values),
                attn_mask=group.hidden,
            ).flatten(1, 2)
            if isinstance(at, slice):
                out[at] = result
            else:
                out.index_copy_(0, at, result)
        for piece in self._slices:
            stretch = slice(piece.start, piece.end)
            if piece.rows is None:
                all_keys, all_values = keys[stretch].transpose(0, 1)[None], values[stretch].transpose(0, 1)[None]
            else:
                all_keys = self._gather(key_rows, piece.rows, 1, self._keys)[:, :, : piece.context]
                all_values = self._gather(value_rows, piece.rows, 1, self._values)[:, :, : piece.context]
            result = scaled_dot_product_attention(
                queries[stretch].transpose(0, 1)[None],
                all_keys,
                all_values,
                attn_mask=piece.seen,
                is_causal=piece.rows is None,
                enable_gqa=queries.shape[1] != self._kv_heads,
            )
            out[stretch] = result[0].transpose(0, 1)
        return out.flatten(1)

    def _gather(self, cache: torch.Tensor, rows: torch.Tensor, sequences: int, into: torch.Tensor) -> torch.Tensor:
        """[sequences, kv_heads, W * block_size, head_size], in the workspace until the next gather."""
        width = self._block_size * self._head_size
        out = into[: len(rows) * width].view(-1, width)
        torch.index_select(cache, 0, rows, out=out)
        return out.view(sequences, self._kv_heads, -1, self._head_size)

    def _rows_of_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Of a layer's rows cut into rows of [head_size], those of the slots, token by token, head by head."""
        blocks = torch.div(slots, self._block_size, rounding_mode="floor")
        first = slots + blocks * (self._kv.block_rows - 1) * self._block_size
        return (first[:, None] + self._heads_at * self._block_size).flatten()

    def _rows_of_blocks(self, tables: torch.Tensor) -> torch.Tensor:
        """Of a layer's rows those of block tables [N, W], ordered sequence, head, block."""
        return (tables[:, None] * self._kv.block_rows + self._heads_at[:, None]).flatten()

    def _width(self, context: int) -> int:
        return -(-context // self._block_size)

    def _plan_singles(self, batch: PackedBatch) -> list[_Singles]:
        contexts = batch.contexts[: batch.singles]
        column_bytes = self._kv_heads * self._head_size * self._dtype.itemsize
        plans = []
        for group in group_by_length(contexts, most_columns=_WORKSPACE_BYTES // column_bytes):
            members: slice | torch.Tensor = slice(group[0], group[-1] + 1)
            tables = batch.block_tables[members]
            if group != list(range(group[0], group[-1] + 1)):
                members = torch.tensor(group, device=batch.slots.device)
                tables = batch.block_tables.index_select(0, members)
            plans.append(self._single_group(tables, [contexts[s] for s in group], members))
        return plans

    def _single_group(self, tables: torch.Tensor, contexts: list[int], members: slice | torch.Tensor) -> _Singles:
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


def group_by_length(contexts: Sequence[int], most_columns: int) -> list[list[int]]:
    """Split sequences into calls, each padded to its longest.

    A call holds at most ``most_columns`` columns, or one sequence, and no sequence in it wastes more than a call
    of its own would cost. In order of length where lengths differ by that much, else as they come.
    """
    order = list(range(len(contexts)))
    if contexts and max(contexts) - min(contexts) > _CALL_COLUMNS:
        order.sort(key=lambda s: -contexts[s])
    groups: list[list[int]] = []
    longest = 0
    for s in order:
        padded = max(longest, contexts[s])
        if not groups or padded * (len(groups[-1]) + 1) > most_columns or padded - contexts[s] > _CALL_COLUMNS:
            groups.append([])
            padded = contexts[s]
        groups[-1].append(s)
        longest = padded
    return groups
