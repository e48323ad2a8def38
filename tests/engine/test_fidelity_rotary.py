"""Rotary frequencies and angles against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3VLTextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from triptych.core.checkpoint import Section
from triptych.models.rotary import Rotary, RotaryConfig, inverse_frequencies, rotate

HEAD = 32
POSITIONS = torch.tensor([[0, 1, 2, 700, 40_000]])
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}


def rotated(config: RotaryConfig, positions: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    return rotate(heads, Rotary(config, torch.device("cpu"), torch.float32).tables(positions))


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, {"rope_type": "llama3", **LLAMA3}]
)
def test_one_axis(rope: dict[str, Any]) -> None:
    given = {"rope_theta": 50_000.0, **rope}
    reference = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=HEAD, num_attention_heads=1, head_dim=HEAD, rope_parameters=given)
    )
    config = RotaryConfig.read(Section("config.json", {"rope_parameters": given}), HEAD, 10_000.0, None)
    torch.testing.assert_close(inverse_frequencies(config), reference.inv_freq, rtol=1e-6, atol=0)
    heads = torch.randn(5, 3, HEAD, generator=torch.Generator().manual_seed(0))
    cos, sin = reference(heads, POSITIONS)
    expected, _ = apply_rotary_pos_emb(heads[None].transpose(1, 2), heads[None].transpose(1, 2), cos, sin)
    torch.testing.assert_close(rotated(config, POSITIONS, heads), expected.transpose(1, 2)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("section", [[6, 5, 5], [8, 4, 4], [16, 0, 0], [4, 6, 6]])
def test_three_interleaved_axes(section: list[int]) -> None:
    given = {"rope_type": "default", "rope_theta": 5_000_000.0, "mrope_section": section, "mrope_interleaved": True}
    text = Qwen3VLTextConfig(hidden_size=HEAD, num_attention_heads=1, head_dim=HEAD, rope_parameters=given)
    config = RotaryConfig.read(Section("config.json", {"rope_parameters": given}), HEAD, 10_000.0, (24, 20, 20))
    positions = torch.tensor([[0, 1, 2, 700, 40_000], [0, 5, 2, 702, 40_000], [0, 3, 9, 701, 40_000]])
    heads = torch.randn(5, 3, HEAD, generator=torch.Generator().manual_seed(0))
    cos, sin = Qwen3VLTextRotaryEmbedding(text)(heads, positions[:, None])
    expected, _ = apply_rotary_pos_emb(heads[None].transpose(1, 2), heads[None].transpose(1, 2), cos, sin)
    torch.testing.assert_close(rotated(config, positions, heads), expected.transpose(1, 2)[0], rtol=0, atol=1e-5)
