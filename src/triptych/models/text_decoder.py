"""The text decoder: one class for the Qwen2, Qwen3, Llama and Qwen3-VL shapes, chosen by numbers alone.

Packed and paged, see ``contract.py``. A layer is four products (``layer.py``); in a step that uses adapters each has
their updates added, for the tokens that use them (``lora.py``). After the last layer's attention only the wanted
tokens go on: nobody reads the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear, rms_norm, silu

from triptych.models.attention import AttentionPlan, Workspace
from triptych.models.contract import TextSpec
from triptych.models.layer import Layer
from triptych.models.lora import adapted
from triptych.models.lora_load import load_adapter
from triptych.models.projections import modules
from triptych.models.rotary import Rotary, rotate
from triptych.models.weights import Slot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from triptych.core.adapter import AdapterInfo
    from triptych.models.contract import KvCache, PackedBatch
    from triptych.models.decoder_config import DecoderConfig
    from triptych.models.layer import Placement
    from triptych.models.lora import AdaptedLayer, LoraAdapter
    from triptych.models.rotary import RotaryTables


class TextDecoder:
    """A :class:`~triptych.models.contract.TextModel`, for one thread. Built with empty weights: fill ``slots()``."""

    def __init__(self, config: DecoderConfig, prefix: str, deepstack_levels: int, at: Placement) -> None:
        """``prefix`` begins the names of all stored tensors but the head's."""
        self._config = config
        self._prefix = prefix
        self.spec = TextSpec(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_size=config.head_size,
            max_context=config.max_context,
            position_axes=1 if config.rotary.mrope_section is None else 3,
            deepstack_levels=deepstack_levels,
            dtype=at.dtype,
            device=at.device,
        )
        self._embedding = at.empty(config.vocab_size, config.hidden_size)
        self._layers = [Layer.empty(config, at) for _ in range(config.layers)]
        self._norm = at.empty(config.hidden_size)
        self._head = self._embedding if config.tied else at.empty(config.vocab_size, config.hidden_size)
        self._rotary = Rotary(config.rotary, at.device, at.dtype)
        self._workspace = Workspace()
        # the layer after whose attention only the wanted tokens go on; none where rows are added after the last one
        self._narrowing = config.layers - 1 if deepstack_levels < config.layers else config.layers

    def slots(self) -> Iterator[Slot]:
        """Every stored tensor of the decoder."""
        prefix = self._prefix
        yield Slot(f"{prefix}embed_tokens.weight", self._embedding)
        for index, layer in enumerate(self._layers):
            for slot in layer.slots(self._config):
                yield slot.under(f"{prefix}layers.{index}.")
        yield Slot(f"{prefix}norm.weight", self._norm)
        if not self._config.tied:
            yield Slot("lm_head.weight", self._head)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, kv: KvCache) -> torch.Tensor:
        """Write the batch's KV, attend, and return the last hidden states [R, hidden], normed."""
        hidden = self._embed(batch)
        attention = AttentionPlan(batch, kv, self._workspace)
        tables = self._rotary.tables(batch.positions)
        layers: Sequence[Layer | AdaptedLayer] = self._layers
        if batch.adapters:
            layers = adapted(self._layers, batch, self._narrowing)
        for index, layer in enumerate(layers):
            attended = self._attend(index, layer, hidden, attention, tables)
            if index == self._narrowing:
                attended = attended.index_select(0, batch.sample_at)
                hidden = hidden.index_select(0, batch.sample_at)
            hidden = layer.add_attended(hidden, attended)
            hidden = self._mlp(layer, hidden)
            if index < self.spec.deepstack_levels and batch.media_at is not None:
                hidden.index_add_(0, batch.media_at, self._level(batch, index + 1))
        if self._narrowing == len(layers):
            hidden = hidden.index_select(0, batch.sample_at)
        return self._normed(hidden, self._norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, vocab] float32 of hidden states [R, hidden]."""
        return linear(hidden, self._head).float()

    def load_adapter(self, info: AdapterInfo, max_rank: int) -> LoraAdapter:
        """Read a PEFT adapter from its directory; from any thread, beside running batches.

        Raises:
            InvalidRequest: the directory or the adapter cannot be used; names the file, the tensor or the setting.
            Overloaded: there is not enough memory for it.
        """
        return load_adapter(info, max_rank, modules(self._config, self._prefix), self.spec)

    def _embed(self, batch: PackedBatch) -> torch.Tensor:
        """[T, hidden]: token embeddings, and rows where media are."""
        hidden = self._embedding.index_select(0, batch.token_ids)
        if batch.media_at is not None:
            hidden.index_copy_(0, batch.media_at, self._level(batch, 0))
        return hidden

    def _level(self, batch: PackedBatch, level: int) -> torch.Tensor:
        """[M, hidden]: the main rows (level 0) or a deepstack level of the batch's media."""
        assert batch.media_rows is not None
        width = self._config.hidden_size
        return batch.media_rows[:, level * width : (level + 1) * width].to(self.spec.dtype)

    def _attend(
        self,
        index: int,
        layer: Layer | AdaptedLayer,
        hidden: torch.Tensor,
        attention: AttentionPlan,
        tables: RotaryTables,
    ) -> torch.Tensor:
        """[T, heads * head_size]."""
        config = self._config
        fused = layer.query_key_value(self._normed(hidden, layer.attention_norm))
        heads = fused.unflatten(1, (-1, config.head_size))
        rotated = heads[:, : config.heads + config.kv_heads]
        if layer.qk_norm is not None:
            rotated = rms_norm(rotated, (config.head_size,), None, config.norm_eps) * layer.qk_norm
        rotated = rotate(rotated, tables)
        queries, keys = rotated[:, : config.heads], rotated[:, config.heads :]
        values = heads[:, config.heads + config.kv_heads :]
        attention.store(index, keys, values)
        return attention.attend(index, queries, keys, values)

    def _mlp(self, layer: Layer | AdaptedLayer, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gates_and_ups(self._normed(hidden, layer.mlp_norm)).chunk(2, dim=1)
        return layer.add_gated(hidden, silu(gate).mul_(up))

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, (self._config.hidden_size,), weight, self._config.norm_eps)
