"""A random Qwen3-VL checkpoint: an item that was encoded elsewhere gives the tokens that its pixels give."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.checkpoints import tokenise
from tests.engine.encode_setup import Consumer, Producer
from tests.engine.encoded import as_bytes, came_encoded
from tests.engine.test_engine_model import bench, make
from triptych.core.encoder_input import EncodedInput
from triptych.core.request import EncodeRequest
from triptych.engine.runner import Runner
from triptych.models.contract import Model, TowerModel
from triptych.models.registry import load_model
from triptych.processors.registry import load_processor
from triptych.transport.memory import MemoryExchange

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine.setup import Bench
    from triptych.core.request import Request


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Model:
    return load_model(checkpoint("vl-deepstack"), dtype="float32")


@pytest.fixture(scope="module")
def requests(checkpoint: Callable[[str], Path]) -> list[Request]:
    processor = load_processor(checkpoint("vl-deepstack"), tokenise)
    return [make(processor, f"r{number}", number) for number in range(8)]


@pytest.fixture(scope="module")
def expected(model: Model, requests: list[Request]) -> dict[str, list[int]]:
    """Each request alone in a fresh engine, with its pixels, its prompt in one piece."""
    return {each.request_id: bench(model).run([each])[each.request_id] for each in requests}


@pytest.fixture(scope="module")
def encoded(model: Model, requests: list[Request]) -> list[Request]:
    return [came_encoded(each, model.tower) for each in requests]


def consumer(model: Model, **changes: int) -> Bench:
    """An engine without a tower."""
    made = bench(model, **changes)
    made.runner = Runner(Model(model.text, None), made.kv, made.config)
    return made


@pytest.mark.parametrize("chunk", [16, 512])
def test_chunks_in_a_batch(chunk: int, model: Model, encoded: list[Request], expected: dict[str, list[int]]) -> None:
    assert consumer(model, max_batched_tokens=chunk).run(encoded) == expected


def test_preemption(model: Model, encoded: list[Request], expected: dict[str, list[int]]) -> None:
    tight = consumer(model, block_size=2, num_blocks=130, max_batched_tokens=96)
    assert tight.run(encoded) == expected
    assert tight.scheduler.statistics().preemptions > 0


def test_a_prefix_hit_on_pixels(
    model: Model, requests: list[Request], encoded: list[Request], expected: dict[str, list[int]]
) -> None:
    engine = bench(model)
    engine.run([requests[3]])
    again = replace(encoded[3], request_id="again")
    assert engine.run([again])["again"] == expected["r3"]
    assert engine.ends["again"].usage.cached_prompt_tokens == (len(again.plan) - 1) // 16 * 16
    assert engine.scheduler.statistics().imported_items == 0
    bypass = replace(encoded[3], request_id="bypass", cache=replace(encoded[3].cache, bypass_prefix_cache=True))
    assert engine.run([bypass])["bypass"] == expected["r3"]
    assert engine.scheduler.statistics().imported_items == 0  # the rows of the pixels are cached, too


def test_from_one_engines_tower_to_another_engines_prompt(
    model: Model, requests: list[Request], expected: dict[str, list[int]]
) -> None:
    """Through an encoder engine and the memory that others read, the items of different prompts in one batch."""
    spec = model.text.spec.rows
    free: list[str] = []
    exchange = MemoryExchange()
    tower = TowerModel(model.tower, spec)
    producer = Producer(exchange, lambda session_id, event: free.append(session_id), tower, blocks=60_000)
    fetch = Consumer(exchange, 60_000, spec)
    for each in requests[1:4]:
        producer.scheduler.add([encode_request(each, index) for index in range(len(each.inputs))])
    plan = producer.scheduler.plan(0.0)
    assert sum(step.encodes for step in plan.items) == 6
    ends = {end.request_id: end for end in producer.scheduler.apply(producer.runner.run(plan), 0.0)}
    taken = []
    for each in requests[1:4]:
        inputs = []
        for index, given in enumerate(each.inputs):
            rows = fetch.take(ends[f"{each.request_id} {index}"].handle, given.layout.rows)
            inputs.append(EncodedInput(given.layout, as_bytes(rows)))
        taken.append(replace(each, inputs=tuple(inputs)))
    assert consumer(model).run(taken) == {f"r{number}": expected[f"r{number}"] for number in (1, 2, 3)}


def encode_request(made: Request, index: int) -> EncodeRequest:
    given = made.inputs[index]
    return EncodeRequest(f"{made.request_id} {index}", given.layout, given, f"s {made.request_id} {index}", 0.0)
