"""Log probabilities of prompts and answers against transformers, in float32, through the whole engine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch

from tests.engine.fidelity import Pair, Prompt
from tests.engine.setup import Bench
from triptych.core.logprobs import Candidates, GivenIds, LogprobOptions, TokenLogprob, TopN, WholeVocabulary
from triptych.core.request import CacheOptions, Request, Sampling, Stopping

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CLOSE = 1e-4
ANSWER = 6
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Pair:
    return Pair(checkpoint(request.param))


def bench(pair: Pair, chunk: int) -> Bench:
    return Bench(pair.ours.text, pair.ours.tower, encoder_cache_bytes=1 << 24, max_batched_tokens=chunk)


def keyed(prompt: Prompt, number: int) -> Prompt:
    """With its own content keys: the prompts of a pair number their pictures alike."""
    layouts = tuple(
        dataclasses.replace(layout, content_key=bytes([number, index]) * 16)
        for index, layout in enumerate(prompt.plan.items)
    )
    inputs = tuple(
        dataclasses.replace(each, layout=layout) for each, layout in zip(prompt.inputs, layouts, strict=True)
    )
    return dataclasses.replace(prompt, plan=dataclasses.replace(prompt.plan, items=layouts), inputs=inputs)


def asking(name: str, prompt: Prompt, options: LogprobOptions, sampling: Sampling = GREEDY) -> Request:
    return Request(
        request_id=name,
        plan=prompt.plan,
        positions=prompt.positions,
        inputs=prompt.inputs,
        sampling=sampling,
        stopping=Stopping(max_tokens=ANSWER, ignore_eos=True),
        eos_token_ids=frozenset(),
        cache=CacheOptions(),
        arrival=0.0,
        logprobs=options,
    )


def compare(found: list[TokenLogprob], tokens: list[int], logits: torch.Tensor, selection: Candidates | None) -> None:
    """``logits`` [places, vocab] of transformers before each token."""
    assert len(found) == len(tokens) == len(logits)
    expected = logits.double().log_softmax(dim=1)
    for each, token, row, raw in zip(found, tokens, expected, logits, strict=True):
        assert each.logprob == pytest.approx(row[token].item(), abs=CLOSE)
        agree(each.rank, token, raw)
        if selection is None:
            assert each.candidates is None
            continue
        ids = torch.tensor(each.candidates.token_ids.tolist())
        torch.testing.assert_close(torch.from_numpy(each.candidates.logprobs).double(), row[ids], rtol=0.0, atol=CLOSE)
        for other, rank in zip(ids.tolist(), each.candidates.ranks.tolist(), strict=True):
            agree(rank, other, raw)
        match selection:
            case TopN(count):
                torch.testing.assert_close(row[ids], row.topk(count).values, rtol=0.0, atol=CLOSE)
            case GivenIds(token_ids):
                assert ids.tolist() == list(token_ids)
            case _:
                assert ids.tolist() == list(range(len(row)))


def agree(rank: int, token: int, logits: torch.Tensor) -> None:
    """Logits that are nearly equal may stand in either order."""
    nearest = (logits > logits[token] + CLOSE).sum().item()
    farthest = (logits > logits[token] - CLOSE).sum().item()
    assert nearest < rank <= farthest


@pytest.mark.parametrize("chunk", [16, 23, 64, 512])
@pytest.mark.parametrize("pair", ["vl-deepstack", "vl-plain", "qwen3", "llama"], indirect=True)
def test_prompt_and_answer(pair: Pair, chunk: int) -> None:
    prompt = pair.prompt(seed=chunk, pictures=2 if pair.ours.tower else 0, longest_text=90)
    options = LogprobOptions(prompt=True, prompt_candidates=TopN(5), output=True, output_candidates=TopN(5))
    engine = bench(pair, chunk)
    tokens = engine.run([asking("r", prompt, options)])["r"]
    logits = pair.reference_logits(prompt, tokens)
    length = len(prompt.plan)
    compare(engine.prompt_logprobs["r"], prompt.plan.token_ids[1:].tolist(), logits[: length - 1], TopN(5))
    compare(engine.logprobs["r"], tokens, logits[length - 1 : -1], TopN(5))


@pytest.mark.parametrize("chunk", [31, 512])
@pytest.mark.parametrize("pair", ["vl-deepstack", "qwen2"], indirect=True)
def test_a_mixed_batch_in_which_some_ask(pair: Pair, chunk: int) -> None:
    ids = GivenIds((3, 700, 41))
    asked = [
        LogprobOptions(),
        LogprobOptions(prompt=True, prompt_start=4, prompt_candidates=ids),
        LogprobOptions(output=True, output_candidates=WholeVocabulary()),
        LogprobOptions(),
        LogprobOptions(prompt=True, output=True, output_candidates=TopN(20)),
        LogprobOptions(prompt=True, prompt_candidates=WholeVocabulary(), output=True),
    ]
    prompts = [keyed(pair.prompt(seed=20 + n, pictures=n % 3 if pair.ours.tower else 0), n) for n in range(6)]
    samplings = [GREEDY, Sampling(seed=1, temperature=2), Sampling(seed=2, top_p=0.8, repetition_penalty=1.5)] * 2
    requests = [
        asking(f"r{n}", prompt, options, sampling)
        for n, (prompt, options, sampling) in enumerate(zip(prompts, asked, samplings, strict=True))
    ]
    engine = bench(pair, chunk)
    engine.run(requests)
    for each, prompt in zip(requests, prompts, strict=True):
        options, name, length = each.logprobs, each.request_id, len(prompt.plan)
        tokens = engine.tokens[name]
        logits = pair.reference_logits(prompt, tokens)
        start = max(options.prompt_start, 1)
        if options.prompt:
            rows = logits[start - 1 : length - 1]
            ids_after = prompt.plan.token_ids[start:].tolist()
            compare(engine.prompt_logprobs[name], ids_after, rows, options.prompt_candidates)
        else:
            assert name not in engine.prompt_logprobs
        if options.output:
            compare(engine.logprobs[name], tokens, logits[length - 1 : -1], options.output_candidates)
        else:
            assert name not in engine.logprobs
    # and those who do not ask get the tokens that they get when nobody does
    quiet = bench(pair, chunk)
    quiet.run([dataclasses.replace(each, logprobs=LogprobOptions()) for each in requests])
    assert quiet.tokens == engine.tokens
