"""The fast forward against transformers' own, on a real batch: same weights, same logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .fast_model import grid_tables, read, see, text_angles

if TYPE_CHECKING:
    from transformers import Qwen3VLForConditionalGeneration


@torch.no_grad()
def largest_difference(model: Qwen3VLForConditionalGeneration, grid: tuple[int, int], pictures: int) -> float:
    """Largest absolute difference of the logits on a random row with pictures."""
    config = model.config
    generator = torch.Generator().manual_seed(1)
    high, wide = grid[0] // 2, grid[1] // 2
    ids, types, positions, at = [5, 6], [0, 0], [(0, 0, 0), (1, 1, 1)], 2
    for _ in range(pictures):
        ids += [config.vision_start_token_id, *[config.image_token_id] * (high * wide), config.vision_end_token_id]
        types += [0, *[1] * (high * wide), 0]
        positions.append((at, at, at))
        positions += [(at + 1, at + 1 + r, at + 1 + c) for r in range(high) for c in range(wide)]
        at += 1 + max(high, wide)
        positions.append((at, at, at))
        at += 1
    ids, types = [*ids, 7, 8, 9], [*types, 0, 0, 0]
    positions += [(at + i, at + i, at + i) for i in range(3)]
    patches = torch.rand(pictures, grid[0] * grid[1], 768, generator=generator) * 2 - 1
    both = patches.view(-1, 3, 1, 256).expand(-1, 3, 2, 256).reshape(-1, 1536)
    row = torch.tensor([ids])
    theirs = model(
        input_ids=row,
        attention_mask=torch.ones_like(row),
        pixel_values=both,
        image_grid_thw=torch.tensor([[1, *grid]] * pictures),
        mm_token_type_ids=torch.tensor([types]),
    ).logits
    seen = see(model, patches, grid_tables(model, grid))
    slots = torch.tensor([i for i, t in enumerate(types) if t])
    cos, sin = text_angles(model, torch.tensor(positions).T[:, None])
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()[None, None]
    ours = model.lm_head(read(model, row, seen, slots, mask, cos, sin))
    return float((ours - theirs).abs().max())
