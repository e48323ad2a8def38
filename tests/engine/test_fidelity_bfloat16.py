"""bfloat16: as far from float32 as transformers is in bfloat16, and no further.

bfloat16 keeps 8 bits, so two right implementations differ by rounding: a fixed tolerance would say nothing. The
yardstick is therefore the reference's own error. Both run the same bfloat16 weights; both are compared with the
reference running those weights in float32; our root mean square error may be at most a fifth above the reference's.

Tokens are equal where rounding cannot decide them: wherever the reference's two best logits are further apart than
twice the largest error that its logits have at that place, our greedy token is the reference's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.checkpoints import TEXT_SHAPES, VISION_SHAPES, write_checkpoint
from tests.engine.fidelity import Pair
from tests.engine.paged import Paged

if TYPE_CHECKING:
    from tests.engine.fidelity import Prompt

ALLOWED = 1.2
PROMPTS = 12
ANSWER = 16
"""Tokens."""
DECIDED = 0.6
"""Share of the tokens that rounding must leave alone, or the comparison of tokens would say little."""


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return float((torch.cat(found).float() - torch.cat(exact).float()).square().mean().sqrt())


@pytest.fixture(scope="module", params=[*VISION_SHAPES, *TEXT_SHAPES])
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Pair]:
    """One checkpoint in bfloat16, and the same weights in float32."""
    directory = write_checkpoint(request.param, tmp_path_factory.mktemp("bfloat16"), dtype=torch.bfloat16)
    return Pair(directory, torch.bfloat16), Pair(directory, torch.float32)


def prompts(pair: Pair) -> list[Prompt]:
    return [pair.prompt(seed=seed, pictures=seed % 4 if pair.ours.tower else 0) for seed in range(PROMPTS)]


def test_logits_are_as_exact_as_the_reference(pairs: tuple[Pair, Pair]) -> None:
    pair, exact = pairs
    wholes, chunked, references, targets = [], [], [], []
    for prompt in prompts(pair):
        wholes.append(Paged(pair.ours.text).prefill(prompt.sequence(), 1 << 30))
        chunked.append(Paged(pair.ours.text).prefill(prompt.sequence(), 16))
        references.append(pair.reference_logits(prompt)[-1])
        targets.append(exact.reference_logits(prompt)[-1])
    allowed = ALLOWED * error(references, targets)
    assert error(wholes, targets) <= allowed
    assert error(chunked, targets) <= allowed


@pytest.mark.parametrize("pairs", VISION_SHAPES, indirect=True)
def test_rows_are_as_exact_as_the_reference(pairs: tuple[Pair, Pair]) -> None:
    pair, exact = pairs
    shown = [prompt for prompt in prompts(pair) if prompt.inputs]
    targets = [exact.reference_rows(prompt) for prompt in shown]
    allowed = ALLOWED * error([pair.reference_rows(prompt) for prompt in shown], targets)
    assert error([torch.cat(prompt.rows) for prompt in shown], targets) <= allowed


def test_greedy_tokens_are_the_references_where_rounding_cannot_decide(pairs: tuple[Pair, Pair]) -> None:
    pair, exact = pairs
    decided = 0
    for number, prompt in enumerate(prompts(pair)):
        answer = pair.reference_tokens(prompt, ANSWER)
        first = len(prompt.plan) - 1
        logits, target = (each.reference_logits(prompt, answer[:-1])[first:] for each in (pair, exact))
        best = logits.topk(2, dim=1).values
        sure = best[:, 0] - best[:, 1] > 2 * (logits - target).abs().amax(dim=1)
        ours = torch.tensor(follow(Paged(pair.ours.text), prompt, answer))
        assert ours[sure].tolist() == torch.tensor(answer)[sure].tolist(), f"prompt {number}"
        decided += int(sure.sum())
    assert decided >= DECIDED * PROMPTS * ANSWER


def follow(paged: Paged, prompt: Prompt, answer: list[int]) -> list[int]:
    """Our greedy token at each place of an answer that is given."""
    sequence = prompt.sequence()
    tokens = [int(paged.prefill(sequence, 16).argmax())]
    for token in answer[:-1]:
        sequence.tokens.append(token)
        tokens.append(int(paged.step([(sequence, 1)])[0].argmax()))
    return tokens
