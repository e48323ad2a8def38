"""Small honest models. Nothing is remembered but what stands in the paged cache.

``HashModel`` writes into each slot what the token there was (its id, or its media row, and its position),
and its logits are a hash of all slots up to a token's own, read back through the block table: one wrong block,
slot, position, row or adapter changes the next token.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from tests.requests import EOS, picture_number
from triptych.models.contract import KvCache, PackedBatch, TextSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.adapter import AdapterInfo
    from triptych.core.encoder_input import EncoderInput

VOCAB = 97
HIDDEN = 2
LEVELS = 1
_PRIME = (1 << 31) - 1
OUT_OF_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes. Error code 12")
"""As torch raises it on a CPU."""


def spec(vocab: int = VOCAB, axes: int = 1) -> TextSpec:
    return TextSpec(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        layers=2,
        kv_heads=1,
        head_size=2 + axes,
        max_context=4096,
        position_axes=axes,
        deepstack_levels=LEVELS,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@dataclass(frozen=True)
class FakeAdapter:
    """An adapter that is its name."""

    info: AdapterInfo

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.info.name.encode()).digest()


@dataclass
class HashModel:
    """Deterministic function of the whole history. Records the shape of every batch."""

    spec: TextSpec = field(default_factory=spec)
    batches: list[tuple[int, ...]] = field(default_factory=list)
    """KV lengths of the sequences of each step."""
    heads: list[int] = field(default_factory=list)
    """Rows of each call of ``logits``."""
    broken: set[int] = field(default_factory=set)
    """Token ids at which ``forward`` raises."""
    most_tokens: int | None = None
    """Tokens above which a batch does not fit into memory."""
    poison: set[int] = field(default_factory=set)
    """Token ids that make the logits of their sequence, and their own KV, not a number."""

    def forward(self, batch: PackedBatch, kv: KvCache) -> torch.Tensor:
        self.batches.append(batch.contexts)
        if self.most_tokens is not None and len(batch.token_ids) > self.most_tokens:
            raise OUT_OF_MEMORY
        if self.broken & set(batch.token_ids.tolist()):
            raise RuntimeError("a token that this model cannot bear")
        self._write(batch, kv)
        logits = [self._logits(batch, kv, int(packed)) for packed in batch.sample_at]
        return torch.stack(logits) if logits else torch.empty(0, self.spec.vocab_size)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.heads.append(len(hidden))
        return hidden  # ``forward`` has them already

    def load_adapter(self, info: AdapterInfo, max_rank: int) -> FakeAdapter:
        return FakeAdapter(info)

    def _write(self, batch: PackedBatch, kv: KvCache) -> None:
        entries = torch.zeros(len(batch.token_ids), 2 + self.spec.position_axes)
        entries[:, 0] = batch.token_ids.float()
        entries[:, 2:] = batch.positions.T.float()
        if batch.media_at is not None:
            # a row hides the placeholder: (picture, row number + deepstack level)
            entries[batch.media_at, 0] = 1000 + batch.media_rows[:, 0]
            entries[batch.media_at, 1] = 1 + batch.media_rows[:, 1] + 100 * batch.media_rows[:, HIDDEN]
        for use in batch.adapters:
            assert (use.at.diff() > 0).all()
            entries[use.at, 1] += 1000 * (1 + use.adapter.digest[0])
        for token in self.poison:
            entries[batch.token_ids == token] = float("nan")
        blocks, offsets = batch.slots // kv.block_size, batch.slots % kv.block_size
        for layer, storage in enumerate((*kv.keys, *kv.values)):
            storage[blocks, 0, offsets] = entries + layer

    def _logits(self, batch: PackedBatch, kv: KvCache, packed: int) -> torch.Tensor:
        sequence = next(s for s in range(len(batch.contexts)) if batch.starts[s] <= packed < batch.starts[s + 1])
        assert (batch.starts[sequence + 1] - batch.starts[sequence] == 1) == (sequence < batch.singles)
        context = batch.contexts[sequence] - (batch.starts[sequence + 1] - 1 - packed)
        indices = torch.arange(context)
        blocks = batch.block_tables[sequence, indices // kv.block_size]
        value = 0
        for layer, storage in enumerate((*kv.keys, *kv.values)):
            entries = storage[blocks, 0, indices % kv.block_size] - layer
            if not torch.isfinite(entries).all():
                return torch.full((self.spec.vocab_size,), float("nan"))
            weights = (indices[:, None] * 31 + torch.arange(entries.shape[1]) + 7 * layer + 1) ** 2 % 65537
            value = (value * 131 + int((entries.long() * weights).sum())) % _PRIME
        scores = (torch.arange(1, self.spec.vocab_size + 1) * (value % 65521 + 1) * 2654435761 + value) % _PRIME
        return scores.float() / (1 << 27)


@dataclass
class UniformModel:
    """Every token is as likely as any other."""

    spec: TextSpec = field(default_factory=spec)

    def forward(self, batch: PackedBatch, kv: KvCache) -> torch.Tensor:
        return torch.zeros(len(batch.sample_at), self.spec.vocab_size)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@dataclass
class EvenGrammar:
    """``length`` even tokens, then the end of the sequence. Its matchers insist on being asked and told in turn."""

    length: int
    vocab: int = VOCAB
    """Tokens it knows; the model may know more or fewer."""
    trouble: dict[str, Exception] = field(default_factory=dict)
    """What ``matcher``, ``allowed`` and ``accept`` raise: the last two from the second token on."""
    matchers: list[EvenMatcher] = field(default_factory=list)

    def matcher(self) -> EvenMatcher:
        if "matcher" in self.trouble:
            raise self.trouble["matcher"]
        self.matchers.append(EvenMatcher(self))
        return self.matchers[-1]


@dataclass
class EvenMatcher:
    grammar: EvenGrammar
    tokens: list[int] = field(default_factory=list)
    """Accepted."""

    def allowed(self) -> np.ndarray:
        if self.tokens and "allowed" in self.grammar.trouble:
            raise self.grammar.trouble["allowed"]
        ids = np.arange(self.grammar.vocab)
        allowed = (ids % 2 == 0) & (ids != EOS) if len(self.tokens) < self.grammar.length else ids == EOS
        allowed.setflags(write=False)  # it may be the grammar's own memory
        return allowed

    def accept(self, token: int) -> None:
        if self.tokens and "accept" in self.grammar.trouble:
            raise self.grammar.trouble["accept"]
        assert self.allowed()[token]
        self.tokens.append(token)


@dataclass
class FakeTower:
    """Row ``r`` of a picture is (what its first patch says, r | the same for the deepstack level)."""

    calls: list[list[int]] = field(default_factory=list)
    """Pictures of each call."""
    broken: set[int] = field(default_factory=set)
    """Pictures that raise."""
    most_rows: int | None = None
    """Rows above which a call does not fit into memory."""
    wrong: dict[int, torch.Tensor] = field(default_factory=dict)
    """Pictures whose rows are replaced."""
    short: bool = False
    """Whether a call for several returns one output less."""

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        pictures = [picture_number(single) for single in inputs]
        self.calls.append(pictures)
        if self.most_rows is not None and sum(single.layout.rows for single in inputs) > self.most_rows:
            raise OUT_OF_MEMORY
        if self.broken & set(pictures):
            raise RuntimeError("a picture that this tower cannot bear")
        outputs = [
            self.wrong.get(picture, picture_rows(picture, single.layout.rows))
            for picture, single in zip(pictures, inputs, strict=True)
        ]
        return outputs[:-1] if self.short and len(outputs) > 1 else outputs


def picture_rows(picture: int, rows: int) -> torch.Tensor:
    """[rows, row width]."""
    columns = torch.zeros(rows, HIDDEN * (1 + LEVELS))
    columns[:, 0] = picture
    columns[:, 1] = torch.arange(rows)
    columns[:, HIDDEN] = picture % 10
    return columns
