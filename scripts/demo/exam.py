"""A quick exam during training: teacher-forced, which for exact match equals greedy answering."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from .batches import Batch, Drawn, ask_one, ask_two, assemble, picture
from .digits import HELD_OUT_DIGITS
from .draw import SQUARE, draw, to_grid
from .easy import EasyQuestion, test_questions
from .questions import Asker, Turn
from .scenes import digit_scene, multi_scene, single_scene

if TYPE_CHECKING:
    import torch

    from .rows import RowBuilder

EXAM_SEED = 9_000_001
ROWS_PER_BATCH = 24


def exam_batches(builder: RowBuilder, rounds: int) -> list[Batch]:
    """Held-out batches: new scenes, held-out digits, easy-vqa's test split; `rounds` batches of each."""
    rng = np.random.default_rng(EXAM_SEED)
    asker, batches = Asker(rng, free=4), []
    easy = test_questions()
    order = rng.permutation(len(easy))
    for round_ in range(rounds):
        for kind in ("single", "multi", "digit"):
            shown = [fresh(rng, kind) for _ in range(ROWS_PER_BATCH)]
            rows = [builder.build(SQUARE, 1, ask_one(asker, s, 1.0, {}), "branch", None) for s in shown]
            batches.append(assemble(SQUARE, shown, rows))
        pairs = [(fresh(rng, choose_pair(rng)), fresh(rng, choose_pair(rng))) for _ in range(ROWS_PER_BATCH)]
        rows = [builder.build(SQUARE, 2, ask_two(asker, p, 1.0, {}), "branch", None) for p in pairs]
        batches.append(assemble(SQUARE, [s for pair in pairs for s in pair], rows))
        batches.append(easy_batch(builder, [easy[i] for i in order[round_ * 48 : (round_ + 1) * 48]]))
    return batches


def choose_pair(rng: np.random.Generator) -> str:
    """What one of two pictures shows."""
    return "digit" if rng.random() < 0.4 else "single"


def fresh(rng: np.random.Generator, kind: str) -> Drawn:
    """A picture never trained on."""
    if kind == "digit":
        scene = digit_scene(rng, HELD_OUT_DIGITS)
        return Drawn(kind, scene, to_grid(draw(scene, 128, 128, rng, plain=True), SQUARE))
    scene = single_scene(rng) if kind == "single" else multi_scene(rng)
    return Drawn(kind, scene, to_grid(draw(scene, 160, 160, rng), SQUARE))


def easy_batch(builder: RowBuilder, questions: list[EasyQuestion]) -> Batch:
    """Test questions of easy-vqa, one per row."""
    filler = picture(np.random.default_rng(0), SQUARE, {"single": 1.0})
    shown = [Drawn("easy", filler.scene, to_grid(Image.open(q.path).convert("RGB"), SQUARE)) for q in questions]
    turns = [Turn("easy test", q.question, q.answer) for q in questions]
    rows = [builder.build(SQUARE, 1, [turn], "branch", None) for turn in turns]
    return assemble(SQUARE, shown, rows)


def score(batches: list[Batch], right_tokens: list[torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Right and asked per kind, from which target tokens each batch got right."""
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for batch, right in zip(batches, right_tokens, strict=True):
        answers: dict[tuple[int, int], bool] = {}
        for row, turn, good in zip(batch.text["row_of"], batch.text["turn_of"], right.tolist(), strict=True):
            key = (int(row), int(turn))
            answers[key] = answers.get(key, True) and good
        for (row, turn), good in answers.items():
            tally = kinds[batch.rows[row].turns[turn].kind]
            tally[0] += good
            tally[1] += 1
    return {kind: (right, asked) for kind, (right, asked) in sorted(kinds.items())}


def in_words(scores: dict[str, tuple[int, int]]) -> str:
    """One line of percentages."""
    return "  ".join(f"{kind} {100 * right / asked:.0f}" for kind, (right, asked) in scores.items())
