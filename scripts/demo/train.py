"""The training run: the tower looks, then the whole model reads; checkpoints let it survive a kill."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from . import model_files, schedule
from .batches import Batch, BatchMaker
from .check import largest_difference
from .draw import SQUARE
from .exam import exam_batches, in_words, score
from .export import export
from .fast_model import Seen, grid_tables, read, see, text_angles
from .heads import Heads
from .initial import fresh_model
from .muon import Muon
from .paths import CHECKPOINTS, MODEL
from .progress import Reporter
from .rows import Speller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import Qwen3VLForConditionalGeneration

SAVE_EVERY_S = 180
EXAM_EVERY_S = 480
MAX_DIFFERENCE = 1e-4
"""Largest difference of logits allowed between the training forward and transformers' own."""


class Trainer:
    """Model, heads and optimisers at some step."""

    def __init__(self, folder: Path, compiled: bool) -> None:
        self.model: Qwen3VLForConditionalGeneration = fresh_model(folder, schedule.SEED)
        self.heads = Heads(model_files.WIDTH, 1 + len(self.model.model.visual.deepstack_merger_list))
        self.maker = BatchMaker(Speller(folder))
        self.step = 0
        self.seconds = 0.0
        tower, text = self.model.model.visual, self.model.model.language_model
        inner = {id(p) for part in (tower.blocks, text.layers) for p in part.parameters() if p.ndim == 2}
        seeing = {id(p) for p in tower.parameters()} | {id(p) for p in self.heads.parameters()}
        everything = [*self.model.parameters(), *self.heads.parameters()]
        groups = {
            (matrix, sees): [p for p in everything if (id(p) in inner) == matrix and (id(p) in seeing) == sees]
            for matrix in (True, False)
            for sees in (True, False)
        }
        self.muon = Muon([{"params": groups[True, sees], "sees": sees} for sees in (True, False)], lr=0.0)
        self.adam = torch.optim.AdamW(
            [{"params": groups[False, sees], "sees": sees} for sees in (True, False)],
            lr=0.0,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=True,
        )
        self.compiled = (torch.compile(see), torch.compile(read)) if compiled else (see, read)

    def forward(self, batch: Batch, functions: tuple[Callable, Callable] = (see, read)) -> tuple[Seen, Tensor | None]:
        """The tower's view of a batch and the logits [answers' tokens, vocabulary] of its conversations."""
        look, tell = functions
        patches = torch.from_numpy(batch.patches).float().div_(127.5).sub_(1)
        seen = look(self.model, patches, grid_tables(self.model, batch.grid))
        seen = Seen(seen.rows.float(), [level.float() for level in seen.deep])
        if batch.text is None:
            return seen, None
        text = {k: torch.from_numpy(v) for k, v in batch.text.items()}
        cos, sin = text_angles(self.model, text["positions"])
        hidden = tell(self.model, text["ids"], seen, text["slots"], text["mask"], cos, sin)
        return seen, self.model.lm_head(hidden.flatten(0, 1)[text["at"]]).float()

    def train_step(self) -> tuple[float, float]:
        """One step; the losses of the tower's heads and of the answers."""
        rates = schedule.rates_at(self.step)
        for optimiser, rate in ((self.muon, rates.muon), (self.adam, rates.adam)):
            for group in optimiser.param_groups:
                group["lr"] = rate * (rates.vision if group["sees"] else 1)
        batch = self.maker.make(self.step)
        with torch.autocast("cpu", torch.bfloat16):  # rare grids are not worth compiling for
            seen, logits = self.forward(batch, self.compiled if batch.grid == SQUARE else (see, read))
        dense = self.heads(seen, *(torch.from_numpy(x) for x in (batch.tokens, batch.whole, batch.present)))
        loss, answers = rates.dense * dense, 0.0
        if logits is not None:
            told = functional.cross_entropy(logits, torch.from_numpy(batch.text["tokens"]))
            loss, answers = loss + told, float(told.detach())
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*self.model.parameters(), *self.heads.parameters()], 1.0)
        self.muon.step()
        self.adam.step()
        self.muon.zero_grad()
        self.adam.zero_grad()
        self.step += 1
        return float(dense.detach()), answers

    @torch.no_grad()
    def examine(self, batches: list[Batch]) -> str:
        """Held-out exact match per kind in one line; the tower's own scores while it only looks."""
        if self.step <= schedule.LOOK_STEPS:
            drawn = [b for b in batches if not b.rows[0].turns[0].kind.startswith("easy")]
            shares = [self.heads.scores(self.forward(b)[0], torch.from_numpy(b.tokens)) for b in drawn]
            kinds = ("single", "multi", "digit", "pairs")
            lines = [np.nanmean(shares[i :: len(kinds)], 0) for i in range(len(kinds))]
            return "  ".join(f"{k} {' '.join(f'{100 * v:.0f}' for v in s)}" for k, s in zip(kinds, lines, strict=True))
        right = [self.forward(b)[1].argmax(-1) == torch.from_numpy(b.text["tokens"]) for b in batches]
        return in_words(score(batches, right))

    def save(self, path: Path) -> None:
        """Write a checkpoint in one move. The batches depend on the step alone, so it is the whole state."""
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
        }
        beside = path.with_suffix(".tmp")
        torch.save(state, beside)
        os.replace(beside, path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.step, self.seconds = state["step"], state["seconds"]
        for part in ("model", "heads", "muon", "adam"):
            getattr(self, part).load_state_dict(state[part])


def steps(trainer: Trainer, last: int) -> Iterator[tuple[float, float]]:
    """Train up to the last step, keeping the time."""
    while trainer.step < last:
        start = time.perf_counter()
        losses = trainer.train_step()
        trainer.seconds += time.perf_counter() - start
        yield losses


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train Triptych's demo model from scratch on one CPU core.")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS)
    parser.add_argument("--out", type=Path, default=MODEL, help="the model folder that is written")
    parser.add_argument("--steps", type=int, default=schedule.LOOK_STEPS + schedule.READ_STEPS, help="stop after these")
    parser.add_argument("--export-every", type=float, default=25, help="minutes between exports of the weights")
    parser.add_argument(
        "--compile", action="store_true", help="compile the forward pass (a fifth faster, needs a C++ compiler)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    if not (args.out / "tokenizer.json").exists():
        model_files.write(args.out)
    trainer = Trainer(args.out, compiled=args.compile)
    apart = max(largest_difference(trainer.model, grid, pictures) for grid, pictures in (((8, 8), 2), ((6, 10), 1)))
    if apart > MAX_DIFFERENCE:
        sys.exit(f"the training forward differs from transformers' by {apart:.1e}")
    checkpoint = args.checkpoints / "last.pt"
    if args.resume:
        trainer.load(checkpoint)
    elif checkpoint.exists():
        sys.exit(f"{checkpoint} exists: continue with --resume, or remove it")
    exams = exam_batches(trainer.maker.builder, rounds=3)
    saved = examined = exported = time.monotonic()
    with Reporter(args.checkpoints / "log.txt", args.steps, trainer.step) as report:
        for dense, answers in steps(trainer, args.steps):
            report.step(trainer.step, dense, answers, trainer.seconds)
            now = time.monotonic()
            if now - saved > SAVE_EVERY_S:
                trainer.save(checkpoint)
                saved = now
            if now - examined > EXAM_EVERY_S:
                report.line(f"held out at {trainer.step}: {trainer.examine(exams)}")
                examined = now
            if now - exported > args.export_every * 60 and trainer.step > schedule.LOOK_STEPS:
                export(trainer.model, args.out)
                exported = now
        report.line(f"held out at {trainer.step}: {trainer.examine(exams)}")
    trainer.save(checkpoint)
    export(trainer.model, args.out)
