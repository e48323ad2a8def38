"""Tower rows, logits and greedy tokens against transformers, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.checkpoints import TEXT_SHAPES, VISION_SHAPES
from tests.engine.fidelity import Pair
from tests.engine.paged import Paged
from triptych.models.registry import FAMILIES
from triptych.processors.registry import PROCESSORS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CLOSE = {"rtol": 0.0, "atol": 1e-4}
PROMPTS = 20
"""For each of the three vision shapes."""
CHUNKS = (16, 23, 64, 1 << 30)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Pair:
    return Pair(checkpoint(request.param))


def test_every_model_has_a_processor() -> None:
    assert set(FAMILIES) == set(PROCESSORS)


@pytest.mark.parametrize("pair", VISION_SHAPES, indirect=True)
def test_tower_rows_and_deepstack_rows(pair: Pair) -> None:
    prompt = pair.prompt(seed=5, pictures=3)
    rows = torch.cat(prompt.rows)
    assert rows.shape[1] == pair.ours.text.spec.row_width
    assert [len(entry) for entry in prompt.rows] == [entry.layout.rows for entry in prompt.inputs]
    torch.testing.assert_close(rows, pair.reference_rows(prompt), **CLOSE)


@pytest.mark.parametrize("pair", VISION_SHAPES, indirect=True)
def test_an_item_is_encoded_the_same_alone_and_in_company(pair: Pair) -> None:
    prompt = pair.prompt(seed=6, pictures=3)
    assert pair.ours.tower is not None
    for entry, rows in zip(prompt.inputs, prompt.rows, strict=True):
        torch.testing.assert_close(pair.ours.tower.encode([entry])[0], rows, **CLOSE)


def test_an_items_rows_do_not_hold_the_memory_of_the_call(checkpoint: Callable[[str], Path]) -> None:
    for rows in Pair(checkpoint("vl-deepstack")).prompt(seed=6, pictures=3).rows:
        assert rows.untyped_storage().nbytes() == rows.nbytes


@pytest.mark.parametrize("pair", [*VISION_SHAPES, *TEXT_SHAPES], indirect=True)
@pytest.mark.parametrize("pictures", range(4))
def test_logits_whatever_the_chunks(pair: Pair, pictures: int) -> None:
    prompt = pair.prompt(seed=pictures, pictures=pictures if pair.ours.tower else 0, longest_text=60)
    expected = pair.reference_logits(prompt)[-1]
    for chunk in (1, 5, *CHUNKS):
        logits = Paged(pair.ours.text).prefill(prompt.sequence(), chunk)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, **CLOSE)


@pytest.mark.parametrize("pair", VISION_SHAPES, indirect=True)
def test_logits_of_every_position_of_one_slice(pair: Pair) -> None:
    prompt = pair.prompt(seed=11, pictures=2)
    expected = pair.reference_logits(prompt)
    paged, sequence = Paged(pair.ours.text), prompt.sequence()
    for at in range(len(prompt.plan)):
        torch.testing.assert_close(paged.step([(sequence, 1)])[0], expected[at], **CLOSE)


@pytest.mark.parametrize("pair", VISION_SHAPES, indirect=True)
def test_greedy_tokens_of_prompts_with_up_to_three_pictures(pair: Pair) -> None:
    for seed in range(PROMPTS):
        prompt = pair.prompt(seed=100 + seed, pictures=seed % 4)
        expected = pair.reference_tokens(prompt, 16)
        chunk = CHUNKS[seed // 4 % len(CHUNKS)]  # each with every number of pictures
        assert Paged(pair.ours.text, seed=seed).greedy(prompt.sequence(), 16, chunk) == expected, f"prompt {seed}"


@pytest.mark.parametrize("pair", TEXT_SHAPES, indirect=True)
def test_greedy_tokens_of_text(pair: Pair) -> None:
    for seed in range(8):
        prompt = pair.prompt(seed=seed, pictures=0, longest_text=90)
        assert Paged(pair.ours.text).greedy(prompt.sequence(), 16, 16) == pair.reference_tokens(prompt, 16)
