"""What the engine asks of a model. Everything here is shapes; nothing is a family.

One step computes a *packed* batch: the new tokens of several sequences laid end to end, no padding.

    packed index      0 ............ 7   8   9  10 .......... 15
    sequence          [ 0: 8 tokens    ][1 ][2 ][ 3: 6 tokens  ]

The order is the engine's: single-token sequences come first (``singles`` of them), so that decode
attention is one batched product, then the longer slices, each handled on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from triptych.core.handles import KvLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from triptych.core.adapter import Adapter, AdapterInfo
    from triptych.core.encoder_input import EncoderInput


@dataclass(frozen=True, slots=True)
class RowSpec:
    """The shape of encoder rows, as the engine needs it."""

    row_width: int
    """Columns of one row: the main level, then each deepstack level."""
    dtype: torch.dtype
    """The decoder's."""
    device: torch.device

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.row_width * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TextSpec:
    """The text decoder's shape, as the engine needs it."""

    vocab_size: int
    hidden_size: int
    layers: int
    kv_heads: int
    head_size: int
    max_context: int
    """Positions the checkpoint was made for."""
    position_axes: int
    """1 for plain rotary, 3 for mRoPE."""
    deepstack_levels: int
    """Extra row levels added after the first decoder layers; 0 without deepstack."""
    dtype: torch.dtype
    device: torch.device

    @property
    def row_width(self) -> int:
        """Columns of one embedding row: the main level, then each deepstack level."""
        return self.hidden_size * (1 + self.deepstack_levels)

    @property
    def rows(self) -> RowSpec:
        """The encoder rows that it reads."""
        return RowSpec(self.row_width, self.dtype, self.device)

    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.dtype.itemsize


class KvCache:
    """The paged KV storage. A block is one piece of memory over all layers, so that it can be moved as one.

        storage     [num_blocks, layers, 2 (keys, values), kv_heads, block_size, head_size], contiguous
        rows        the same memory as [num_blocks * layers * 2 * kv_heads, block_size * head_size]

    One block of one head is a row. A layer's keys are seen through the rows from its own first one on, and its values
    through those from theirs on: row ``block * block_rows + head`` is then the same number for all of them.

    Storage begins as zeros: slots past a context are multiplied by weight 0, which only a finite number survives.
    """

    __slots__ = ("block_rows", "block_size", "key_rows", "keys", "storage", "value_rows", "values")

    def __init__(self, storage: torch.Tensor) -> None:
        blocks, layers, _, kv_heads, self.block_size, head_size = storage.shape
        self.storage = storage
        self.block_rows = layers * 2 * kv_heads
        """Rows from one block to the next."""
        self.keys = tuple(storage[:, layer, 0] for layer in range(layers))
        self.values = tuple(storage[:, layer, 1] for layer in range(layers))
        """Views, one a layer: [num_blocks, kv_heads, block_size, head_size], not contiguous."""
        rows = storage.view(blocks * self.block_rows, self.block_size * head_size)
        firsts = range(0, self.block_rows, kv_heads)
        self.key_rows = tuple(rows[first:] for first in firsts[::2])
        self.value_rows = tuple(rows[first:] for first in firsts[1::2])
        """Views, one a layer, contiguous; see above."""

    @property
    def layout(self) -> KvLayout:
        """The shape of a block, as other engines compare it with theirs."""
        _, layers, _, kv_heads, block_size, head_size = self.storage.shape
        dtype = self.storage.dtype
        return KvLayout(layers, kv_heads, head_size, block_size, str(dtype).removeprefix("torch."), dtype.itemsize)

    def memory(self) -> npt.NDArray[np.uint8]:
        """[num_blocks, block_bytes]: the storage itself, which must be a CPU's."""
        return self.storage.view(len(self.storage), -1).view(torch.uint8).numpy()


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """Which of a batch's tokens go through a LoRA adapter."""

    adapter: Adapter
    """One that this model loaded."""
    at: torch.Tensor
    """[K] int64, ascending packed indices."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The new tokens of one step. T tokens, S sequences, R wanted rows, M media rows."""

    token_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[axes, T] int64."""
    slots: torch.Tensor
    """[T] int64: block id * block size + offset at which each token's KV is written."""
    starts: tuple[int, ...]
    """S + 1 packed offsets: sequence s is [starts[s], starts[s + 1])."""
    contexts: tuple[int, ...]
    """S KV lengths after this step: tokens before the slice plus the slice."""
    block_tables: torch.Tensor
    """[S, widest table] int64 block ids. Behind a sequence's own ones comes one of them again: what is hidden is
    multiplied too, and nobody else's broken numbers shall be."""
    singles: int
    """The first ``singles`` sequences have exactly one token."""
    sample_at: torch.Tensor
    """[R] int64 packed indices whose last hidden states are wanted; in no order, and one may stand there twice."""
    media_at: torch.Tensor | None
    """[M] int64 packed indices that take a row instead of a token embedding, or None."""
    media_rows: torch.Tensor | None
    """[M, row width]."""
    adapters: tuple[AdapterUse, ...] = ()
    """Each adapter once; no token twice. The others go through the base model alone."""


class TextModel(Protocol):
    """A causal decoder over a paged KV cache."""

    @property
    def spec(self) -> TextSpec:
        """Its shape."""
        ...

    def forward(self, batch: PackedBatch, kv: KvCache) -> torch.Tensor:
        """Write the batch's KV, attend, and return the hidden states [R, hidden] that ``logits`` reads."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] in float32. Rows are independent: a large R can be had piece by piece."""
        ...

    def load_adapter(self, info: AdapterInfo, max_rank: int) -> Adapter:
        """Read a PEFT adapter from its directory, for use in batches; from any thread, beside running batches.

        Raises:
            InvalidRequest: the directory or the adapter cannot be used; names the file, the tensor or the setting.
            Overloaded: there is not enough memory for it.
        """
        ...


class VisionTower(Protocol):
    """An encoder of pictures."""

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """One tensor [rows, row width] for each input, in order; the work of one call is batched."""
        ...


@dataclass(frozen=True, slots=True)
class Model:
    """What a role loads. A tower is absent for text-only checkpoints."""

    text: TextModel
    tower: VisionTower | None


@dataclass(frozen=True, slots=True)
class TowerModel:
    """What an encoder engine loads: a tower, and no decoder."""

    tower: VisionTower
    spec: RowSpec
    """Of the rows that the decoder of the same checkpoint reads."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; the words are those of torch on a CPU, and of CUDA outside torch's allocator."""
    words = ("can't allocate memory", "out of memory")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error) for word in words)


def is_lost(error: BaseException) -> bool:
    """Whether the device is gone. Nothing that is computed on it later could be trusted."""
    return isinstance(error, torch.AcceleratorError)
