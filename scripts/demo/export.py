"""Weights into the model folder, in float16 and in one move."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import Qwen3VLForConditionalGeneration


def export(model: Qwen3VLForConditionalGeneration, folder: Path) -> None:
    """Write `model.safetensors`; the tied output head is left out, as transformers does."""
    weights = {
        name: tensor.to(torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    beside = folder / "model.safetensors.tmp"
    save_file(weights, beside, {"format": "pt"})
    beside.chmod(0o644)
    os.replace(beside, folder / "model.safetensors")
