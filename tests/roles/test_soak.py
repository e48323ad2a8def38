"""Thousands of mixed requests with random cancels: every answer is the one given alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from tests.drawings import shape_png
from tests.roles.running import ask, ask_all, load_model, options, running
from triptych.cli.engine import Stop, stopped_or_failed
from triptych.core.errors import IntegrityError
from triptych.core.events import Finished, FinishReason, Tokens
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import CacheOptions, GenerateRequest, Sampling, Stopping
from triptych.engine.scheduler import Scheduler
from triptych.roles.contract import HealthState

if TYPE_CHECKING:
    from triptych.roles.desk import Desk

MARKER = "<|vision_start|><|image_pad|><|vision_end|>"
QUESTIONS = (
    "what colour is the circle?",
    "what shape is this?",
    "how many shapes are there?",
    "is there a red square?",
    "what colour is the shape in the second picture?",
    "which digit is this?",
    "describe the picture.",
    "hello",
)


def distinct_requests(count: int, rng: random.Random) -> list[GenerateRequest]:
    """Different prompts, pictures, sampling, stopping and numbers of outputs; a fixed seed each."""
    pictures = [
        shape_png(shape, colour, size)
        for shape in ("circle", "square", "triangle")
        for colour in ("red", "blue", "green", "orange")
        for size in (64, 97, 150)
    ]
    requests = []
    for index in range(count):
        chosen = rng.sample(pictures, rng.choice((0, 1, 1, 1, 2, 3)))
        turns = rng.choice((1, 1, 2, 4))
        question = " ".join(rng.choice(QUESTIONS) for _ in range(turns))
        sampling = Sampling(temperature=rng.choice((0, 0, 1.3, 4)), top_p=rng.choice((1, 0.9)), seed=index)
        stopping = Stopping(
            max_tokens=rng.choice((1, 4, 16, 40)),
            ignore_eos=rng.random() < 0.5,
            stop_strings=("e", "zz") if rng.random() < 0.2 else (),
        )
        requests.append(
            GenerateRequest(
                request_id=f"alone-{index}",
                model="demo",
                prompt=f"<|im_start|>user\n{MARKER * len(chosen)}{question}<|im_end|>\n<|im_start|>assistant\n",
                media=tuple(MediaItem(Modality.IMAGE, RawBytes(png)) for png in chosen),
                sampling=sampling,
                stopping=stopping,
                num_sequences=rng.choice((1, 1, 1, 1, 2, 5)),
            )
        )
    return requests


@dataclass
class Tally:
    """How the requests ended."""

    whole: int = 0
    cancelled: int = 0


async def storm(role: Desk, total: int, concurrency: int, rng: random.Random) -> Tally:
    """Send ``total`` requests, ``concurrency`` at a time, three in ten of them cancelled at a random moment."""
    distinct = distinct_requests(150, rng)
    bypass = CacheOptions(bypass_prefix_cache=True)
    expected = [await ask_all(role, replace(one, cache=bypass)) for one in distinct]
    tally = Tally()
    numbers = iter(range(total))

    async def worker() -> None:
        for number in numbers:
            index = rng.randrange(len(distinct))
            request = replace(distinct[index], request_id=f"{number}")
            if rng.random() < 0.3:
                natural = {one.end.reason for one in expected[index]}
                await cancel_midway(request, natural, rng.choice((0, 0, 1, 2, 5)), by_id=rng.random() < 0.5)
                tally.cancelled += 1
            else:
                for got, alone in zip(await ask_all(role, request), expected[index], strict=True):
                    assert (got.token_ids, got.text) == (alone.token_ids, alone.text), request
                    assert isinstance(got.end, Finished)
                    assert got.end.reason == alone.end.reason
                tally.whole += 1

    async def cancel_midway(request: GenerateRequest, natural: set[FinishReason], after: int, *, by_id: bool) -> None:
        answer = await role.accept(request)
        try:
            for _ in range(after):
                if not isinstance(await anext(answer), Tokens):
                    return
            if by_id:
                await role.abort(request.request_id)
                async for event in answer:
                    last = event
                assert isinstance(last, Finished)
                assert last.reason in {FinishReason.CANCELLED, *natural}  # it may have ended by itself just then
        finally:
            await answer.aclose()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return tally


async def assert_no_contradiction(role: Desk) -> None:
    """The engine compared its ledgers whenever it fell idle; a contradiction is its failure."""
    scheduler = {check.name: check for check in await role.health(probe=False)}["scheduler"]
    assert scheduler.state is HealthState.READY, scheduler.message


async def check_storm(total: int, concurrency: int, seed: int, **limits: int) -> None:
    chosen = options(max_running_requests=concurrency, **limits)
    async with running(load_model(chosen)) as role:
        tally = await storm(role, total, concurrency, random.Random(seed))
        assert tally.whole > total / 2
        assert tally.cancelled > total / 5
        async with asyncio.timeout(30):
            while role.load().running_requests or role.load().queued_requests:
                await asyncio.sleep(0.01)
        assert role.load().used_blocks == 0
        statistics = role.statistics()
        assert statistics["encoder_cache"]["held_bytes"] == 0
        assert statistics["media_admission"]["shares_in_use"] == 0
        await assert_no_contradiction(role)


async def test_a_few_hundred_requests() -> None:
    await check_storm(300, 16, seed=1)


async def test_a_few_hundred_requests_in_a_pool_that_is_too_small_for_all() -> None:
    await check_storm(300, 32, seed=2, kv_cache_bytes=2**20, max_batched_tokens=64)


async def test_a_ledger_that_contradicts_itself_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail."""

    def contradiction(_: Scheduler) -> None:
        raise IntegrityError("made up")

    async with running(load_model(options())) as role:
        await assert_no_contradiction(role)
        monkeypatch.setattr(Scheduler, "check_integrity", contradiction)
        await ask(role, distinct_requests(1, random.Random(0))[0])
        async with asyncio.timeout(20):
            while all(check.state is HealthState.READY for check in await role.health(probe=False)):
                await asyncio.sleep(0.01)
        with pytest.raises(AssertionError, match="made up"):
            await assert_no_contradiction(role)
        # and the process that runs such an engine ends instead of refusing for ever
        assert "made up" in str(await stopped_or_failed(Stop(), role))


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_ten_thousand_requests_64_at_a_time() -> None:
    await check_storm(10_000, 64, seed=3)
