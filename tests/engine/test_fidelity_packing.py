"""One packed step gives every sequence what it gets alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.fidelity import Pair
from tests.engine.paged import Paged
from triptych.models.attention import group_by_length

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CLOSE = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Pair:
    return Pair(checkpoint(request.param))


@pytest.mark.parametrize("pair", ["vl-deepstack", "vl-shared-kv", "qwen2"], indirect=True)
def test_sixteen_sequences_at_different_places_share_steps(pair: Pair) -> None:
    prompts = [
        pair.prompt(seed=n, pictures=n % 3 if pair.ours.tower else 0, longest_text=400 if n == 4 else 30)
        for n in range(16)
    ]
    alone = [Paged(pair.ours.text).greedy(prompt.sequence(), 6) for prompt in prompts]
    together = Paged(pair.ours.text, blocks=512)
    sequences = [prompt.sequence() for prompt in prompts]
    step = 0
    while any(len(s.tokens) < len(s.plan) + 6 for s in sequences):
        step += 1
        slices = []
        for n, sequence in enumerate(sequences):
            left = len(sequence.tokens) - sequence.computed
            if len(sequence.tokens) < len(sequence.plan) + 6 and step > n // 4:
                slices.append((sequence, min(left, 7 + n)))
        if not slices:
            continue
        logits = together.step(slices)
        for row, (sequence, _) in zip(logits, sorted(slices, key=lambda entry: entry[1] > 1), strict=True):
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(int(row.argmax()))
    assert [s.tokens[len(s.plan) :] for s in sequences] == alone


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_one_token_after_a_context_far_longer_than_its_neighbours(pair: Pair) -> None:
    lengths = [900, 3, 17, 16, 640, 33, 1]
    prompts = [pair.prompt(seed=50 + n, pictures=0, longest_text=length) for n, length in enumerate(lengths)]
    paged, sequences = Paged(pair.ours.text), [prompt.sequence() for prompt in prompts]
    for sequence in sequences:
        while sequence.computed < len(sequence.plan) - 1:
            paged.step([(sequence, len(sequence.plan) - 1 - sequence.computed)])
    logits = paged.step([(sequence, 1) for sequence in sequences])
    for row, prompt in zip(logits, prompts, strict=True):
        torch.testing.assert_close(row, pair.reference_logits(prompt)[-1], **CLOSE)


@pytest.mark.parametrize("pair", ["vl-deepstack"], indirect=True)
def test_a_step_that_samples_nothing_still_writes_its_keys_and_values(pair: Pair) -> None:
    prompt = pair.prompt(seed=3, pictures=1)
    paged, sequence = Paged(pair.ours.text), prompt.sequence()
    half = len(prompt.plan) // 2
    assert paged.step([(sequence, half)], sample=False).shape == (0, pair.ours.text.spec.vocab_size)
    logits = paged.step([(sequence, len(prompt.plan) - half)])[0]
    torch.testing.assert_close(logits, pair.reference_logits(prompt)[-1], **CLOSE)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 8000))
def test_groups_hold_every_sequence_once_and_stay_within_their_bounds(contexts: list[int], most: int) -> None:
    groups = group_by_length(contexts, most)
    assert sorted(s for group in groups for s in group) == list(range(len(contexts)))
    for group in groups:
        longest = max(contexts[s] for s in group)
        assert len(group) == 1 or len(group) * longest <= most
        assert all(longest - contexts[s] <= 256 for s in group)


def test_like_lengths_stay_one_call_in_the_order_they_came() -> None:
    assert group_by_length([100, 90, 120], 4096) == [[0, 1, 2]]
    assert group_by_length([], 4096) == []
