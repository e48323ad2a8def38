"""Real PEFT adapters: written by ``peft`` for a checkpoint, and applied by it as the reference."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from tests.checkpoints import MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from transformers import PreTrainedModel

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STRENGTH = 0.5
"""Deviation of what an adapter adds to each output, where its inputs have a deviation of one."""


def make_adapter(
    model_directory: Path,
    adapter_directory: Path,
    *,
    seed: int,
    rank: int = 8,
    targets: tuple[str, ...] | str = PROJECTIONS,
    alpha: float = 16,
    **peft_options: Any,
) -> Path:
    """Write a random adapter that changes the outputs visibly, as ``peft`` saves it.

    Args:
        model_directory: The checkpoint it is for.
        adapter_directory: Where to; made if it is not there.
        seed: Of the weights.
        rank: ``r``.
        targets: ``target_modules``: names, or one regular expression.
        alpha: ``lora_alpha``.
        peft_options: Further settings of ``peft.LoraConfig``.
    """
    with _peft() as peft:
        modules = targets if isinstance(targets, str) else list(targets)
        settings = peft.LoraConfig(r=rank, target_modules=modules, lora_alpha=alpha, **peft_options)
        model = peft.get_peft_model(_base(model_directory), settings)
        dice = torch.Generator().manual_seed(seed)
        for module in model.modules():
            if hasattr(module, "lora_A"):
                down, up = module.lora_A["default"].weight, module.lora_B["default"].weight
                torch.nn.init.normal_(down, std=down.shape[1] ** -0.5, generator=dice)
                deviation = STRENGTH / (abs(module.scaling["default"]) * up.shape[1] ** 0.5)
                torch.nn.init.normal_(up, std=deviation, generator=dice)
        model.save_pretrained(adapter_directory)
    return adapter_directory


def load_reference(
    model_directory: Path, adapters: Mapping[str, Path], dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """``peft`` on the checkpoint with these adapters by name; choose with ``set_adapter`` or ``disable_adapter``."""
    with _peft() as peft:
        first, *others = adapters
        model = peft.PeftModel.from_pretrained(_base(model_directory, dtype), adapters[first], adapter_name=first)
        for name in others:
            model.load_adapter(adapters[name], adapter_name=name)
        return model.eval()


def _base(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return MODELS[type(AutoConfig.from_pretrained(directory))].from_pretrained(directory, dtype=dtype)


@contextmanager
def _peft() -> Iterator[Any]:
    """The library, which is slow to import and uses a property that transformers has renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        import peft

        yield peft
