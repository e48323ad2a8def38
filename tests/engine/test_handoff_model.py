"""A random Qwen3-VL checkpoint on two engines: one sees the pictures, the other goes on from its KV."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.checkpoints import tokenise
from tests.engine.handoff import Pair
from tests.engine.test_engine_model import bench, make
from tests.requests import group
from triptych.core.logprobs import LogprobOptions, TopN
from triptych.core.request import Sampling
from triptych.models.registry import load_model
from triptych.processors.registry import load_processor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from triptych.core.request import Request
    from triptych.models.contract import Model


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(checkpoint: Callable[[str], Path], request: pytest.FixtureRequest) -> Model:
    return load_model(checkpoint("vl-deepstack"), dtype=request.param)


@pytest.fixture(scope="module")
def exact(checkpoint: Callable[[str], Path]) -> Model:
    """In half precision the shape of a batch shows in the last bits."""
    return load_model(checkpoint("vl-deepstack"), dtype="float32")


@pytest.fixture(scope="module")
def requests(checkpoint: Callable[[str], Path]) -> list[Request]:
    processor = load_processor(checkpoint("vl-deepstack"), tokenise)
    return [make(processor, f"r{number}", number) for number in range(8)]


def pair(model: Model, **changes: int) -> Pair:
    return Pair((model.text, model.text), model.tower, encoder_cache_bytes=1 << 24, **changes)


@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_tokens_are_those_of_one_engine(chunk: int, name: str, model: Model, requests: list[Request]) -> None:
    sampling = {"greedy": Sampling(temperature=0), "seeded": Sampling(seed=5, temperature=1.5, top_p=0.95)}[name]
    both = pair(model, max_batched_tokens=chunk)
    for each in requests:  # one at a time, for half precision's sake
        made = replace(each, sampling=sampling)
        assert both.run([made])[made.request_id] == bench(model, max_batched_tokens=chunk).run([made])[made.request_id]
    assert both.decode.tower.calls == []
    both.nothing_is_held()


def test_outputs_and_their_log_probabilities_are_those_of_one_engine(exact: Model, requests: list[Request]) -> None:
    options = LogprobOptions(output=True, output_candidates=TopN(3))
    for each in requests[:4]:
        members = group(replace(each, sampling=Sampling(seed=9, temperature=1.2), logprobs=options), 3)
        whole = bench(exact)
        whole.scheduler.add(members)
        whole.run()
        both = pair(exact)
        both.run(members)
        for member in members:
            name = member.request_id
            assert both.decode.tokens[name] == whole.tokens[name]
            ours = [both.prefill.ends[name].first.logprob, *both.decode.logprobs[name]]
            for one, two in zip(ours, whole.logprobs[name], strict=True):
                assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
                assert one.candidates.logprobs.tolist() == pytest.approx(two.candidates.logprobs.tolist(), abs=1e-4)
        both.nothing_is_held()


def test_a_prompt_without_its_pictures_is_decoded_beside_others(exact: Model, requests: list[Request]) -> None:
    both = pair(exact, max_batched_tokens=64)
    tokens = both.run(*([each] for each in requests))
    assert tokens == {each.request_id: bench(exact).run([each])[each.request_id] for each in requests}
    both.nothing_is_held()
