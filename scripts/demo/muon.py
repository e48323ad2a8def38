"""Muon: momentum whose matrix steps are made orthogonal, for the matrices inside the layers.

Keller Jordan's method, https://kellerjordan.github.io/posts/muon/, in bfloat16 and batched over
matrices of one shape. Embeddings, norms, biases and heads stay with AdamW.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonal(g: Tensor, rounds: int = 5) -> Tensor:
    """Matrices [n, rows, columns] with all singular values brought near one."""
    a, b, c = QUINTIC
    tall = g.shape[1] > g.shape[2]
    x = g.mT if tall else g
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, then an orthogonal step with the size that AdamW's would have."""

    def __init__(self, params: list[dict], lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step over all groups; parameters without gradient rest."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[tuple(p.shape)].append(p)
            for shape, same in by_shape.items():
                self._step_shape(group, shape, same)

    def _step_shape(self, group: dict, shape: tuple[int, ...], same: list[Tensor]) -> None:
        """One step of all matrices of a shape at once."""
        pushed = []
        for p in same:
            moment = self.state[p].setdefault("moment", torch.zeros_like(p))
            moment.lerp_(p.grad, 1 - group["momentum"])
            pushed.append(p.grad.lerp(moment, group["momentum"]))
        steps = orthogonal(torch.stack(pushed))
        scale = 0.2 * max(shape) ** 0.5 * group["lr"]
        for p, step in zip(same, steps, strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-scale)
