"""Packed batches by hand: a model run over a paged cache without the engine, for tests of the model alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from triptych.models.contract import AdapterUse, KvCache, PackedBatch

if TYPE_CHECKING:
    from triptych.core.adapter import Adapter
    from triptych.core.layout import Positions
    from triptych.core.plan import PromptPlan
    from triptych.models.contract import TextModel, TextSpec


@dataclass
class Sequence:
    """One growing sequence: prompt, rows of its items, and its blocks."""

    plan: PromptPlan
    positions: Positions
    rows: list[torch.Tensor] = field(default_factory=list)
    adapter: Adapter | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.plan.token_ids.tolist()

    def positions_at(self, start: int, end: int) -> np.ndarray:
        known = self.positions.table[:, start:end]
        if end <= len(self.plan):
            return known
        later = np.arange(max(start, len(self.plan)), end) + self.positions.delta
        return np.concatenate([known, np.broadcast_to(later, (len(known), len(later)))], axis=1)


class Paged:
    """A cache with blocks dealt in random order."""

    def __init__(self, model: TextModel, *, blocks: int = 256, block_size: int = 16, seed: int = 0) -> None:
        self.model = model
        self.kv = empty_cache(model.spec, blocks, block_size)
        self._free = list(range(blocks))
        random.Random(seed).shuffle(self._free)

    def step(self, slices: list[tuple[Sequence, int]], *, sample: bool = True) -> torch.Tensor:
        """Compute the next ``n`` tokens of each sequence; logits [sequences, vocab] of each one's last token.

        The sequences with one token come first, in the packed batch and in the logits.
        """
        slices = sorted(slices, key=lambda entry: entry[1] > 1)
        ids: list[int] = []
        positions, slots, starts, contexts, media_at, media_rows = [], [], [0], [], [], []
        size = self.kv.block_size
        for sequence, count in slices:
            start, end = sequence.computed, sequence.computed + count
            while len(sequence.blocks) * size < end:
                sequence.blocks.append(self._free.pop())
            for index, item in enumerate(sequence.plan.items):
                places = [at for run in item.runs for at in range(run.start, run.end)]
                for row, at in enumerate(places):
                    if start <= at < end:
                        media_at.append(len(ids) + at - start)
                        media_rows.append(sequence.rows[index][row])
            ids += sequence.tokens[start:end]
            positions.append(sequence.positions_at(start, end))
            slots += [sequence.blocks[at // size] * size + at % size for at in range(start, end)]
            starts.append(starts[-1] + count)
            contexts.append(end)
            sequence.computed = end
        adapters = {id(sequence.adapter): sequence.adapter for sequence, _ in slices if sequence.adapter is not None}
        widest = max(len(sequence.blocks) for sequence, _ in slices)
        batch = PackedBatch(
            token_ids=torch.tensor(ids),
            positions=torch.from_numpy(np.concatenate(positions, axis=1).astype(np.int64)),
            slots=torch.tensor(slots),
            starts=tuple(starts),
            contexts=tuple(contexts),
            block_tables=torch.tensor([s.blocks + [0] * (widest - len(s.blocks)) for s, _ in slices]),
            singles=sum(count == 1 for _, count in slices),
            sample_at=torch.tensor(starts[1:] if sample else [], dtype=torch.int64) - 1,
            media_at=torch.tensor(media_at) if media_at else None,
            media_rows=torch.stack(media_rows) if media_at else None,
            adapters=tuple(AdapterUse(adapter, _at(adapter, slices, starts)) for adapter in adapters.values()),
        )
        return self.model.logits(self.model.forward(batch, self.kv))

    def prefill(self, sequence: Sequence, chunk: int) -> torch.Tensor:
        """Logits [vocab] after the whole prompt, computed ``chunk`` tokens at a time."""
        while True:
            count = min(chunk, len(sequence.plan) - sequence.computed)
            logits = self.step([(sequence, count)])[0]
            if sequence.computed == len(sequence.plan):
                return logits

    def greedy(self, sequence: Sequence, count: int, chunk: int = 1 << 30) -> list[int]:
        """The next ``count`` tokens."""
        logits = self.prefill(sequence, chunk)
        for _ in range(count - 1):
            sequence.tokens.append(int(logits.argmax()))
            logits = self.step([(sequence, 1)])[0]
        sequence.tokens.append(int(logits.argmax()))
        return sequence.tokens[len(sequence.plan) :]


def _at(adapter: Adapter, slices: list[tuple[Sequence, int]], starts: list[int]) -> torch.Tensor:
    """Packed indices of the tokens that use the adapter."""
    stretches = zip(slices, starts[:-1], starts[1:], strict=True)
    at = [torch.arange(start, end) for (sequence, _), start, end in stretches if sequence.adapter is adapter]
    return torch.cat(at)


def empty_cache(spec: TextSpec, blocks: int, block_size: int) -> KvCache:
    shape = (blocks, spec.layers, 2, spec.kv_heads, block_size, spec.head_size)
    return KvCache(torch.zeros(shape, dtype=spec.dtype, device=spec.device))
