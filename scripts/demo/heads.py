"""Throw-away heads that teach the tower what its tokens cover; they never leave the training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from .labels import COLOUR_NAMES, COUNTS, IGNORE, NAMES, TOKEN_HEADS

if TYPE_CHECKING:
    from .fast_model import Seen

WHOLE_HEADS = (COUNTS, len(COLOUR_NAMES) - 1)
PRESENT = len(NAMES) - 1 + len(COLOUR_NAMES) - 1


class Level(nn.Module):
    """Heads over one level of the tower's output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.token = nn.Linear(width, sum(TOKEN_HEADS))
        self.whole = nn.Linear(2 * width, sum(WHOLE_HEADS) + PRESENT)

    def forward(self, rows: Tensor, tokens: Tensor, whole: Tensor, present: Tensor) -> Tensor:
        """The loss of rows [pictures, tokens, width] against the labels of `labels.Labels`."""
        x = self.norm(rows)
        loss = x.new_zeros(())
        for part, target in zip(self.token(x).split(TOKEN_HEADS, -1), tokens.unbind(-1), strict=True):
            loss = loss + functional.cross_entropy(part.flatten(0, 1), target.flatten(), ignore_index=IGNORE)
        pooled = self.whole(torch.cat((x.mean(1), x.amax(1)), -1))
        *parts, presence = pooled.split((*WHOLE_HEADS, PRESENT), -1)
        for part, target in zip(parts, whole.unbind(-1), strict=True):
            if (target != IGNORE).any():
                loss = loss + 0.5 * functional.cross_entropy(part, target, ignore_index=IGNORE)
        return loss + 2 * functional.binary_cross_entropy_with_logits(presence, present)


class Heads(nn.Module):
    """One set of heads for the final rows and one for each deepstack level."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        self.levels = nn.ModuleList([Level(width) for _ in range(levels)])

    def forward(self, seen: Seen, tokens: Tensor, whole: Tensor, present: Tensor) -> Tensor:
        """Mean loss; the final rows count double."""
        outputs = (seen.rows, *seen.deep)
        losses = [level(x, tokens, whole, present) for level, x in zip(self.levels, outputs, strict=True)]
        return (2 * losses[0] + sum(losses[1:])) / (len(losses) + 1)

    def scores(self, seen: Seen, tokens: Tensor) -> list[float]:
        """Share of right classes per token head of the final rows; `name` where there is a thing."""
        level = self.levels[0]
        parts = level.token(level.norm(seen.rows)).split(TOKEN_HEADS, -1)
        shares = []
        for part, target in zip(parts, tokens.unbind(-1), strict=True):
            there = target > 0
            shares.append(float((part.argmax(-1) == target)[there].float().mean()))
        return shares
