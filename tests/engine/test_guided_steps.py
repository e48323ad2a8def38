"""Grammars through steps: asked before a token, told after it, and alone with their troubles."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from tests.engine.fakes import VOCAB, EvenGrammar, FakeAdapter, HashModel, UniformModel
from tests.engine.setup import Bench, alone
from tests.requests import EOS, request
from triptych.core.adapter import AdapterInfo
from triptych.core.errors import Internal, InvalidRequest
from triptych.core.events import EosToken, Failed, Finished, FinishReason
from triptych.core.logprobs import GivenIds, LogprobOptions, TopN, WholeVocabulary
from triptych.core.request import Request, Sampling, Stopping


def guided(
    name: str,
    grammar: EvenGrammar | None,
    *,
    first: int = 10,
    length: int = 9,
    sampling: Sampling | None = None,
    stopping: Stopping | None = None,
) -> Request:
    ids = [first, *(20 + (5 * n + first) % 70 for n in range(length - 1))]
    made = request(name, ids, sampling=sampling, stopping=stopping or Stopping(max_tokens=20))
    return dataclasses.replace(made, grammar=grammar)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(seed=5, temperature=2, top_p=0.9)])
@pytest.mark.parametrize("stopping", [Stopping(max_tokens=20), Stopping(max_tokens=20, ignore_eos=True)])
def test_an_answer_is_what_its_grammar_allows_and_ends_where_it_does(sampling: Sampling, stopping: Stopping) -> None:
    grammar = EvenGrammar(7)
    bench = Bench()
    bench.run([guided("r", grammar, sampling=sampling, stopping=stopping), guided("free", None)])
    tokens = bench.tokens["r"]
    assert len(tokens) == 7
    assert all(token % 2 == 0 for token in tokens)
    end = bench.ends["r"]
    assert isinstance(end, Finished)
    assert (end.reason, end.stop) == (FinishReason.STOP, EosToken(EOS))
    assert [matcher.tokens for matcher in grammar.matchers] == [[*tokens, EOS]]
    assert bench.tokens["free"] == alone(guided("free", None))


def test_requests_that_share_a_grammar_follow_it_each_on_its_own() -> None:
    grammar = EvenGrammar(4)
    bench = Bench()
    bench.run([guided(f"r{n}", grammar, first=10 + n) for n in range(3)])
    told = sorted(matcher.tokens for matcher in grammar.matchers)
    assert told == sorted([*bench.tokens[f"r{n}"], EOS] for n in range(3))


def test_min_tokens_does_not_make_a_grammar_go_on() -> None:
    bench = Bench()
    bench.run([guided("r", EvenGrammar(3), stopping=Stopping(max_tokens=20, min_tokens=8))])
    assert len(bench.tokens["r"]) == 3
    assert isinstance(bench.ends["r"], Finished)


@pytest.mark.parametrize("vocab", [12, VOCAB - 1, VOCAB, VOCAB + 30])
def test_a_grammar_may_know_fewer_or_more_tokens_than_the_model(vocab: int) -> None:
    bench = Bench()
    bench.run([guided("r", EvenGrammar(6, vocab=vocab), sampling=Sampling(seed=3, temperature=9))])
    assert len(bench.tokens["r"]) == 6
    assert max(bench.tokens["r"]) < min(vocab, VOCAB)


def test_a_grammar_that_allows_nothing_fails_its_own_request() -> None:
    bench = Bench()
    # its vocabulary ends before the end of the sequence
    bench.run([guided("r", EvenGrammar(2, vocab=EOS)), guided("other", EvenGrammar(2))])
    end = bench.ends["r"]
    assert isinstance(end, Failed)
    assert isinstance(end.error, Internal)
    assert "no token is left" in str(end.error)
    assert bench.tokens["r"] == [0, 0]
    assert len(bench.tokens["other"]) == 2


@pytest.mark.parametrize("place", ["matcher", "allowed", "accept"])
@pytest.mark.parametrize("trouble", [InvalidRequest("the grammar takes too long"), RuntimeError("a secret")], ids=str)
def test_trouble_with_a_grammar_fails_its_own_request(
    place: str, trouble: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    bad = guided("bad", EvenGrammar(6, trouble={place: trouble}))
    others = [guided("good", EvenGrammar(6), first=11), guided("free", None, first=12)]
    with caplog.at_level(logging.CRITICAL):
        bench.run([others[0], bad, others[1]])
    end = bench.ends["bad"]
    assert isinstance(end, Failed)
    if isinstance(trouble, InvalidRequest):
        assert end.error is trouble
    else:
        assert isinstance(end.error, Internal)
        assert str(end.error) == "the grammar of this request failed"
    assert len(bench.tokens.get("bad", [])) == (0 if place == "matcher" else 1)
    for each in others:
        fresh = dataclasses.replace(each, grammar=each.grammar and EvenGrammar(6))
        assert bench.tokens[each.request_id] == alone(fresh)
    assert bench.run([guided("bad", EvenGrammar(6))])["bad"]  # the id is free again


def test_a_batch_that_fails_is_repeated_without_telling_a_grammar_twice(caplog: pytest.LogCaptureFixture) -> None:
    grammar = EvenGrammar(5)
    bench = Bench(HashModel(broken={95}, most_tokens=24))
    requests = [guided("a", grammar), guided("bad", EvenGrammar(5), first=95), guided("c", grammar, first=11)]
    with caplog.at_level(logging.CRITICAL):
        bench.run(requests)
    assert isinstance(bench.ends["bad"], Failed)
    assert sorted(matcher.tokens for matcher in grammar.matchers) == sorted([*bench.tokens[n], EOS] for n in "ac")
    assert bench.tokens["a"] == alone(guided("a", EvenGrammar(5)))


def sixteen() -> list[Request]:
    """Requests that differ in everything that could touch a neighbour's tokens."""
    samplings = [
        Sampling(seed=1),
        Sampling(seed=2, temperature=3),
        Sampling(seed=3, top_k=9, top_p=0.8),
        Sampling(seed=4, min_p=0.1, repetition_penalty=1.3, frequency_penalty=0.7),
        Sampling(temperature=0),
        Sampling(temperature=0, presence_penalty=1.5),
    ]
    scores = [
        LogprobOptions(),
        LogprobOptions(output=True, output_candidates=TopN(5)),
        LogprobOptions(prompt=True, prompt_candidates=GivenIds((4, 90)), prompt_start=3),
        LogprobOptions(prompt=True, output=True, output_candidates=WholeVocabulary()),
        LogprobOptions(prompt=True, prompt_candidates=TopN(3), output=True),
    ]
    return [
        dataclasses.replace(
            guided(
                f"r{n}",
                EvenGrammar(5 + n) if n % 3 == 0 else None,
                first=10 + n,
                length=8 + 3 * n,
                sampling=samplings[n % 6],
                stopping=Stopping(max_tokens=16, min_tokens=n % 4, ignore_eos=n % 2 == 0),
            ),
            logprobs=scores[n % 5],
            adapter=FakeAdapter(AdapterInfo(1 + n % 8, f"adapter {n % 8}", "/adapters")) if n % 4 == 1 else None,
        )
        for n in range(16)
    ]


@pytest.mark.parametrize("model", [HashModel, UniformModel])
@pytest.mark.parametrize(
    "changes", [{}, {"max_batched_tokens": 20}, {"block_size": 2, "num_blocks": 80, "max_batched_tokens": 50}], ids=str
)
def test_sixteen_different_requests_answer_as_each_does_alone(model: type, changes: dict[str, int]) -> None:
    bench = Bench(model(), **changes)
    bench.run(sixteen())
    if "num_blocks" in changes:
        assert bench.scheduler.statistics().preemptions > 0
    for each in sixteen():
        quiet = Bench(model())
        assert bench.tokens[each.request_id] == quiet.run([each])[each.request_id]
        for ours, theirs in ((bench.logprobs, quiet.logprobs), (bench.prompt_logprobs, quiet.prompt_logprobs)):
            pairs = zip(ours.get(each.request_id, []), theirs.get(each.request_id, []), strict=True)
            assert all((one.rank, one.logprob) == pytest.approx((two.rank, two.logprob)) for one, two in pairs)
