"""One decoder layer's weights, and the four products with them.

Weights that read the same input are one matrix: query, key and value; gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from triptych.models.weights import Slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.models.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Placement:
    """Where tensors live, and in which type."""

    device: torch.device
    dtype: torch.dtype

    def empty(self, *shape: int) -> torch.Tensor:
        """Uninitialised memory, not yet touched."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights, [out, in] each. N rows go through a product."""

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
    """Gate, then up."""
    down: torch.Tensor

    @classmethod
    def empty(cls, config: DecoderConfig, at: Placement) -> Layer:
        """A layer without values: fill ``slots()``."""
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

    def query_key_value(self, normed: torch.Tensor) -> torch.Tensor:
        """[N, (heads + 2 * kv_heads) * head_size] of [N, hidden]."""
        return linear(normed, self.qkv, self.qkv_bias)

    def add_attended(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual [N, hidden] plus the projection of [N, heads * head_size], in one pass."""
        out = torch.addmm(hidden, attended, self.output.t())
        if self.output_bias is not None:
            out += self.output_bias
        return out

    def gates_and_ups(self, normed: torch.Tensor) -> torch.Tensor:
        """[N, 2 * intermediate] of [N, hidden]."""
        return linear(normed, self.gate_up)

    def add_gated(self, hidden: torch.Tensor, gated: torch.Tensor) -> torch.Tensor:
        """The residual [N, hidden] plus the projection of [N, intermediate], in one pass."""
        return torch.addmm(hidden, gated, self.down.t())
