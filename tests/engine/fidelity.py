"""Random prompts with pictures and videos, and what transformers makes of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig

from tests import noise
from tests.checkpoints import MODELS, token_ids, tokenise
from tests.engine.paged import Sequence
from tests.fitted import encoder_input
from triptych.core.media import Modality, Picture
from triptych.models.registry import load_model
from triptych.models.vision.patches import patch_numbers
from triptych.processors.registry import load_processor

if TYPE_CHECKING:
    from collections.abc import Sequence as Row
    from pathlib import Path

    from triptych.core.adapter import Adapter
    from triptych.core.encoder_input import EncoderInput
    from triptych.core.layout import ItemLayout, Positions
    from triptych.core.plan import PromptPlan


@dataclass
class Prompt:
    """One planned prompt, with its encoder inputs and encoded rows."""

    plan: PromptPlan
    positions: Positions
    inputs: tuple[EncoderInput, ...]
    rows: list[torch.Tensor]
    unplaced: tuple[ItemLayout, ...] = ()
    """Of the inputs, as they were before the plan."""

    def sequence(self, adapter: Adapter | None = None) -> Sequence:
        """A fresh sequence that has computed nothing."""
        return Sequence(self.plan, self.positions, self.rows, adapter)


class Pair:
    """One checkpoint, loaded by us and by transformers. A test may set ``reference`` to a changed model."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.directory, self.dtype = directory, dtype
        self.ours = load_model(directory, dtype=str(dtype).removeprefix("torch."))
        self.processor = load_processor(directory, tokenise)
        self.ids = token_ids()
        self._words = min(self.ids.values())

    @cached_property
    def reference(self) -> Any:
        model_class = MODELS[type(AutoConfig.from_pretrained(self.directory))]
        return model_class.from_pretrained(self.directory, dtype=self.dtype).eval()

    def prompt(self, seed: int, pictures: int, longest_text: int = 24) -> Prompt:
        """Random words with pictures of odd sizes between them, at the beginning and at the end too."""
        return self.prompt_of([Modality.IMAGE] * pictures, seed, longest_text)

    def prompt_of(self, kinds: Row[Modality], seed: int, longest_text: int = 24) -> Prompt:
        """The same with videos, of a few frames each, which the checkpoint must have settings for."""
        dice = random.Random(seed)
        pixels = np.random.default_rng(seed)

        def text(shortest: int) -> list[int]:
            return [dice.randrange(self._words) for _ in range(dice.randint(shortest, longest_text))]

        tokens, inputs = text(0 if kinds else 1), []
        for index, kind in enumerate(kinds):
            key = (100 * seed + index).to_bytes(32, "big")
            if kind is Modality.IMAGE:
                shape = (dice.randint(1, 150), dice.randint(1, 150), 3)
                shown = Picture(pixels.integers(0, 256, shape, dtype=np.uint8))
                inputs.append(encoder_input(self.processor, index, shown, key))
            else:
                clip = noise.clip(dice.randint(0, 999), dice.randint(1, 7), *(32 * dice.randint(1, 4) for _ in "hw"))
                inputs.append(self.processor.clip_input(index, clip, key))
            mark = (self.ids[f"<|{word}|>"] for word in ("vision_start", f"{kind.value}_pad", "vision_end"))
            tokens += [*mark, *text(0)]
        plan, placed = self.processor.plan(np.array(tokens, dtype=np.int32), inputs)
        rows = self.ours.tower.encode(placed) if placed and self.ours.tower else []
        unplaced = tuple(entry.layout for entry in inputs)
        return Prompt(plan, self.processor.positions(plan), placed, rows, unplaced)

    def arguments(self, prompt: Prompt, answer: list[int] | None = None) -> dict[str, torch.Tensor]:
        """The prompt, and the beginning of an answer, as transformers takes them."""
        token_ids = torch.tensor([[*prompt.plan.token_ids.tolist(), *(answer or ())]])
        given = {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}
        for kind, numbers, grids in (
            (Modality.IMAGE, "pixel_values", "image_grid_thw"),
            (Modality.VIDEO, "pixel_values_videos", "video_grid_thw"),
        ):
            inputs = [entry for entry in prompt.inputs if entry.layout.modality is kind]
            if inputs:
                given[numbers] = patch_numbers(inputs, 2, torch.device("cpu"), torch.float32)
                given[grids] = torch.tensor([tuple(entry.layout.grid) for entry in inputs])
        if self.ours.tower:
            of_pictures, of_videos = (token_ids == self.ids[f"<|{kind}_pad|>"] for kind in ("image", "video"))
            given["mm_token_type_ids"] = of_pictures.long() + 2 * of_videos.long()
        return given

    @torch.inference_mode()
    def reference_logits(self, prompt: Prompt, answer: list[int] | None = None) -> torch.Tensor:
        """[prompt length + answer length, vocab]."""
        return self.reference(**self.arguments(prompt, answer)).logits[0].float()

    @torch.inference_mode()
    def reference_rows(self, prompt: Prompt) -> torch.Tensor:
        """[rows of all items, pictures first, row width]: the tower's output, then its deepstack levels."""
        given = self.arguments(prompt)
        found = []
        if "pixel_values" in given:
            found.append(self.reference.model.get_image_features(given["pixel_values"], given["image_grid_thw"]))
        if "pixel_values_videos" in given:
            of_videos = given["pixel_values_videos"], given["video_grid_thw"]
            found.append(self.reference.model.get_video_features(*of_videos))
        each = [(features.pooler_output, *features.deepstack_features) for features in found]
        return torch.cat([torch.cat([torch.cat(list(level)) for level in levels], dim=1) for levels in each])

    @torch.inference_mode()
    def reference_tokens(self, prompt: Prompt, count: int) -> list[int]:
        """Greedy continuation, without an end."""
        out = self.reference.generate(
            **self.arguments(prompt), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return out[0, len(prompt.plan) :].tolist()
