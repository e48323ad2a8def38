"""The untrained model: weights drawn at scales that suit its small width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import Qwen3VLForConditionalGeneration

from .model_files import model_config, special_ids

if TYPE_CHECKING:
    from pathlib import Path


def fresh_model(folder: Path, seed: int) -> Qwen3VLForConditionalGeneration:
    """A float32 model of the folder's configuration with seeded weights."""
    torch.manual_seed(seed)
    config = model_config(special_ids(folder))
    config.dtype = config.text_config.dtype = config.vision_config.dtype = "float32"
    model = Qwen3VLForConditionalGeneration(config).float()
    tower, text = model.model.visual, model.model.language_model
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.8 * module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    nn.init.normal_(tower.patch_embed.proj.weight, std=(2 * 768) ** -0.5)
    nn.init.zeros_(tower.patch_embed.proj.bias)
    nn.init.normal_(tower.pos_embed.weight, std=0.5)
    nn.init.normal_(text.embed_tokens.weight, std=0.3)
    for block in tower.blocks:
        for last in (block.attn.proj, block.mlp.linear_fc2):
            last.weight.data.mul_((2 * len(tower.blocks)) ** -0.5)
    for layer in text.layers:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight.data.mul_((2 * len(text.layers)) ** -0.5)
    model.tie_weights()
    return model
