"""Videos in the engine: an item whose rows stand in runs apart, with text between them, wherever a step cuts it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.checkpoints import write_checkpoint
from tests.engine.encoded import came_encoded
from tests.engine.fidelity import Pair
from tests.engine.handoff import Pair as Engines
from tests.engine.setup import Bench
from triptych.core.encoder_input import EncodedInput
from triptych.core.media import Modality
from triptych.core.request import CacheOptions, Request, Sampling, Stopping
from triptych.engine.runner import Runner
from triptych.models.contract import Model
from triptych.wire.portable_item import PortableItem, decode_item, encode_item
from triptych.wire.portable_plan import decode_plan, encode_plan

if TYPE_CHECKING:
    from tests.engine.fidelity import Prompt

IMAGE, VIDEO = Modality.IMAGE, Modality.VIDEO
ANSWER = 8
"""Tokens."""
MEDIA = (
    ([VIDEO], 24),
    ([IMAGE, VIDEO], 25),
    ([VIDEO, VIDEO], 24),
    ([VIDEO, IMAGE, VIDEO], 26),
    ([VIDEO], 22),
    ([IMAGE], 23),
)
"""With seeds: the first video of two of them is the same one."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(write_checkpoint("vl-shared-kv", tmp_path_factory.mktemp("videos"), videos=True))


@pytest.fixture(scope="module")
def prompts(pair: Pair) -> list[Prompt]:
    return [pair.prompt_of(kinds, seed, longest_text=12) for kinds, seed in MEDIA]


@pytest.fixture(scope="module")
def requests(prompts: list[Prompt]) -> list[Request]:
    return [as_request(f"r{number}", prompt) for number, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(pair: Pair, prompts: list[Prompt]) -> dict[str, list[int]]:
    """What transformers answers."""
    return {f"r{number}": pair.reference_tokens(prompt, ANSWER) for number, prompt in enumerate(prompts)}


def as_request(name: str, prompt: Prompt) -> Request:
    return Request(
        request_id=name,
        plan=prompt.plan,
        positions=prompt.positions,
        inputs=prompt.inputs,
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=ANSWER, ignore_eos=True),
        eos_token_ids=frozenset(),
        cache=CacheOptions(),
        arrival=0.0,
    )


def bench(pair: Pair, **changes: int) -> Bench:
    return Bench(pair.ours.text, pair.ours.tower, **{"encoder_cache_bytes": 1 << 24, **changes})


def test_the_prompts_have_runs_apart_and_answers_of_their_own(
    requests: list[Request], expected: dict[str, list[int]]
) -> None:
    assert [[len(item.runs) for item in each.plan.items] for each in requests] == [
        [4],
        [1, 3],
        [4, 4],
        [3, 1, 4],
        [2],
        [1],
    ]
    assert len({tuple(tokens) for tokens in expected.values()}) == len(requests)


@pytest.mark.parametrize("number", [0, 1])
def test_every_size_of_chunk(number: int, pair: Pair, requests: list[Request], expected: dict[str, list[int]]) -> None:
    each = requests[number]
    for chunk in range(1, len(each.plan) + 2):
        engine = bench(pair, max_batched_tokens=chunk, max_running_requests=1)
        assert engine.run([each])[each.request_id] == expected[each.request_id], chunk
        assert engine.scheduler.statistics().encoded_items == len(each.inputs)  # once, whatever the chunks


@pytest.mark.parametrize("chunk", [16, 23, 64, 512])
def test_chunks_in_a_batch(chunk: int, pair: Pair, requests: list[Request], expected: dict[str, list[int]]) -> None:
    assert bench(pair, max_batched_tokens=chunk).run(requests) == expected


def test_prefix_hits_at_every_block(pair: Pair, requests: list[Request], expected: dict[str, list[int]]) -> None:
    each = requests[2]
    inside = between = 0
    for end in range(4, len(each.plan), 4):
        engine = bench(pair, max_batched_tokens=end, block_size=4)
        engine.scheduler.add([each])
        engine.step()
        engine.scheduler.abort(each.request_id, 0.0)
        engine.tokens.clear()
        assert engine.run([each])[each.request_id] == expected[each.request_id], end
        assert engine.ends[each.request_id].usage.cached_prompt_tokens == end
        within = [item for item in each.plan.items if item.start < end < item.end]
        inside += any(run.start < end < run.end for item in within for run in item.runs)
        between += any(not item.overlaps(end - 1, end + 1) for item in within)
    assert min(inside, between) > 3


def test_a_video_seen_before_is_neither_encoded_nor_prefilled_again(
    pair: Pair, requests: list[Request], expected: dict[str, list[int]]
) -> None:
    engine = bench(pair)
    for _ in range(2):
        engine.tokens.clear()
        assert engine.run([requests[3]])["r3"] == expected["r3"]
    assert engine.scheduler.statistics().encoded_items == 3
    assert engine.ends["r3"].usage.cached_prompt_tokens == (len(requests[3].plan) - 1) // 16 * 16
    bypass = replace(requests[3], request_id="bypass", cache=CacheOptions(bypass_prefix_cache=True))
    assert engine.run([bypass])["bypass"] == expected["r3"]
    assert engine.scheduler.statistics().encoded_items == 3


def test_preemption(pair: Pair, requests: list[Request], expected: dict[str, list[int]]) -> None:
    longest = max(len(each.plan) for each in requests)
    tight = bench(pair, block_size=2, num_blocks=longest // 2 + 20, max_batched_tokens=96)
    assert tight.run(requests) == expected
    assert tight.scheduler.statistics().preemptions > 0


def test_a_cache_with_room_for_one_video(pair: Pair, requests: list[Request], expected: dict[str, list[int]]) -> None:
    spec = pair.ours.text.spec.rows
    most = max(item.rows for each in requests for item in each.plan.items)
    small = bench(pair, encoder_cache_bytes=most * spec.row_bytes, max_batched_tokens=16)
    assert small.run(requests) == expected


def test_encoded_by_another_engine_and_planned_from_layouts(
    pair: Pair, prompts: list[Prompt], requests: list[Request], expected: dict[str, list[int]]
) -> None:
    """Only layouts and rows come; what is written between the runs follows from the times among them."""
    consumer = bench(pair)
    consumer.runner = Runner(Model(pair.ours.text, None), consumer.kv, consumer.config)
    taken = []
    for prompt, each in zip(prompts, requests, strict=True):
        came = [decode_item(encode_item(PortableItem(layout, bytes(32)))).layout for layout in prompt.unplaced]
        plan, placed = pair.processor.plan(
            pair.processor.fold(prompt.plan), [EncodedInput(layout, np.empty((0, 0), np.uint8)) for layout in came]
        )
        assert plan.token_ids.tolist() == prompt.plan.token_ids.tolist()
        assert plan.items == prompt.plan.items
        encoded = came_encoded(each, pair.ours.tower).inputs
        inputs = tuple(replace(one, layout=entry.layout) for one, entry in zip(encoded, placed, strict=True))
        taken.append(replace(each, plan=plan, positions=pair.processor.positions(plan), inputs=inputs))
    assert consumer.run(taken) == expected


def test_decoded_by_another_engine_with_the_plan_that_it_got(
    pair: Pair, requests: list[Request], expected: dict[str, list[int]]
) -> None:
    both = Engines(
        (pair.ours.text, pair.ours.text), pair.ours.tower, encoder_cache_bytes=1 << 24, max_batched_tokens=23
    )
    resumed = []
    for each in requests:
        plan = decode_plan(encode_plan(each.plan) or "")
        assert plan is not None
        assert plan.items == each.plan.items
        (later,) = both.compute([each])
        resumed.append(replace(later, plan=plan, positions=pair.processor.positions(plan)))
    for each in resumed:
        both.decode.scheduler.add([each])
    both.settle()
    assert both.decode.tokens == expected
    both.nothing_is_held()
