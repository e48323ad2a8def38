"""The text decoder: one class for the Qwen2, Qwen3, Llama and Qwen3-VL shapes, chosen by numbers alone.

Packed and paged, see ``contract.py``. Weights that read the same input are one matrix (query, key and
value; gate and up), so that a layer is four products. After the last layer's attention only the sampled
tokens go on: nobody reads the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear, rms_norm, silu

from triptych.models.attention import AttentionPlan, Workspace
from triptych.models.contract import TextSpec
from triptych.models.rotary import Rotary, rotate
from triptych.models.weights import Slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.models.contract import KvCache, PackedBatch
    from triptych.models.decoder_config import DecoderConfig
    from triptych.models.rotary import RotaryTables


@dataclass(frozen=True, slots=True)
class Placement:
    """Where tensors live, and in which type."""

    device: torch.device
    dtype: torch.dtype

    def empty(self, *shape: int) -> torch.Tensor:
        """Uninitialised memory, not yet touched."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, [out, in] each."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    """Query heads, then key heads, then value heads."""
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """[heads + kv_heads, head_size]: the query weights for each query head, then the key weights."""
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def empty(cls, config: DecoderConfig, at: Placement) -> _Layer:
        hidden, attended = config.hidden_size, config.heads * config.head_size
        fused = attended + 2 * config.kv_heads * config.head_size
        return cls(
            attention_norm=at.empty(hidden),
            qkv=at.empty(fused, hidden),
            qkv_bias=at.empty(fused) if config.qkv_bias else None,
            qk_norm=at.empty(config.heads + config.kv_heads, config.head_size) if config.qk_norm else None,
            output=at.empty(hidden, attended),
            output_bias=at.empty(hidden) if config.output_bias else None,
            mlp_norm=at.empty(hidden),
            gate_up=at.empty(2 * config.intermediate_size, hidden),
            down=at.empty(hidden, config.intermediate_size),
        )

    def slots(self, config: DecoderConfig) -> Iterator[Slot]:
        """The stored tensors and the places they go to; names relative to the layer."""
        yield Slot("input_layernorm.weight", self.attention_norm)
        yield Slot("post_attention_layernorm.weight", self.mlp_norm)
        sizes = [count * config.head_size for count in (config.heads, config.kv_heads, config.kv_heads)]
        for name, weight in zip("qkv", self.qkv.split(sizes), strict=True):
            yield Slot(f"self_attn.{name}_proj.weight", weight)
        if self.qkv_bias is not None:
            for name, bias in zip("qkv", self.qkv_bias.split(sizes), strict=True):
                yield Slot(f"self_attn.{name}_proj.bias", bias)
        if self.qk_norm is not None:
            # one stored row, copied to every head
            yield Slot("self_attn.q_norm.weight", self.qk_norm[: config.heads], repeated=True)
            yield Slot("self_attn.k_norm.weight", self.qk_norm[config.heads :], repeated=True)
        yield Slot("self_attn.o_proj.weight", self.output)
        if self.output_bias is not None:
            yield Slot("self_attn.o_proj.bias", self.output_bias)
        gate, up = self.gate_up.chunk(2)
        yield Slot("mlp.gate_proj.weight", gate)
        yield Slot("mlp.up_proj.weight", up)
        yield Slot("mlp.down_proj.weight", self.down)


class TextDecoder:
    """A :class:`~triptych.models.contract.TextModel`, for one thread. Built with empty weights: fill ``slots()``."""

    def __init__(self, config: DecoderConfig, deepstack_levels: int, at: Placement) -> None:
        self._config = config
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
        self._layers = [_Layer.empty(config, at) for _ in range(config.layers)]
        self._norm = at.empty(config.hidden_size)
        self._head = self._embedding if config.tied else at.empty(config.vocab_size, config.hidden_size)
        self._rotary = Rotary(config.rotary, at.device, at.dtype)
        self._workspace = Workspace()

    def slots(self, prefix: str) -> Iterator[Slot]:
        """Every stored tensor of the decoder; ``prefix`` begins all names but the head's."""
        yield Slot(f"{prefix}embed_tokens.weight", self._embedding)
        for index, layer in enumerate(self._layers):
            for slot in layer.slots(self._config):
                yield slot.under(f"{prefix}layers.{index}.")
        yield Slot(f"{prefix}norm.weight", self._norm)
        if not self._config.tied:
            yield Slot("lm_head.weight", self._head)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, kv: KvCache) -> torch.Tensor:
        """Write the batch's KV, attend, and return logits [R, vocab] in float32."""
        config = self._config
        hidden = self._embed(batch)
        attention = AttentionPlan(batch, kv, self._workspace)
        tables = self._rotary.tables(batch.positions)
        last = config.layers - 1
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, hidden, attention, tables)
            if index == last and self.spec.deepstack_levels <= last:
                attended = attended.index_select(0, batch.sample_at)
                hidden = hidden.index_select(0, batch.sample_at)
            # residual + product, in one pass
            hidden = torch.addmm(hidden, attended, layer.output.t())
            if layer.output_bias is not None:
                hidden += layer.output_bias
            hidden = self._mlp(layer, hidden)
            if index < self.spec.deepstack_levels and batch.media_at is not None:
                hidden.index_add_(0, batch.media_at, self._level(batch, index + 1))
        if self.spec.deepstack_levels > last:
            hidden = hidden.index_select(0, batch.sample_at)
        return linear(self._normed(hidden, self._norm), self._head).float()

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
        self, index: int, layer: _Layer, hidden: torch.Tensor, attention: AttentionPlan, tables: RotaryTables
    ) -> torch.Tensor:
        """[T, heads * head_size]."""
        config = self._config
        fused = linear(self._normed(hidden, layer.attention_norm), layer.qkv, layer.qkv_bias)
        heads = fused.unflatten(1, (-1, config.head_size))
        rotated = heads[:, : config.heads + config.kv_heads]
        if layer.qk_norm is not None:
            rotated = rms_norm(rotated, (config.head_size,), None, config.norm_eps) * layer.qk_norm
        rotated = rotate(rotated, tables)
        queries, keys = rotated[:, : config.heads], rotated[:, config.heads :]
        values = heads[:, config.heads + config.kv_heads :]
        attention.store(index, keys, values)
        return attention.attend(index, queries, keys, values)

    def _mlp(self, layer: _Layer, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = linear(self._normed(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=1)
        return torch.addmm(hidden, silu(gate).mul_(up), layer.down.t())

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, (self._config.hidden_size,), weight, self._config.norm_eps)
