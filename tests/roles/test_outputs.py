"""Several outputs of one request, with a real model: the same as requests of their own, but one prefill and one end."""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.drawings import shape_png
from tests.roles.running import ask, ask_all, load_model, options, running
from triptych.core.errors import InvalidRequest
from triptych.core.events import Failed, Finished, FinishReason, StopText, Tokens
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import GenerateRequest, Sampling, Stopping, derived_seed
from triptych.engine.runner import Runner
from triptych.roles.contract import AbortOutcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.roles.running import Answered
    from triptych.cli.loaded import LoadedModel
    from triptych.core.step import StepPlan, StepResult
    from triptych.roles.desk import Desk

MARKER = "<|vision_start|><|image_pad|><|vision_end|>"
RED = shape_png("circle", "red")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(options())


@pytest.fixture
async def role(loaded: LoadedModel) -> AsyncIterator[Desk]:
    async with running(loaded) as one:
        yield one


def request(outputs: int, *pngs: bytes, tokens: int = 24, **changes: object) -> GenerateRequest:
    """One with much choice: the temperature is high, the seed is fixed."""
    plain = GenerateRequest(
        request_id="r",
        model="demo",
        prompt=f"<|im_start|>user\n{MARKER * len(pngs)}what is it?<|im_end|>\n<|im_start|>assistant\n",
        media=tuple(MediaItem(Modality.IMAGE, RawBytes(png)) for png in pngs),
        sampling=Sampling(temperature=30.0, seed=2**63 + 5),
        stopping=Stopping(max_tokens=tokens, ignore_eos=True),
        num_sequences=outputs,
    )
    return replace(plain, **changes)


def alone(request: GenerateRequest, index: int) -> GenerateRequest:
    """The request whose only output is the given one of a request for several."""
    assert request.sampling.seed is not None
    seed = derived_seed(request.sampling.seed, index)
    return replace(request, num_sequences=1, sampling=replace(request.sampling, seed=seed))


class Brake:
    """Lets the engine make so many steps and then no more, until it is let go: it cannot run ahead of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self._off = threading.Event()
        made = itertools.count()
        run = Runner.run

        def braked(runner: Runner, plan: StepPlan) -> StepResult:
            if next(made) >= steps:
                assert self._off.wait(60)
            return run(runner, plan)

        monkeypatch.setattr(Runner, "run", braked)

    def let_go(self) -> None:
        self._off.set()


async def until_idle(role: Desk) -> None:
    async with asyncio.timeout(20):
        while role.load().running_requests or role.load().queued_requests or role.load().used_blocks:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("pictures", [0, 2])
async def test_outputs_are_those_of_requests_with_the_derived_seeds(role: Desk, pictures: int) -> None:
    several = request(4, *[RED] * pictures)
    together = await ask_all(role, several)
    lone = [await ask(role, alone(several, index)) for index in range(4)]
    assert [(one.token_ids, one.text) for one in together] == [(one.token_ids, one.text) for one in lone]
    assert len({one.token_ids for one in together}) == 4
    ends = [one.end for one in together]
    assert all(isinstance(end, Finished) for end in ends)
    (usage,) = [end.usage for end in ends if isinstance(end, Finished) and end.usage is not None]
    assert isinstance(lone[0].end, Finished)
    assert usage.prompt_tokens == lone[0].end.usage.prompt_tokens
    assert usage.completion_tokens == 4 * 24
    assert usage.cached_prompt_tokens == 0
    assert [end.request_id for end in ends] == ["r"] * 4


async def test_a_second_time_the_prompt_comes_from_the_cache_once(role: Desk) -> None:
    first = await ask(role, request(1, RED))
    again = await ask_all(role, request(3, RED))
    assert isinstance(first.end, Finished)
    (usage,) = [one.end.usage for one in again if isinstance(one.end, Finished) and one.end.usage is not None]
    assert 0 < usage.cached_prompt_tokens < usage.prompt_tokens == first.end.usage.prompt_tokens


async def test_stop_strings_end_each_output_where_it_has_one(role: Desk) -> None:
    several = request(4, tokens=40)
    whole = [one.text for one in await ask_all(role, several)]
    # a character that some outputs have early, some late, and perhaps some never
    stop = max(set("".join(whole)), key=lambda letter: len({text.find(letter) for text in whole}))
    stopping = Stopping(max_tokens=40, ignore_eos=True, stop_strings=(stop,))
    answered = await ask_all(role, replace(several, stopping=stopping))
    assert [one.text for one in answered] == [text.split(stop)[0] for text in whole]
    assert len({len(one.text) for one in answered}) > 1
    total = 0
    for one, text in zip(answered, whole, strict=True):
        assert isinstance(one.end, Finished)
        assert one.end.stop == (StopText(stop) if stop in text else None)
        total += len(one.token_ids)
    (usage,) = [one.end.usage for one in answered if isinstance(one.end, Finished) and one.end.usage is not None]
    assert usage.completion_tokens == total
    await until_idle(role)


@pytest.mark.parametrize("events", [0, 1, 5])
async def test_an_abort_ends_every_output(role: Desk, events: int, monkeypatch: pytest.MonkeyPatch) -> None:
    brake = Brake(monkeypatch, steps=12)
    answer = await role.accept(request(5, RED, stopping=Stopping(ignore_eos=True)))
    for _ in range(events):
        assert isinstance(await anext(answer), Tokens)
    assert await role.abort("r") is AbortOutcome.ABORTED
    brake.let_go()
    ends = [event async for event in answer if not isinstance(event, Tokens)]
    assert all(isinstance(end, Finished) and end.reason is FinishReason.CANCELLED for end in ends)
    assert sorted(end.output_index for end in ends if isinstance(end, Finished)) == [0, 1, 2, 3, 4]
    assert [end.usage is not None for end in ends if isinstance(end, Finished)] == [False] * 4 + [True]
    assert await role.abort("r") is AbortOutcome.ALREADY_FINISHED
    await answer.aclose()
    await until_idle(role)


async def test_an_abort_leaves_finished_outputs_as_they_are(role: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    several = request(3, tokens=400)
    first = (await ask_all(role, replace(several, stopping=Stopping(max_tokens=8, ignore_eos=True))))[1].text
    stopping = Stopping(max_tokens=400, ignore_eos=True, stop_strings=(first[:4],))
    brake = Brake(monkeypatch, steps=20)
    answer = await role.accept(replace(several, stopping=stopping))
    ends: list[Finished] = []
    async for event in answer:
        if isinstance(event, Finished):
            ends.append(event)
            if len(ends) == 1:
                await role.abort("r")
                brake.let_go()
    assert [end.reason for end in ends] == [FinishReason.STOP, FinishReason.CANCELLED, FinishReason.CANCELLED]
    assert ends[0].output_index == 1
    await answer.aclose()
    await until_idle(role)


async def test_closing_early_frees_everything(role: Desk) -> None:
    for events in (0, 1, 4):
        answer = await role.accept(request(6, RED, stopping=Stopping(ignore_eos=True)))
        for _ in range(events):
            await anext(answer)
        await answer.aclose()
    await until_idle(role)
    assert len((await ask_all(role, request(2)))[1].token_ids) == 24


async def test_one_output_that_fails_fails_the_request_and_nobody_else(
    role: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, failed, heard = Runner.run, threading.Event(), threading.Event()

    def failing(self: Runner, plan: StepPlan) -> StepResult:
        if failed.is_set():
            assert heard.wait(60)
        result = run(self, plan)
        bad = {name: InvalidRequest("made up") for name in result.sampled if name.endswith(".2")}
        if bad:
            failed.set()
        return replace(result, failures={**result.failures, **bad})

    async def ask_bad() -> list[Answered]:
        answered = await ask_all(role, request(4))
        heard.set()
        return answered

    monkeypatch.setattr(Runner, "run", failing)
    bad, good = await asyncio.gather(ask_bad(), ask_all(role, request(2, request_id="good")))
    assert {str(one.end.error) for one in bad if isinstance(one.end, Failed)} == {"made up"}
    assert all(isinstance(one.end, Finished) for one in good)
    await until_idle(role)
    assert role.statistics()["scheduler"]["failed"] == 1
    assert role.statistics()["scheduler"]["cancelled"] == 3


async def test_too_many_outputs_are_refused_with_both_numbers(role: Desk) -> None:
    most = role.engine.max_num_sequences
    with pytest.raises(InvalidRequest, match=rf"num_sequences is {most + 1}.* at most {most} "):
        await role.accept(request(most + 1))
    assert len(await ask_all(role, request(most, tokens=2))) == most
