"""A random Qwen3-VL checkpoint in the engine: the tokens do not depend on how the requests were scheduled."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from tests.checkpoints import token_ids, tokenise
from tests.engine.setup import Bench
from tests.fitted import encoder_input
from triptych.core.events import Failed
from triptych.core.media import Picture
from triptych.core.request import CacheOptions, Request, Sampling, Stopping
from triptych.engine.sampler import Chooser
from triptych.models.registry import load_model
from triptych.processors.registry import load_processor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from triptych.models.contract import Model
    from triptych.processors.contract import Processor


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Model:
    return load_model(checkpoint("vl-deepstack"), dtype="float32")


@pytest.fixture(scope="module")
def requests(checkpoint: Callable[[str], Path]) -> list[Request]:
    processor = load_processor(checkpoint("vl-deepstack"), tokenise)
    return [make(processor, f"r{number}", number) for number in range(16)]


@pytest.fixture(scope="module")
def expected(model: Model, requests: list[Request]) -> dict[str, list[int]]:
    """Each request alone in a fresh engine, its prompt in one piece."""
    return {each.request_id: bench(model).run([each])[each.request_id] for each in requests}


def bench(model: Model, **changes: int) -> Bench:
    return Bench(model.text, model.tower, **{"encoder_cache_bytes": 1 << 24, **changes})


def make(processor: Processor, name: str, seed: int) -> Request:
    """Zero to three pictures of odd sizes in random text; the first text is the same for all."""
    draw = random.Random(seed)
    special = token_ids()
    plain = [token for token in range(700) if token not in special.values()]
    marker = [special[f"<|{word}|>"] for word in ("vision_start", "image_pad", "vision_end")]
    words = plain[40:80]
    inputs = []
    for index in range(seed % 4):
        words += [*draw.choices(plain, k=draw.randrange(1, 20)), *marker]
        shape = (draw.randrange(40, 200), draw.randrange(40, 200), 3)
        pixels = np.random.default_rng(seed * 10 + index).integers(0, 256, shape, np.uint8)
        inputs.append(encoder_input(processor, index, Picture(pixels), (seed * 10 + index).to_bytes(32, "big")))
    words += draw.choices(plain, k=draw.randrange(1, 30))
    plan, placed = processor.plan(np.array(words, np.int32), inputs)
    return Request(
        request_id=name,
        plan=plan,
        positions=processor.positions(plan),
        inputs=placed,
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=12, ignore_eos=True),
        eos_token_ids=frozenset(),
        cache=CacheOptions(),
        arrival=0.0,
    )


def test_every_prompt_has_its_own_answer(expected: dict[str, list[int]]) -> None:
    assert len({tuple(tokens) for tokens in expected.values()}) == 16


@pytest.mark.parametrize("chunk", [16, 23, 64, 512])
def test_chunks_in_a_batch_of_sixteen(
    chunk: int, model: Model, requests: list[Request], expected: dict[str, list[int]]
) -> None:
    assert bench(model, max_batched_tokens=chunk).run(requests) == expected


def test_preemption(model: Model, requests: list[Request], expected: dict[str, list[int]]) -> None:
    tight = bench(model, block_size=2, num_blocks=130, max_batched_tokens=96)
    assert tight.run(requests) == expected
    assert tight.scheduler.statistics().preemptions > 0


def test_prefix_hits_at_every_block(model: Model, requests: list[Request], expected: dict[str, list[int]]) -> None:
    target = requests[3]
    offsets = range(4, len(target.plan), 4)
    inside = [offset for offset in offsets if any(i.start < offset < i.end for i in target.plan.items)]
    assert len(inside) > 5  # blocks end in the middle of pictures too
    cached = []
    for chunk in offsets:
        engine = bench(model, max_batched_tokens=chunk, block_size=4)
        engine.scheduler.add([target])
        engine.step()
        engine.scheduler.abort(target.request_id, 0.0)
        engine.tokens.clear()
        assert engine.run([target])[target.request_id] == expected[target.request_id]
        cached.append(engine.ends[target.request_id].usage.cached_prompt_tokens)
    assert cached == list(offsets)


def test_a_picture_seen_before_is_neither_encoded_nor_prefilled_again(
    model: Model, requests: list[Request], expected: dict[str, list[int]]
) -> None:
    engine = bench(model)
    for _ in range(2):
        engine.tokens.clear()
        assert engine.run([requests[3]])["r3"] == expected["r3"]
    assert engine.scheduler.statistics().encoded_items == 3
    assert engine.ends["r3"].usage.cached_prompt_tokens == (len(requests[3].plan) - 1) // 16 * 16


def test_the_repetition_penalty_is_that_of_transformers(requests: list[Request]) -> None:
    request = replace(requests[1], sampling=Sampling(temperature=0, repetition_penalty=1.3))
    chooser = Chooser(request, 704)
    generated = [20, 20, 33]
    for token in generated:
        chooser.observe(token)
    logits = torch.randn(1, 704, generator=torch.Generator().manual_seed(0))
    history = torch.tensor([[*request.plan.token_ids.tolist(), *generated]])
    reference = RepetitionPenaltyLogitsProcessor(1.3)(history, logits.clone())
    chooser.adjust(logits[0], history.shape[1])
    torch.testing.assert_close(logits, reference)


def test_broken_numbers_of_one_request_do_not_reach_those_it_is_computed_with(
    model: Model, requests: list[Request], expected: dict[str, list[int]]
) -> None:
    some = bench(model, max_batched_tokens=512)
    for each in requests[:6]:
        some.scheduler.add([each])
    while len(some.tokens) < 6:
        some.step()
    # "r0" came first and has block 0; the tables of the others differ in length and stand beside each other
    assert 0 in some.runner._builder.blocks("r0")
    some.kv.storage[some.runner._builder.blocks("r0")] = float("nan")
    some.run()
    assert isinstance(some.ends["r0"], Failed)
    for each in requests[1:6]:
        assert some.tokens[each.request_id] == expected[each.request_id]
