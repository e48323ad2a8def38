"""Log probabilities through steps: who gets which, in what pieces, and what happens when something fails."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.engine.fakes import VOCAB, EvenGrammar, HashModel, UniformModel
from tests.engine.setup import Bench, alone
from tests.requests import item, request
from triptych.core.errors import Internal, InvalidRequest
from triptych.core.events import Failed
from triptych.core.logprobs import Candidates, GivenIds, LogprobOptions, TokenLogprob, TopN, WholeVocabulary
from triptych.core.request import Request, Sampling, Stopping
from triptych.engine import runner

if TYPE_CHECKING:
    import torch

STOPPING = Stopping(max_tokens=6, ignore_eos=True)
SCORE = LogprobOptions(prompt=True, prompt_candidates=TopN(2))


def made(
    name: str,
    length: int,
    options: LogprobOptions | None = None,
    *,
    first: int = 10,
    sampling: Sampling | None = None,
    **fields: object,
) -> Request:
    ids = [first, *(20 + (7 * n + first) % 70 for n in range(length - 1))]
    plain = request(name, ids, stopping=STOPPING, sampling=sampling)
    return dataclasses.replace(plain, logprobs=options or LogprobOptions(), **fields)


def flat(logprobs: list[TokenLogprob]) -> list[tuple[object, ...]]:
    return [
        (each.logprob, each.rank, *((c.token_ids.tolist(), c.logprobs.tolist(), c.ranks.tolist()) if c else ()))
        for each in logprobs
        for c in (each.candidates,)
    ]


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 512])
@pytest.mark.parametrize("start", [0, 1, 20, 39])
def test_a_prompt_is_scored_alike_in_pieces_of_any_size(chunk: int, start: int) -> None:
    options = dataclasses.replace(SCORE, prompt_start=start)
    asking = dataclasses.replace(made("r", 40, options), stopping=Stopping(max_tokens=1))
    bench = Bench(max_batched_tokens=chunk)
    bench.run([asking])
    whole = Bench()
    whole.run([dataclasses.replace(asking, logprobs=SCORE)])
    expected = flat(whole.prompt_logprobs["r"])
    assert len(expected) == 39
    assert flat(bench.prompt_logprobs.get("r", [])) == expected[max(start - 1, 0) :]


def test_only_those_who_ask_are_answered_and_only_they_pay() -> None:
    model = HashModel()
    bench = Bench(model, max_batched_tokens=64)
    requests = [made("plain", 30), made("scored", 50, SCORE, first=11), made("b", 40, first=12)]
    out = made("out", 20, LogprobOptions(output=True), first=13)
    bench.run([*requests, out])
    assert (set(bench.prompt_logprobs), set(bench.logprobs)) == ({"scored"}, {"out"})
    assert len(bench.logprobs["out"]) == 6
    assert all(each.candidates is None for each in bench.logprobs["out"])
    assert bench.tokens == {each.request_id: alone(each) for each in (*requests, out)}
    slices = sum(len(plan.tokens) for plan in bench.plans)
    assert sum(model.heads) == slices + 49


@pytest.mark.parametrize("selection", [None, TopN(3), GivenIds((96, 0, 5)), WholeVocabulary()], ids=str)
def test_an_answer_is_scored_as_if_it_were_part_of_the_prompt(selection: Candidates | None) -> None:
    # whatever was done to the logits before a token was taken from them
    options = LogprobOptions(output=True, output_candidates=selection)
    requests = [
        made("greedy", 17, options),
        made("hot", 30, options, sampling=Sampling(seed=1, temperature=5)),
        made("cold", 9, options, sampling=Sampling(seed=2, temperature=0.1, top_k=5, top_p=0.5)),
        made("strange", 20, options, sampling=Sampling(temperature=0, repetition_penalty=9, presence_penalty=2)),
        made("guided", 12, options, sampling=Sampling(seed=3), grammar=EvenGrammar(9)),
    ]
    bench = Bench()
    bench.run(requests)
    for each in requests:
        tokens = bench.tokens[each.request_id]
        whole = request("again", [*each.plan.token_ids.tolist(), *tokens], stopping=Stopping(max_tokens=1))
        scoring = LogprobOptions(prompt=True, prompt_candidates=selection, prompt_start=len(each.plan))
        again = Bench()
        again.run([dataclasses.replace(whole, logprobs=scoring)])
        assert flat(bench.logprobs[each.request_id]) == flat(again.prompt_logprobs["again"])
    assert max(each.rank for each in bench.logprobs["hot"]) > 1


def test_everybody_shares_the_first_rank_of_a_uniform_model() -> None:
    options = LogprobOptions(prompt=True, prompt_candidates=TopN(4), output=True, output_candidates=TopN(0))
    bench = Bench(UniformModel())
    bench.run([made("r", 5, options, sampling=Sampling(seed=1))])
    everything = (*bench.prompt_logprobs["r"], *bench.logprobs["r"])
    assert {each.rank for each in everything} == {1}
    assert {round(each.logprob, 5) for each in everything} == {round(-math.log(VOCAB), 5)}
    assert bench.prompt_logprobs["r"][0].candidates.token_ids.tolist() == [0, 1, 2, 3]
    assert bench.logprobs["r"][0].candidates is None


def test_a_prompt_with_a_picture_in_pieces() -> None:
    ids = [10 + n % 60 for n in range(60)]
    asking = dataclasses.replace(request("r", ids, [item(7, (6, 40))], stopping=STOPPING), logprobs=SCORE)
    answers = []
    for chunk in (512, 16, 5):
        bench = Bench(max_batched_tokens=chunk)
        bench.run([asking])
        answers.append(flat(bench.prompt_logprobs["r"]))
    assert len(answers[0]) == 59
    assert answers[1] == answers[2] == answers[0]


def test_a_long_prompt_goes_through_the_head_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [made("a", 30, SCORE), made("b", 25, SCORE, first=11), made("c", 9, first=12)]
    expected = Bench()
    expected.run(requests)
    monkeypatch.setattr(runner, "PROMPT_LOGIT_BYTES", 7 * 4 * VOCAB + 3)
    model = HashModel()
    bench = Bench(model)
    bench.run(requests)
    assert bench.prompt_logprobs.keys() == expected.prompt_logprobs.keys()
    for name, logprobs in bench.prompt_logprobs.items():
        assert flat(logprobs) == flat(expected.prompt_logprobs[name])
    rows = 29 + 24
    assert model.heads[:9] == [3, *[7] * (rows // 7), rows % 7]
    monkeypatch.setattr(runner, "PROMPT_LOGIT_BYTES", 1)  # less than one row: then one row at a time
    Bench(model).run([made("a", 5, SCORE)])


def test_a_preempted_answer_is_not_scored_twice_and_neither_is_its_prompt() -> None:
    options = dataclasses.replace(SCORE, output=True)
    longer = Stopping(max_tokens=20, ignore_eos=True)
    requests = [dataclasses.replace(made(f"r{n}", 20, options, first=10 + n), stopping=longer) for n in range(8)]
    bench = Bench(block_size=2, num_blocks=60, max_batched_tokens=64)
    bench.run(requests)
    assert bench.scheduler.statistics().preemptions > 0
    for each in requests:
        quiet = Bench()
        quiet.run([each])
        assert flat(bench.prompt_logprobs[each.request_id]) == flat(quiet.prompt_logprobs[each.request_id])
        assert flat(bench.logprobs[each.request_id]) == flat(quiet.logprobs[each.request_id])


# -- failures -------------------------------------------------------------------------------------


class BlindModel(HashModel):
    """The numbers of one wanted row of a prompt are not finite; those of the slices' ends are."""

    row = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden).clone()
        if len(self.heads) == 2:
            logits[self.row, 3] = math.nan
        return logits


@pytest.mark.parametrize("row", [0, 12, 28])
def test_a_prompt_row_that_is_not_finite_fails_its_own_request_only(row: int) -> None:
    model = BlindModel()
    model.row = row  # of 29 that are those of "bad"
    bench = Bench(model)
    bench.run([made("bad", 30, SCORE), made("good", 30, SCORE, first=11), made("plain", 9, first=12)])
    failed = [name for name, end in bench.ends.items() if isinstance(end, Failed)]
    assert failed == ["bad"]
    assert isinstance(bench.ends["bad"].error, Internal)
    assert "not finite" in str(bench.ends["bad"].error)
    assert set(bench.prompt_logprobs) == {"good"}
    assert bench.tokens["good"] == alone(made("good", 30, first=11))


def test_a_batch_whose_log_probabilities_do_not_fit_is_repeated_and_nothing_is_committed_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = runner.token_logprobs

    def small(logits: torch.Tensor, tokens: list[int], wanted: list[Candidates | None]) -> list[TokenLogprob | None]:
        if len(tokens) > 1:
            raise MemoryError
        return real(logits, tokens, wanted)

    grammar = EvenGrammar(5)
    options = LogprobOptions(output=True, output_candidates=TopN(2))
    penalty = Sampling(seed=4, frequency_penalty=1.5)
    requests = [
        made("guided", 12, options, sampling=penalty, grammar=grammar),
        made("other", 14, options, first=11, sampling=penalty),
    ]
    expected = Bench()
    expected.run([dataclasses.replace(each, grammar=each.grammar and EvenGrammar(5)) for each in requests])
    monkeypatch.setattr(runner, "token_logprobs", small)
    bench = Bench()
    with caplog.at_level(logging.CRITICAL):
        bench.run(requests)
    assert bench.tokens == expected.tokens
    assert [flat(logprobs) for logprobs in bench.logprobs.values()] == [flat(ls) for ls in expected.logprobs.values()]
    assert [len(matcher.tokens) for matcher in grammar.matchers] == [6]  # five tokens and the end


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
@pytest.mark.parametrize("name", ["prompt", "output"])
def test_candidates_outside_the_vocabulary_are_refused(token: int, name: str) -> None:
    options = LogprobOptions(**{name: True, f"{name}_candidates": GivenIds((0, VOCAB - 1, token))})
    with pytest.raises(InvalidRequest, match=rf"response\.{name}_candidates: token id {token} .* {VOCAB}"):
        Bench().runner.check(made("r", 5, options))
    Bench().runner.check(made("r", 5, LogprobOptions(**{name: True, f"{name}_candidates": GivenIds((VOCAB - 1,))})))


def test_columns_are_small() -> None:
    bench = Bench()
    bench.run([made("r", 5, LogprobOptions(output=True, output_candidates=WholeVocabulary()))])
    columns = bench.logprobs["r"][0].candidates
    assert [c.dtype for c in (columns.token_ids, columns.logprobs, columns.ranks)] == [np.int32, np.float32, np.int32]
    assert len(columns.ranks) == VOCAB
