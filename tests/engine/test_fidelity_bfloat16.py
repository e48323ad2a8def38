"""bfloat16: as far from float32 as transformers is in bfloat16, and no further.

bfloat16 keeps 8 bits, so two right implementations differ by rounding: a fixed tolerance would say nothing. The
yardstick is therefore the reference's own error. Both run the same bfloat16 weights; both are compared with the
reference running those weights in float32; our root mean square error may be at most a fifth above the reference's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.checkpoints import TEXT_SHAPES, VISION_SHAPES, write_checkpoint
from tests.engine.fidelity import Pair
from tests.paged import Paged

if TYPE_CHECKING:
    from pathlib import Path

ALLOWED = 1.2
PROMPTS = 12


def error(logits: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return float((torch.stack(logits) - torch.stack(exact)).square().mean().sqrt())


@pytest.mark.parametrize("shape", [*VISION_SHAPES, *TEXT_SHAPES])
def test_logits_are_as_exact_as_the_reference(tmp_path: Path, shape: str) -> None:
    directory = write_checkpoint(shape, tmp_path, dtype=torch.bfloat16)
    pair, exact = Pair(directory, torch.bfloat16), Pair(directory, torch.float32)
    wholes, chunked, references, targets = [], [], [], []
    for seed in range(PROMPTS):
        prompt = pair.prompt(seed=seed, pictures=seed % 4 if pair.ours.tower else 0)
        wholes.append(Paged(pair.ours.text).prefill(prompt.sequence(), 1 << 30))
        chunked.append(Paged(pair.ours.text).prefill(prompt.sequence(), 16))
        references.append(pair.reference_logits(prompt)[-1])
        targets.append(exact.reference_logits(prompt)[-1])
    allowed = ALLOWED * error(references, targets)
    assert error(wholes, targets) <= allowed
    assert error(chunked, targets) <= allowed
