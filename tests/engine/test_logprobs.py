"""The arithmetic of log probabilities, against their definition in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.logprobs import Candidates, GivenIds, TokenLogprob, TopN, WholeVocabulary
from triptych.engine import logprobs
from triptych.engine.logprobs import token_logprobs

LOWEST = np.finfo(np.float32).min
KNOWN = 23
"""Tokens of the vocabulary; logits are padded behind them with minus infinity."""


def ids_of(row: np.ndarray, selection: Candidates) -> list[int]:
    match selection:
        case TopN(count):
            return sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]
        case GivenIds(token_ids):
            return list(token_ids)
        case _:
            return list(range(len(row)))


def exact_logprob(row: np.ndarray, token: int) -> float:
    exact = row.astype(np.float64)
    value = exact[token] - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    return max(value, float(LOWEST))


def rank(row: np.ndarray, token: int) -> int:
    return 1 + int((row > row[token]).sum())


def check(found: TokenLogprob | None, row: np.ndarray, token: int, selection: Candidates | None) -> None:
    if not np.isfinite(row.max()):
        assert found is None
        return
    assert found is not None
    assert type(found.logprob) is float
    np.testing.assert_allclose(found.logprob, exact_logprob(row, token), rtol=1e-5, atol=1e-5)
    assert (type(found.rank), found.rank) == (int, rank(row, token))
    if selection is None or selection == TopN(0):
        assert found.candidates is None
        return
    ids = ids_of(row, selection)
    assert found.candidates.token_ids.tolist() == ids
    assert found.candidates.ranks.tolist() == [rank(row, each) for each in ids]
    expected = [exact_logprob(row, each) for each in ids]
    np.testing.assert_allclose(found.candidates.logprobs, expected, rtol=1e-5, atol=1e-5)
    assert np.isfinite(found.candidates.logprobs).all()
    columns = found.candidates
    assert [c.dtype for c in (columns.token_ids, columns.logprobs, columns.ranks)] == [np.int32, np.float32, np.int32]


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    """[n, vocab] of few different values, so that there are ties; some of them extreme, and a padded end."""
    rows, padding = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    values = st.one_of(
        st.integers(-3, 3).map(float), st.floats(-30, 30, width=32), st.sampled_from([-np.inf, 3e38, -3e38, 0.0, -0.0])
    )
    if draw(st.booleans()):  # now and then a row that is broken
        values = st.one_of(values, st.sampled_from([np.nan, np.inf]))
    known = draw(st.lists(st.lists(values, min_size=KNOWN, max_size=KNOWN), min_size=rows, max_size=rows))
    return np.concatenate([np.array(known, np.float32), np.full((rows, padding), -np.inf, np.float32)], axis=1)


selections = st.one_of(
    st.none(),
    st.builds(TopN, st.sampled_from([0, 1, 2, 5, KNOWN, 100])),
    st.builds(GivenIds, st.lists(st.integers(0, KNOWN - 1), min_size=1, max_size=7).map(tuple)),
    st.just(WholeVocabulary()),
)


@pytest.mark.parametrize("at_once", [1, 2 * (KNOWN + 2), logprobs.LOGITS_AT_ONCE])
@given(logits=matrices(), data=st.data())
def test_every_number_is_what_the_definition_says(at_once: int, logits: np.ndarray, data: st.DataObject) -> None:
    count = len(logits)
    tokens = data.draw(st.lists(st.integers(0, KNOWN - 1), min_size=count, max_size=count))
    wanted = data.draw(st.lists(selections, min_size=count, max_size=count))
    given_logits = torch.from_numpy(logits.copy())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "LOGITS_AT_ONCE", at_once)
        found = token_logprobs(given_logits, tokens, wanted)
    np.testing.assert_array_equal(given_logits.numpy(), logits)
    assert len(found) == count
    for each, row, token, selection in zip(found, logits, tokens, wanted, strict=True):
        check(each, row, token, selection)


@pytest.mark.parametrize(
    "selection", [None, TopN(5), TopN(128), GivenIds((4999, 0, 17, 17)), GivenIds(tuple(range(0, 4096, 4)))], ids=str
)
def test_a_large_vocabulary_with_many_ties(selection: Candidates | None) -> None:
    logits = np.round(np.random.default_rng(0).normal(size=(3, 5000)) * 3, 1).astype(np.float32)
    tokens = [4999, int(logits[1].argmax()), 0]
    found = token_logprobs(torch.from_numpy(logits), tokens, [selection] * 3)
    for each, row, token in zip(found, logits, tokens, strict=True):
        check(each, row, token, selection)


def test_the_whole_of_a_large_vocabulary_shares_its_ids_and_ranks_ties_alike() -> None:
    logits = np.round(np.random.default_rng(1).normal(size=(2, 3000)) * 3, 1).astype(np.float32)
    first, second = token_logprobs(torch.from_numpy(logits), [0, 1], [WholeVocabulary()] * 2)
    for each, row, token in ((first, logits[0], 0), (second, logits[1], 1)):
        check(each, row, token, WholeVocabulary())
    assert first.candidates.token_ids is second.candidates.token_ids
    assert not first.candidates.token_ids.flags.writeable


def test_what_one_request_keeps_does_not_keep_the_batch_alive() -> None:
    found = token_logprobs(torch.randn(8, 50), [0] * 8, [TopN(3)] * 4 + [WholeVocabulary()] * 2 + [GivenIds((1,))] * 2)
    for each in found:
        for column in (each.candidates.logprobs, each.candidates.ranks):
            assert column.base is None


def test_neighbours_of_other_logits_that_round_to_one_log_probability_have_their_own_ranks() -> None:
    small = np.float32(1e-7)
    row = np.array([[30.0, small, 0.0]], np.float32)
    (found,) = token_logprobs(torch.from_numpy(row), [2], [TopN(3)])
    assert found.candidates.logprobs[1] == found.candidates.logprobs[2]
    assert found.candidates.ranks.tolist() == [1, 2, 3]
    assert found.rank == 3


def test_nobody_asks() -> None:
    assert token_logprobs(torch.empty(0, 50), [], []) == []
