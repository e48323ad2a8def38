"""Prefill on one engine and decode on another give what one engine gives."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from tests.engine.fakes import VOCAB, EvenGrammar, FakeAdapter, HashModel, UniformModel
from tests.engine.handoff import Pair, exported
from tests.engine.setup import Bench, alone
from tests.engine.test_engine_identity import mixed
from tests.engine.test_guided_steps import guided
from tests.requests import EOS, group, item, request
from triptych.core.adapter import AdapterInfo
from triptych.core.errors import Internal, InvalidRequest, KvSessionNotFound, SessionMismatch, UnsupportedFeature
from triptych.core.events import EosToken, Failed, Finished, FinishReason
from triptych.core.logprobs import GivenIds, LogprobOptions, TopN
from triptych.core.request import CacheOptions, Request, Sampling, Stopping
from triptych.transport.contract import FetchOutcome, FetchResult

SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "seeded": Sampling(seed=11, temperature=2),
    "filtered": Sampling(seed=12, top_k=9, top_p=0.9, min_p=0.01),
    "penalties": Sampling(seed=13, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.2),
}


def prompts(sampling: Sampling | None = None) -> list[Request]:
    """Text and up to three pictures of odd sizes."""
    return [mixed(f"r{seed}", seed, pictures=seed % 4, sampling=sampling) for seed in range(8)]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return {each.request_id: alone(each) for each in prompts()}


@pytest.mark.parametrize("chunk", [16, 17, 31, 48, 64, 100, 512])
def test_chunk_sizes(chunk: int, expected: dict[str, list[int]]) -> None:
    pair = Pair(p_max_batched_tokens=chunk)
    assert pair.run(*([each] for each in prompts())) == expected
    assert pair.decode.tower.calls == []
    assert all(piece.start >= len(each.plan) for each in prompts() for piece in _pieces(pair, each.request_id))
    pair.nothing_is_held()


def _pieces(pair: Pair, name: str) -> list[object]:
    return [piece for plan in pair.decode.plans for piece in plan.tokens if piece.request_id == name]


@pytest.mark.parametrize("size", [1, 3, 16, 64])
def test_block_sizes(size: int, expected: dict[str, list[int]]) -> None:
    assert Pair(block_size=size, num_blocks=4096 // size).run(*([each] for each in prompts())) == expected


@pytest.mark.parametrize("model", [HashModel, UniformModel])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampling_goes_on_where_it_was(model: type, count: int, name: str) -> None:
    pair = Pair((model(), model()), p_max_batched_tokens=40)
    groups = [group(each, count) for each in prompts(SAMPLINGS[name])[:5]]
    pair.run(*groups)
    for each in (each for members in groups for each in members):
        assert pair.decode.tokens[each.request_id] == alone(each, model())
    pair.nothing_is_held()


@pytest.mark.parametrize("chunk", [16, 37, 512])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_prefix_hits_at_every_block_offset(side: str, chunk: int) -> None:
    size = 8
    target = mixed("target", 3, pictures=3)
    answer = alone(target)
    ids = target.plan.token_ids
    for at in range(0, len(ids) + size, size):
        pair = Pair(block_size=size, max_batched_tokens=chunk)
        kept = [layout for layout in target.plan.items if layout.end <= at]
        cut = any(layout.start < at < layout.end for layout in target.plan.items)
        bench = getattr(pair, side)
        bench.run([request("before", [*ids[:at].tolist(), 96], kept, stopping=Stopping(max_tokens=1))])
        assert pair.run([target])["target"] == answer
        known = min(at, len(ids) - 1) // size * size
        cached = pair.decode.ends["target"].usage.cached_prompt_tokens
        moved = pair.decode.fetcher.statistics()["moved_bytes"] // pair.decode.kv.layout.block_bytes
        blocks = -(-len(ids) // size)
        if side == "prefill":
            assert moved == blocks
            assert cached <= known if cut else cached == known
        else:
            assert cached == 0
            assert moved >= blocks - known // size if cut else moved == blocks - min(at, len(ids)) // size


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("picture", [None, (2, 11), (10, 5)], ids=str)
def test_several_outputs_share_what_is_full_and_copy_what_is_not(length: int, picture: tuple[int, int] | None) -> None:
    items = [item(7, picture)] if picture else []
    stopping = Stopping(max_tokens=40, ignore_eos=True)
    made = request("a", [10 + n for n in range(length)], items, sampling=Sampling(seed=5), stopping=stopping)
    members = group(made, 3)
    pair = Pair()
    pair.run(members)
    for each in members:
        assert pair.decode.tokens[each.request_id] == alone(each)
    copies = [copy for plan in pair.decode.plans for copy in plan.copies]
    assert len(copies) == (2 if length % 16 else 0)
    assert pair.decode.scheduler.statistics().imported_blocks == -(-length // 16)
    pair.nothing_is_held()


@pytest.mark.parametrize("count", [1, 3])
def test_log_probabilities(count: int) -> None:
    options = LogprobOptions(
        prompt=True, prompt_start=3, prompt_candidates=TopN(2), output=True, output_candidates=GivenIds((4, 90))
    )
    made = dataclasses.replace(mixed("a", 2, pictures=2, sampling=SAMPLINGS["seeded"]), logprobs=options)
    members = group(made, count)
    pair = Pair(p_max_batched_tokens=32)
    heard: dict[str, list[float]] = {}
    whole = Bench()
    whole.scheduler.add(members)
    whole.run()
    for each in pair.compute(members):
        first = each.resume.logprob
        heard[each.request_id] = [first.logprob, *first.candidates.logprobs.tolist()]
        assert len(first.candidates.token_ids) == 2
    pair.decode.scheduler.add(pair.resumed(members))
    pair.settle()
    for each in members:
        name = each.request_id
        mine, theirs = pair.decode.logprobs[name], whole.logprobs[name]
        assert [one.logprob for one in mine] == pytest.approx([one.logprob for one in theirs[1:]], abs=1e-4)
        assert heard[name] == pytest.approx([theirs[0].logprob, *theirs[0].candidates.logprobs.tolist()], abs=1e-4)
    ours, theirs = pair.prefill.prompts["a"], whole.prompts["a"]
    assert [one and one.logprob for one in ours.logprobs] == pytest.approx(
        [one and one.logprob for one in theirs.logprobs]
    )


@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["seeded"], SAMPLINGS["penalties"]], ids=str)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_grammar_is_followed_on_both(sampling: Sampling, length: int) -> None:
    made = guided("r", EvenGrammar(length), sampling=sampling)
    pair = Pair()
    tokens = pair.run([made])["r"]
    assert tokens == alone(guided("r", EvenGrammar(length), sampling=sampling))
    assert len(tokens) == length
    end = pair.decode.ends["r"]
    assert (end.reason, end.stop) == (FinishReason.STOP, EosToken(EOS))
    assert made.grammar.matchers[1].tokens == [*tokens, EOS]  # the second engine's was told of the first token


@pytest.mark.parametrize("place", ["matcher", "allowed", "accept"])
def test_a_grammar_that_fails_on_the_second_engine_fails_its_own_request(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair()
    (bad,) = pair.compute([guided("bad", EvenGrammar(6))])
    (good,) = pair.compute([guided("good", EvenGrammar(6), first=11)])
    broken = EvenGrammar(6, trouble={place: InvalidRequest("the grammar takes too long")})
    pair.decode.scheduler.add([dataclasses.replace(bad, grammar=broken)])
    pair.decode.scheduler.add([good])
    with caplog.at_level(logging.CRITICAL):
        pair.settle()
    assert isinstance(pair.decode.ends["bad"], Failed)
    assert "takes too long" in str(pair.decode.ends["bad"].error)
    assert len(pair.decode.tokens["good"]) == 6
    pair.nothing_is_held()


def test_a_first_token_that_the_grammar_does_not_allow_fails_its_request(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    (made,) = pair.compute([guided("r", EvenGrammar(6))])
    forged = dataclasses.replace(made, resume=dataclasses.replace(made.resume, token_id=7))
    pair.decode.scheduler.add([forged])
    with caplog.at_level(logging.CRITICAL):
        pair.settle()
    assert isinstance(pair.decode.ends["r"], Failed)
    pair.nothing_is_held()


@pytest.mark.parametrize("tokens", [1, 2])
def test_short_answers(tokens: int) -> None:
    made = dataclasses.replace(mixed("a", 1, pictures=1), stopping=Stopping(max_tokens=tokens, ignore_eos=True))
    pair = Pair()
    assert pair.run([made])["a"] == alone(made)
    end = pair.decode.ends["a"]
    assert (end.reason, end.usage.completion_tokens) == (FinishReason.LENGTH, tokens)
    assert pair.decode.scheduler.statistics().imported_blocks == (0 if tokens == 1 else -(-len(made.plan) // 16))
    pair.nothing_is_held()


@pytest.mark.parametrize("kind", ["eos", "stop", "included stop", "too early"])
def test_a_first_token_that_could_end_the_answer(kind: str) -> None:
    plain = mixed("a", 1, pictures=1)
    token = alone(plain)[0]
    made = {
        "eos": dataclasses.replace(plain, stopping=Stopping(max_tokens=9), eos_token_ids=frozenset({token})),
        "stop": dataclasses.replace(plain, stopping=Stopping(max_tokens=9, stop_token_ids=(token,))),
        "included stop": dataclasses.replace(
            plain, stopping=Stopping(max_tokens=9, stop_token_ids=(token,), include_stop_in_output=True)
        ),
        "too early": dataclasses.replace(
            plain, stopping=Stopping(max_tokens=9, min_tokens=3, stop_token_ids=(token,)), eos_token_ids=frozenset()
        ),
    }[kind]
    whole = Bench()
    whole.run([made])
    pair = Pair()
    pair.run([made])
    ours, theirs = pair.decode.ends["a"], whole.ends["a"]
    assert isinstance(ours, Finished)
    assert (ours.reason, ours.stop, ours.usage) == (theirs.reason, theirs.stop, theirs.usage)
    assert pair.decode.tokens.get("a", []) == whole.tokens.get("a", [])


def test_adapters_and_salts_name_blocks_on_both() -> None:
    adapter = FakeAdapter(AdapterInfo(3, "poet", "/adapters"))
    plain = mixed("plain", 5, pictures=0)
    made = [
        plain,
        dataclasses.replace(plain, request_id="poet", adapter=adapter),
        dataclasses.replace(plain, request_id="salt", cache=CacheOptions(salt="tenant")),
        dataclasses.replace(plain, request_id="bypass", cache=CacheOptions(bypass_prefix_cache=True)),
        dataclasses.replace(plain, request_id="again"),
    ]
    pair = Pair()
    for each in made:
        pair.run([each])
        assert pair.decode.tokens[each.request_id] == alone(each)
    moved = [len(load.moves) for plan in pair.decode.plans for load in plan.loads]
    blocks = -(-len(plain.plan) // 16)
    assert moved == [blocks, blocks, blocks, blocks, blocks - len(plain.plan) // 16]


def test_many_at_once_in_a_small_pool_wait_for_nothing_and_are_right() -> None:
    made = [mixed(f"r{seed}", seed, pictures=0) for seed in range(10)]
    pair = Pair(block_size=2, d_num_blocks=150, p_num_blocks=4000)
    for each in [pair.compute([each]) for each in made]:
        pair.decode.scheduler.add(each)
    pair.settle()
    assert pair.decode.scheduler.statistics().preemptions > 0
    for each in made:
        end = pair.decode.ends[each.request_id]
        if isinstance(end, Finished):
            assert pair.decode.tokens[each.request_id] == alone(each)
        else:
            assert each.request_id not in pair.decode.admitted
    assert len(pair.decode.admitted) >= 3
    for name in set(pair.prefill.ends) - set(pair.decode.admitted):
        pair.prefill.scheduler.withdraw(f"session of {name}")
    pair.settle()
    pair.nothing_is_held()


# -- what goes wrong ----------------------------------------------------------------------------------


def test_a_session_is_taken_once() -> None:
    pair = Pair()
    made = mixed("a", 1, pictures=1)
    resumed = pair.compute([made])
    pair.decode.scheduler.add(resumed)
    pair.decode.scheduler.add([dataclasses.replace(resumed[0], request_id="thief")])
    pair.settle()
    ends = [pair.decode.ends[name] for name in ("a", "thief")]
    assert sorted(type(end) is Failed for end in ends) == [False, True]
    (failed,) = [end for end in ends if isinstance(end, Failed)]
    assert isinstance(failed.error, KvSessionNotFound)
    pair.nothing_is_held()


def test_a_session_that_was_withdrawn_is_gone_and_its_blocks_are_free() -> None:
    pair = Pair()
    resumed = pair.compute([mixed("a", 1, pictures=1)])
    assert pair.prefill.scheduler.load().used_blocks > 0
    pair.prefill.scheduler.withdraw("session of a")
    pair.prefill.settle()
    assert pair.prefill.scheduler.load().used_blocks == 0
    pair.decode.scheduler.add(resumed)
    pair.settle()
    assert isinstance(pair.decode.ends["a"].error, KvSessionNotFound)
    assert pair.decode.tokens == {}
    pair.nothing_is_held()


def test_blocks_that_were_given_away_too_early_are_noticed() -> None:
    pair = Pair(num_blocks=8)
    resumed = pair.compute([mixed("a", 1, pictures=0)])
    pair.prefill.scheduler.release("session of a")  # as no transport would
    pair.prefill.run([request("b", [11] * 100, stopping=Stopping(max_tokens=1), eos=())])
    pair.decode.scheduler.add(resumed)
    pair.settle()
    assert isinstance(pair.decode.ends["a"].error, KvSessionNotFound)
    assert "given to other content" in str(pair.decode.ends["a"].error)


def test_a_load_that_breaks_leaves_only_numbers_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(num_blocks=8)
    resumed = pair.compute([mixed("a", 1, pictures=0)])

    def broken(handle: object, moves: list, seconds: float, done: object) -> object:
        for move in moves:
            pair.decode.kv.storage[move.target] = float("nan")
        done(FetchResult(FetchOutcome.FAILED, "the wire broke"))
        return None

    monkeypatch.setattr(pair.decode.fetcher, "fetch", broken)
    pair.decode.scheduler.add(resumed)
    pair.decode.settle()
    assert str(pair.decode.ends["a"].error) == "the wire broke"
    assert torch.isfinite(pair.decode.kv.storage).all()


@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("aborted", ["never", "while it loads", "before its first step"])
def test_numbers_that_are_not_finite_harm_only_who_asked_for_them(tokens: int, aborted: str) -> None:
    pair = Pair(num_blocks=8)
    made = dataclasses.replace(mixed("a", 1, pictures=0), stopping=Stopping(max_tokens=tokens, ignore_eos=True))
    resumed = pair.compute([made])
    pair.prefill.kv.storage[:] = float("nan")
    pair.decode.scheduler.add(resumed)
    pair.decode.step()
    if aborted == "before its first step":
        pair.decode.hear(pair.decode.scheduler.loaded(*pair.decode.loaded.pop(), 0.0))
    if aborted != "never":
        pair.decode.scheduler.abort("a", 0.0)
    pair.settle()
    if aborted == "never":
        assert "not finite" in str(pair.decode.ends["a"].error)
    assert torch.isfinite(pair.decode.kv.storage).all()
    again = dataclasses.replace(made, request_id="again")
    assert pair.decode.run([again])["again"] == alone(again)
    assert pair.decode.ends["again"].usage.cached_prompt_tokens == 0


def test_a_transport_that_takes_no_more_fails_the_prompt_that_it_was_to_take() -> None:
    pair = Pair()
    pair.prefill.publisher.close()
    made = mixed("a", 1, pictures=0)
    pair.prefill.scheduler.add(exported([made]))
    pair.prefill.scheduler.add([dataclasses.replace(made, request_id="plain")])
    pair.prefill.settle()
    assert "closed" in str(pair.prefill.ends["a"].error)
    assert pair.prefill.tokens["plain"] == alone(made)
    pair.nothing_is_held()


@pytest.mark.parametrize("chunk", [32, 512])
def test_a_transport_that_breaks_fails_the_prompt_and_is_told_to_forget_it(
    chunk: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(p_max_batched_tokens=chunk)

    def broken(session_id: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(pair.prefill.publisher, "seal", broken)
    pair.prefill.scheduler.add(exported([mixed("a", 3, pictures=1)]))
    with caplog.at_level(logging.CRITICAL):
        pair.prefill.settle()
    end = pair.prefill.ends["a"]
    assert isinstance(end, Failed)
    assert isinstance(end.error, Internal)
    assert "space" not in str(end.error)
    pair.nothing_is_held()


# -- refusals -----------------------------------------------------------------------------------------


def test_without_a_transport_there_is_nothing_to_hand_over_or_to_take() -> None:
    made = mixed("a", 1, pictures=0)
    resumed = Pair().compute([made])
    plain = Bench().runner
    for each in (*exported([made]), *resumed):
        with pytest.raises(UnsupportedFeature, match="started without a KV transport"):
            plain.check(each)
    plain.check(made)


def test_blocks_of_another_shape_are_refused() -> None:
    resumed = Pair(block_size=8).compute([mixed("a", 1, pictures=0)])
    with pytest.raises(SessionMismatch, match=r"differ from this engine's: block_size: 16 against 8"):
        Pair().decode.runner.check(resumed[0])


def test_a_handle_of_another_transport_is_refused() -> None:
    pair = Pair()
    (made,) = pair.compute([mixed("a", 1, pictures=0)])
    handle = dataclasses.replace(made.resume.handle, backend="pigeons")
    with pytest.raises(InvalidRequest, match="pigeons"):
        pair.decode.runner.check(dataclasses.replace(made, resume=dataclasses.replace(made.resume, handle=handle)))


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31])
def test_a_first_token_outside_the_vocabulary_is_refused(token: int) -> None:
    pair = Pair()
    (made,) = pair.compute([mixed("a", 1, pictures=0)])
    with pytest.raises(InvalidRequest, match=f"first token: token id {token} "):
        pair.decode.runner.check(dataclasses.replace(made, resume=dataclasses.replace(made.resume, token_id=token)))
