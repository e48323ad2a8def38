"""The answer of a request does not depend on how it was scheduled."""

from __future__ import annotations

import random

import pytest

from tests.engine.fakes import HashModel, UniformModel, spec
from tests.engine.setup import Bench, alone
from tests.requests import item, request
from triptych.core.request import CacheOptions, Sampling, Stopping

STOPPING = Stopping(max_tokens=20, ignore_eos=True)


def mixed(name: str, seed: int, *, pictures: int = 2, sampling: Sampling | None = None, tail: int = 30) -> object:
    """A prompt of text and pictures of odd sizes, some in two runs with a framing token."""
    draw = random.Random(seed)
    items, at = [], 0
    for _ in range(pictures):
        at += draw.randint(1, 25)
        rows = draw.randint(3, 40)
        picture = 1000 * rows + draw.randint(1, 4)
        if draw.random() < 0.5:
            items.append(item(picture, (at, 2), (at + 3, rows - 1), framing=(at + 4,)))
        else:
            items.append(item(picture, (at, rows)))
        at = items[-1].end
    length = at + draw.randint(1, tail)
    return request(
        name,
        [10 + draw.randint(0, 80) for _ in range(length)],
        items,
        stopping=STOPPING,
        sampling=sampling,
        delta=-draw.randint(0, 9),
    )


REQUESTS = [mixed(f"r{seed}", seed, pictures=seed % 4) for seed in range(16)]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return {each.request_id: alone(each) for each in REQUESTS}


def test_answers_differ_when_pictures_do(expected: dict[str, list[int]]) -> None:
    assert len({tuple(tokens) for tokens in expected.values()}) == len(REQUESTS)
    one, two = (request("r", [10] * 20, [item(picture, (3, 8))], stopping=STOPPING) for picture in (1, 2))
    assert alone(one) != alone(two)


@pytest.mark.parametrize("chunk", [16, 17, 31, 48, 64, 100, 512])
def test_chunk_sizes(chunk: int, expected: dict[str, list[int]]) -> None:
    assert Bench(max_batched_tokens=chunk).run(REQUESTS) == expected


@pytest.mark.parametrize("chunk", [1, 5])
def test_tiny_chunks_alone(chunk: int, expected: dict[str, list[int]]) -> None:
    for each in REQUESTS[:4]:
        assert alone(each, max_batched_tokens=chunk) == expected[each.request_id]


@pytest.mark.parametrize("size", [1, 3, 16, 64])
def test_block_sizes(size: int, expected: dict[str, list[int]]) -> None:
    assert Bench(block_size=size, num_blocks=4096 // size).run(REQUESTS) == expected


def test_preemption(expected: dict[str, list[int]]) -> None:
    bench = Bench(block_size=2, num_blocks=110, max_batched_tokens=64)
    assert bench.run(REQUESTS) == expected
    assert bench.scheduler.statistics().preemptions > 0


def test_encoder_evictions_and_tight_budgets(expected: dict[str, list[int]]) -> None:
    bench = Bench(
        encoder_cache_bytes=41 * spec().row_width * 4, encoder_items=1, encoder_tokens=64, max_batched_tokens=40
    )
    assert bench.run(REQUESTS) == expected
    assert bench.scheduler.statistics().encoder_cache.evictions > 5


@pytest.mark.parametrize("chunk", [16, 37, 512])
def test_prefix_hits_at_every_block_offset(chunk: int) -> None:
    size = 8
    target = mixed("target", 3, pictures=3)
    answer = alone(target)
    ids = target.plan.token_ids
    offsets = range(size, len(ids), size)
    for at in offsets:
        bench = Bench(block_size=size, max_batched_tokens=chunk)
        # a prompt with the same first ``at`` tokens and the items that lie in them leaves its blocks behind
        kept = [layout for layout in target.plan.items if layout.end <= at]
        cut = any(layout.start < at < layout.end for layout in target.plan.items)
        before = request("before", [*ids[:at].tolist(), 99 - 3], kept, stopping=Stopping(max_tokens=1))
        bench.run([before])
        assert bench.run([target])["target"] == answer
        cached = bench.ends["target"].usage.cached_prompt_tokens
        assert cached <= at if cut else cached == at // size * size


@pytest.mark.parametrize("size", [4, 16])
def test_hits_that_end_inside_a_picture(size: int) -> None:
    picture = item(7, (6, 40))
    target = request("target", [10] * 60, [picture], stopping=STOPPING)
    answer = alone(target)
    for chunk in range(7, 50, 3):
        bench = Bench(block_size=size, max_batched_tokens=chunk)
        started = request("started", [10] * 60, [picture], stopping=STOPPING)
        bench.scheduler.add([started])
        bench.step()  # computes one chunk, which ends inside the picture
        bench.scheduler.abort("started", 0.0)
        assert bench.run([target])["target"] == answer
        assert bench.ends["target"].usage.cached_prompt_tokens == chunk // size * size


def test_the_same_prompt_again_and_again(expected: dict[str, list[int]]) -> None:
    bench = Bench(max_batched_tokens=64)
    for each in (*REQUESTS[:6], *REQUESTS[:6]):
        bench.tokens.pop(each.request_id, None)
        assert bench.run([each])[each.request_id] == expected[each.request_id]
    usage = bench.ends["r5"].usage
    assert usage.cached_prompt_tokens == (usage.prompt_tokens - 1) // 16 * 16


def test_bypass(expected: dict[str, list[int]]) -> None:
    import dataclasses

    bench = Bench()
    bench.run(REQUESTS[:3])
    again = [dataclasses.replace(each, cache=CacheOptions(bypass_prefix_cache=True)) for each in REQUESTS[:3]]
    bench.tokens.clear()
    assert bench.run(again) == {name: expected[name] for name in ("r0", "r1", "r2")}


def test_random_arrivals_and_aborts(expected: dict[str, list[int]]) -> None:
    draw = random.Random(5)
    bench = Bench(num_blocks=40, max_batched_tokens=48, encoder_cache_bytes=60 * spec().row_width * 4)
    left = list(REQUESTS)
    aborted = set()
    while left or bench.scheduler.busy:
        if left and draw.random() < 0.4:
            bench.scheduler.add([left.pop()])
        if draw.random() < 0.2:
            victim = f"r{draw.randrange(16)}"
            if bench.scheduler.abort(victim, 0.0):
                aborted.add(victim)
        if bench.scheduler.busy:
            bench.step()
    assert len(aborted) >= 3
    for name, tokens in bench.tokens.items():
        assert tokens == expected[name] if name not in aborted else tokens == expected[name][: len(tokens)]


# -- sampling -------------------------------------------------------------------------------------


def seeded(name: str, seed: int, **options: object) -> object:
    return mixed(name, seed, pictures=seed % 3, sampling=Sampling(seed=seed, temperature=1.5, **options))


@pytest.mark.parametrize("model", [HashModel, UniformModel])
def test_seeds_give_the_same_tokens_alone_in_company_and_after_preemption(model: type) -> None:
    made = [
        *(seeded(f"p{n}", n) for n in range(4)),
        *(seeded(f"k{n}", n, top_k=9, top_p=0.9) for n in range(4)),
        *(seeded(f"n{n}", n, min_p=0.1, repetition_penalty=1.2, frequency_penalty=0.5) for n in range(4)),
        *(mixed(f"g{n}", n, pictures=1) for n in range(4)),
    ]
    expected = {each.request_id: alone(each, model()) for each in made}
    assert Bench(model()).run(made) == expected
    bench = Bench(model(), block_size=2, num_blocks=110, max_batched_tokens=50)
    assert bench.run(reversed(made)) == expected
    assert bench.scheduler.statistics().preemptions > 0


def test_an_answer_continued_elsewhere_goes_on_as_it_would_have() -> None:
    first = request("r", [10, 11, 12, 13], sampling=Sampling(seed=3), stopping=STOPPING)
    whole = alone(first, UniformModel())
    prompt = [10, 11, 12, 13, *whole[:7]]
    rest = request("r", prompt, sampling=Sampling(seed=3), stopping=Stopping(max_tokens=13, ignore_eos=True))
    assert alone(rest, UniformModel()) == whole[7:]


def test_other_seeds_give_other_tokens() -> None:
    answers = {
        tuple(alone(request("r", [10], sampling=Sampling(seed=s), stopping=STOPPING), UniformModel())) for s in range(8)
    }
    assert len(answers) == 8
