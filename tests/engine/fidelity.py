"""Random prompts with pictures, and what transformers makes of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig

from tests.checkpoints import MODELS, token_ids
from tests.engine.paged import Sequence
from triptych.core.media import Picture
from triptych.models.registry import load_model
from triptych.models.vision.patches import patch_numbers
from triptych.processors.registry import load_processor

if TYPE_CHECKING:
    from pathlib import Path

    from triptych.core.adapter import Adapter
    from triptych.core.encoder_input import EncoderInput
    from triptych.core.layout import Positions
    from triptych.core.plan import PromptPlan


@dataclass
class Prompt:
    """One planned prompt, with its encoder inputs and encoded rows."""

    plan: PromptPlan
    positions: Positions
    inputs: tuple[EncoderInput, ...]
    rows: list[torch.Tensor]

    def sequence(self, adapter: Adapter | None = None) -> Sequence:
        """A fresh sequence that has computed nothing."""
        return Sequence(self.plan, self.positions, self.rows, adapter)


class Pair:
    """One checkpoint, loaded by us and by transformers. A test may set ``reference`` to a changed model."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.directory, self.dtype = directory, dtype
        self.ours = load_model(directory, dtype=str(dtype).removeprefix("torch."))
        self.processor = load_processor(directory)
        self.ids = token_ids()
        self._words = min(self.ids.values())

    @cached_property
    def reference(self) -> Any:
        model_class = MODELS[type(AutoConfig.from_pretrained(self.directory))]
        return model_class.from_pretrained(self.directory, dtype=self.dtype).eval()

    def prompt(self, seed: int, pictures: int, longest_text: int = 24) -> Prompt:
        """Random words with pictures of odd sizes between them, at the beginning and at the end too."""
        dice = random.Random(seed)
        noise = np.random.default_rng(seed)

        def text(shortest: int) -> list[int]:
            return [dice.randrange(self._words) for _ in range(dice.randint(shortest, longest_text))]

        tokens, inputs = text(0 if pictures else 1), []
        for index in range(pictures):
            pixels = noise.integers(0, 256, (dice.randint(1, 150), dice.randint(1, 150), 3), dtype=np.uint8)
            inputs.append(self.processor.encoder_input(index, Picture(pixels), bytes([index]) * 32))
            mark = (self.ids[f"<|{word}|>"] for word in ("vision_start", "image_pad", "vision_end"))
            tokens += [*mark, *text(0)]
        plan, placed = self.processor.plan(np.array(tokens, dtype=np.int32), inputs)
        rows = self.ours.tower.encode(placed) if placed and self.ours.tower else []
        return Prompt(plan, self.processor.positions(plan), placed, rows)

    def arguments(self, prompt: Prompt, answer: list[int] | None = None) -> dict[str, torch.Tensor]:
        """The prompt, and the beginning of an answer, as transformers takes them."""
        token_ids = torch.tensor([[*prompt.plan.token_ids.tolist(), *(answer or ())]])
        given = {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}
        if prompt.inputs:
            given["pixel_values"] = patch_numbers(prompt.inputs, 2, torch.device("cpu"), torch.float32)
            given["image_grid_thw"] = torch.tensor([tuple(entry.layout.grid) for entry in prompt.inputs])
        if self.ours.tower:
            given["mm_token_type_ids"] = (token_ids == self.ids["<|image_pad|>"]).long()
        return given

    @torch.inference_mode()
    def reference_logits(self, prompt: Prompt, answer: list[int] | None = None) -> torch.Tensor:
        """[prompt length + answer length, vocab]."""
        return self.reference(**self.arguments(prompt, answer)).logits[0].float()

    @torch.inference_mode()
    def reference_rows(self, prompt: Prompt) -> torch.Tensor:
        """[rows of all items, row width]: the tower's output, then its deepstack levels."""
        given = self.arguments(prompt)
        features = self.reference.model.get_image_features(given["pixel_values"], given["image_grid_thw"])
        levels = (features.pooler_output, *features.deepstack_features)
        return torch.cat([torch.cat(list(level)) for level in levels], dim=1)

    @torch.inference_mode()
    def reference_tokens(self, prompt: Prompt, count: int) -> list[int]:
        """Greedy continuation, without an end."""
        out = self.reference.generate(
            **self.arguments(prompt), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return out[0, len(prompt.plan) :].tolist()
