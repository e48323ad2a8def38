from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.requests import EOS, request
from triptych.core.errors import Internal, InvalidRequest
from triptych.core.request import Sampling, Stopping
from triptych.engine import sampler
from triptych.engine.race import Start, winners
from triptych.engine.sampler import Chooser, Draw, choose_tokens

VOCAB = 50


def chooser(sampling: Sampling, stopping: Stopping | None = None, prompt: tuple[int, ...] = (10, 11, 12)) -> Chooser:
    return Chooser(request("r", prompt, sampling=sampling, stopping=stopping), VOCAB)


def logits(seed: int, rows: int = 1, *, step: float = 0.0) -> torch.Tensor:
    """[rows, VOCAB]; rounded to multiples of ``step`` so that there are ties."""
    values = np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 2
    return torch.from_numpy(np.round(values / step).astype(np.float32) * np.float32(step) if step else values)


def mix(value: int) -> int:
    """splitmix64's finalizer."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


def arrival(seed: int, at: int, token: int) -> float:
    """When a token of weight 1 arrives: the definition, number by number."""
    key = mix((mix(seed) + (at + 1) * 0x9E3779B97F4A7C15) % 2**64)
    name = token * 0x9E3779B1 % 2**32
    name = (name ^ (name >> 15)) * 0xC2B2AE35 % 2**32
    value = name ^ (key % 2**32)
    value = ((value ^ (value >> 16)) * 0x85EBCA6B + (key >> 32)) % 2**32
    value = (value ^ (value >> 13)) * 0xC2B2AE35 % 2**32
    value ^= value >> 16
    return -math.log1p(-min((value % 2**31 + 0.5) / 2**31, 1 - 2**-24))


def reference(row: np.ndarray, sampling: Sampling, at: int) -> int:
    """The definition, in plain numpy and without thought for speed."""
    if sampling.temperature == 0:
        return int(row.argmax())
    order = np.argsort(-row, kind="stable")
    kept = order[: sampling.top_k or len(row)]
    weights = np.exp((row.astype(np.float64) - row.max()) / sampling.temperature)
    before = np.cumsum(weights[kept]) - weights[kept]
    if sampling.top_p < 1:
        kept = kept[before < sampling.top_p * weights[kept].sum()]
    kept = np.sort(kept[weights[kept] >= sampling.min_p * weights.max()])
    assert sampling.seed is not None
    times = [arrival(sampling.seed, at, int(token)) for token in kept]
    return int(kept[np.argmax(weights[kept] / times)])


options = st.builds(
    Sampling,
    temperature=st.sampled_from([0, 0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 20, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@given(batch=st.lists(options, min_size=1, max_size=6), seed=st.integers(0, 999), step=st.sampled_from([0.0, 1.0]))
@settings(max_examples=150, deadline=None)
def test_every_row_of_a_mixed_batch_is_what_the_definition_says(batch: list[Sampling], seed: int, step: float) -> None:
    rows = logits(seed, len(batch), step=step)
    expected = [reference(row.numpy(), each, 9) for row, each in zip(rows, batch, strict=True)]
    assert choose_tokens(rows.clone(), [Draw(chooser(each), 9) for each in batch]) == expected


@pytest.mark.parametrize("top_p", [0.3, 0.95])
def test_top_p_looks_at_all_tokens_when_the_first_candidates_do_not_suffice(
    monkeypatch: pytest.MonkeyPatch, top_p: float
) -> None:
    monkeypatch.setattr(sampler, "NUCLEUS_CANDIDATES", (4, 20))
    each = Sampling(temperature=2.0, top_p=top_p, seed=5)
    for seed in range(40):
        row = logits(seed)
        expected = reference(row[0].numpy(), each, 3 + seed)
        assert choose_tokens(row, [Draw(chooser(each), 3 + seed)]) == [expected]


def test_tokens_of_no_weight_never_win() -> None:
    row = torch.full((1, VOCAB), -math.inf)
    row[0, 20], row[0, 30] = 0.1, 0.0
    for options in ({}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 1}):
        each = chooser(Sampling(seed=1, **options))
        drawn = {choose_tokens(row, [Draw(each, at)])[0] for at in range(3, 60)}
        assert drawn <= {20, 30}
    # however late the only one that has a weight arrives
    weights = torch.zeros(4000, 2)
    weights[:, 1] = 1e-38
    assert winners(weights, None, [Start(seed, 1) for seed in range(4000)]).tolist() == [1] * 4000


def test_rounding_seldom_changes_the_winner() -> None:
    # flat, so that an inverse distribution function would have a boundary near every number
    row = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 20_000)).astype(np.float32))
    noise = torch.from_numpy(np.random.default_rng(1).normal(size=(1, 20_000)).astype(np.float32)) * 1e-6
    same = Chooser(request("r", [10], sampling=Sampling(seed=3)), 20_000)
    changed = 0
    for start in range(1, 4001, 50):
        draws = [Draw(same, at) for at in range(start, start + 50)]
        before = choose_tokens(row.expand(50, -1), draws)
        after = choose_tokens((row + noise).expand(50, -1), draws)
        changed += sum(one != other for one, other in zip(before, after, strict=True))
    assert changed <= 1


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=1),
        Sampling(temperature=0.5, seed=2),
        Sampling(top_k=7, seed=3),
        Sampling(temperature=2, top_p=0.7, seed=4),
    ],
)
def test_tokens_come_as_often_as_they_should(sampling: Sampling) -> None:
    row = logits(3)[0].numpy().astype(np.float64)
    weights = np.exp((row - row.max()) / sampling.temperature)
    order = np.argsort(-row)
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    if sampling.top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= sampling.top_p * weights.sum()]] = 0
    count = 4000
    rows = logits(3).expand(count, -1).clone()
    same = chooser(sampling)
    drawn = np.bincount(choose_tokens(rows, [Draw(same, 3 + at) for at in range(count)]), minlength=VOCAB)
    assert not drawn[weights == 0].any()
    probabilities = weights[weights > 0] / weights.sum()
    # mean and spread of a chi-square are its degrees of freedom and their doubled root
    freedom = len(probabilities) - 1
    assert chi_square(drawn[weights > 0], probabilities) < freedom + 4 * math.sqrt(2 * freedom)


def test_seeds_indices_and_tokens_do_not_correlate() -> None:
    # of equal weights everyone wins as often as anyone else, and who won says nothing about who wins next
    count = 64
    starts = [Start(seed, at) for seed in range(count) for at in range(count)]
    won = winners(torch.ones(len(starts), 64), None, starts).numpy().reshape(count, count)
    assert chi_square(np.bincount(won.ravel(), minlength=64), np.full(64, 1 / 64)) < 63 + 4 * math.sqrt(126)
    for one, other in ((won[:-1], won[1:]), (won[:, :-1], won[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.06
        assert abs((one == other).mean() - 1 / 64) < 0.01
    times = np.array([[arrival(seed, 5, token) for token in range(64)] for seed in range(64)])
    uniform = -np.expm1(-times)
    assert chi_square(np.histogram(uniform, bins=64, range=(0, 1))[0], np.full(64, 1 / 64)) < 63 + 4 * math.sqrt(126)
    assert abs(np.corrcoef(times[:, :-1].ravel(), times[:, 1:].ravel())[0, 1]) < 0.06
    assert abs(np.corrcoef(times[:-1].ravel(), times[1:].ravel())[0, 1]) < 0.06


def test_a_seed_gives_the_same_token_alone_and_in_company() -> None:
    each = chooser(Sampling(seed=7, top_p=0.9))
    row = logits(1)
    alone = choose_tokens(row.clone(), [Draw(each, 4)])
    company = [chooser(Sampling(seed=s, top_k=s)) for s in range(5)]
    rows = torch.cat([logits(2, 5), row])
    assert choose_tokens(rows, [*(Draw(other, 4) for other in company), Draw(each, 4)])[-1:] == alone


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, [30, 20]] = 1.0
    assert choose_tokens(row, [Draw(chooser(Sampling(temperature=0)), 3)]) == [20]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e30])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    row = logits(1)
    (token,) = choose_tokens(row.clone(), [Draw(chooser(Sampling(temperature=temperature, seed=1)), 3)])
    assert token == int(row.argmax()) or (temperature > 1 and 0 <= token < VOCAB)


# -- penalties and masks --------------------------------------------------------------------------


def penalised(sampling: Sampling, generated: list[int]) -> torch.Tensor:
    each = chooser(sampling)
    for token in generated:
        each.observe(token)
    row = logits(4)[0]
    each.adjust(row, 3 + len(generated))
    return row


def test_frequency_and_presence_count_generated_tokens_only() -> None:
    plain = logits(4)[0]
    row = penalised(Sampling(temperature=0, frequency_penalty=0.5, presence_penalty=0.25), [20, 20, 21])
    expected = plain.clone()
    expected[20] -= 2 * 0.5 + 0.25
    expected[21] -= 0.5 + 0.25
    torch.testing.assert_close(row, expected)


def test_repetition_counts_the_prompt_too_and_pushes_both_signs_down() -> None:
    plain = logits(4)[0]
    row = penalised(Sampling(temperature=0, repetition_penalty=2.0), [20])
    expected = plain.clone()
    for token in (10, 11, 12, 20):
        expected[token] = plain[token] * 2 if plain[token] < 0 else plain[token] / 2
    torch.testing.assert_close(row, expected)


def test_penalties_remember_more_tokens_than_they_began_with() -> None:
    sampling = Sampling(temperature=0, presence_penalty=2.0)
    each = Chooser(request("r", [1], sampling=sampling), 1000)
    for token in range(200):
        each.observe(token)
    row = torch.zeros(1000)
    each.adjust(row, 201)
    assert row[:200].tolist() == [-2.0] * 200
    assert not row[200:].any()


@pytest.mark.parametrize("factor", [1e300, 1e-300])
def test_a_monstrous_penalty_stays_finite(factor: float) -> None:
    assert torch.isfinite(penalised(Sampling(temperature=0, repetition_penalty=factor), [20])).all()


def test_ends_are_masked_until_min_tokens_and_impossible_ids_do_no_harm() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, EOS], row[0, 7], row[0, 9] = 9.0, 8.0, 7.0
    each = chooser(Sampling(temperature=0), Stopping(max_tokens=9, min_tokens=2, stop_token_ids=(7, VOCAB, 2**32 - 1)))
    assert [choose_tokens(row.clone(), [Draw(each, at)])[0] for at in (3, 4, 5)] == [9, 9, EOS]


def test_an_ignored_eos_is_not_masked() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, EOS] = 1.0
    each = chooser(Sampling(temperature=0), Stopping(max_tokens=9, min_tokens=2, ignore_eos=True))
    assert choose_tokens(row, [Draw(each, 3)]) == [EOS]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(seed=1), Sampling(seed=1, top_k=3)])
def test_a_row_that_is_not_finite_is_reported_and_its_neighbours_are_not(value: float, sampling: Sampling) -> None:
    rows = logits(1, 3)
    good = choose_tokens(rows.clone(), [Draw(chooser(sampling), 3)] * 3)
    rows[1, 17] = value
    first, second, third = choose_tokens(rows, [Draw(chooser(sampling), 3)] * 3)
    assert (first, third) == (good[0], good[2])
    assert isinstance(second, Internal)
    assert "not finite" in str(second)


def test_forbidden_tokens_may_be_minus_infinity_but_not_all() -> None:
    row = torch.full((2, VOCAB), -math.inf)
    row[0, 5] = 0.0
    token, error = choose_tokens(row, [Draw(chooser(Sampling(seed=1)), 3)] * 2)
    assert token == 5
    assert isinstance(error, Internal)


@given(batch=st.lists(options, min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_the_logits_are_left_as_they_are(batch: list[Sampling], seed: int) -> None:
    rows = logits(seed, len(batch))
    before = rows.clone()
    each = [dataclasses.replace(sampling, repetition_penalty=1.5) for sampling in batch]
    choose_tokens(rows, [Draw(chooser(sampling, Stopping(max_tokens=9, min_tokens=9)), 3) for sampling in each])
    assert torch.equal(rows, before)


# -- grammars -------------------------------------------------------------------------------------


class Answers:
    """A grammar and its only matcher: allows what it was given, token by token, and remembers what it was told."""

    def __init__(self, *allowed: object) -> None:
        self._allowed = allowed
        self.told: list[int] = []

    def matcher(self) -> Answers:
        return self

    def allowed(self) -> np.ndarray:
        given = self._allowed[len(self.told)]
        if isinstance(given, Exception):
            raise given
        return given

    def accept(self, token: int) -> None:
        self.told.append(token)


def only(*tokens: int, vocab: int = VOCAB) -> np.ndarray:
    allowed = np.zeros(vocab, np.bool_)
    allowed[list(tokens)] = True
    return allowed


def guided(
    grammar: Answers, sampling: Sampling | None = None, stopping: Stopping | None = None, eos: tuple[int, ...] = (EOS,)
) -> Chooser:
    made = request("r", (10, 11, 12), sampling=sampling or Sampling(temperature=0), stopping=stopping, eos=eos)
    return Chooser(dataclasses.replace(made, grammar=grammar), VOCAB)


@given(
    sampling=options,
    allowed=st.sets(st.integers(0, VOCAB + 9), min_size=1),
    vocab=st.integers(1, VOCAB + 10),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_a_grammar_is_as_if_the_other_tokens_were_impossible(
    sampling: Sampling, allowed: set[int], vocab: int, seed: int
) -> None:
    mask = only(*(token for token in allowed if token < vocab), vocab=vocab)
    row = logits(seed, step=0.5)
    masked = row[0].numpy().copy()
    masked[[token for token in range(VOCAB) if token >= vocab or not mask[token]]] = -np.inf
    (token,) = choose_tokens(row, [Draw(guided(Answers(mask), sampling), 4)])
    if np.isinf(masked).all():
        assert isinstance(token, Internal)
        assert "no token is left" in str(token)
    else:
        assert token == reference(masked, sampling, 4)


def test_a_grammar_is_asked_before_each_token_and_told_after_it() -> None:
    grammar = Answers(only(20, 30), only(31))
    each = guided(grammar)
    row = torch.zeros(1, VOCAB)
    row[0, 30] = 1.0
    for _ in range(2):  # a batch may be computed twice
        assert choose_tokens(row, [Draw(each, 3)]) == [30]
    assert grammar.told == []
    each.observe(30)
    assert choose_tokens(row, [Draw(each, 4)]) == [31]
    assert grammar.told == [30]


def test_penalties_weigh_what_the_grammar_allows() -> None:
    each = guided(Answers(*[only(20, 30)] * 2), Sampling(temperature=0, presence_penalty=2.0))
    row = torch.zeros(1, VOCAB)
    row[0, 30] = 1.0
    assert choose_tokens(row, [Draw(each, 3)]) == [30]
    each.observe(30)
    assert choose_tokens(row, [Draw(each, 4)]) == [20]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_keeps_a_grammar_from_its_end_only_while_something_else_may_follow(ignore_eos: bool) -> None:
    stopping = Stopping(max_tokens=9, min_tokens=5, ignore_eos=ignore_eos)
    each = guided(Answers(only(EOS, 20), only(EOS)), stopping=stopping)
    row = torch.zeros(1, VOCAB)
    row[0, EOS] = 1.0
    assert choose_tokens(row, [Draw(each, 3)]) == [20]
    each.observe(20)
    assert choose_tokens(row, [Draw(each, 4)]) == [EOS]


def test_a_stop_id_that_the_grammar_insists_on_is_lifted_too_but_not_what_it_forbids() -> None:
    stopping = Stopping(max_tokens=9, min_tokens=5, stop_token_ids=(20,))
    row = torch.zeros(1, VOCAB)
    row[0, EOS] = 1.0
    assert choose_tokens(row, [Draw(guided(Answers(only(20)), stopping=stopping), 3)]) == [20]


def test_what_goes_wrong_in_a_grammar_stays_in_its_row(caplog: pytest.LogCaptureFixture) -> None:
    broken = [
        Answers(InvalidRequest("too deep")),
        Answers(KeyError("x")),
        Answers("no array"),
        Answers(only(VOCAB - 1)),
    ]
    rows = torch.zeros(5, VOCAB)
    rows[3, VOCAB - 1] = -math.inf
    draws = [Draw(guided(grammar), 3) for grammar in broken]
    *errors, token = choose_tokens(rows, [*draws, Draw(chooser(Sampling(temperature=0)), 3)])
    assert token == 0
    assert [type(error) for error in errors] == [InvalidRequest, Internal, Internal, Internal]
    assert str(errors[0]) == "too deep"
    assert str(errors[1]) == str(errors[2]) == "the grammar of this request failed"
    assert "no token is left" in str(errors[3])
    assert sum("its grammar failed" in record.message for record in caplog.records) == 2
