"""Prompts that take time with their length: they leave the event loop, come to the same, and nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.roles.fake_engine import frontend, video_processor
from tests.roles.row_fakes import LAYOUT, VOCABULARY, Encoder, reference, terms
from triptych.core.encoder_input import EncodedInput
from triptych.core.errors import Draining, InvalidRequest, Overloaded, PromptTooLong
from triptych.core.layout import Grid, ItemLayout, Run
from triptych.core.logprobs import LogprobOptions
from triptych.core.media import Modality
from triptych.core.request import GenerateRequest
from triptych.processors.identity import prompt_digest
from triptych.roles.adapters import Adapters
from triptych.roles.intake import Intake
from triptych.roles.prompt_thread import LONG_PROMPT, MANY_TIMES, MAX_LONG_PROMPTS, PromptThread, is_long
from triptych.roles.row_intake import Landing, RowIntake

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from triptych.core.layout import Positions
    from triptych.core.plan import PromptPlan
    from triptych.processors.contract import Processor

ROWS = 2
"""Of a step."""


class Watched:
    """A processor, and on which threads it worked."""

    def __init__(self, processor: Processor) -> None:
        self.processor = processor
        self.threads: dict[str, list[int]] = {"plan": [], "positions": []}
        self.gate = threading.Event()
        """Plans wait for it."""
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.processor, name)

    def plan(self, token_ids: Any, inputs: Any) -> Any:
        if len(inputs):
            self.threads["plan"].append(threading.get_ident())
            self.gate.wait(20)
        return self.processor.plan(token_ids, inputs)

    def positions(self, plan: Any) -> Any:
        self.threads["positions"].append(threading.get_ident())
        return self.processor.positions(plan)

    def on_loop(self) -> dict[str, list[bool]]:
        """Whether each call was on the thread that asks."""
        return {name: [one == threading.get_ident() for one in found] for name, found in self.threads.items()}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    return video_processor(tmp_path_factory.mktemp("videos"))


@pytest.fixture
def watched(processor: Processor) -> Watched:
    return Watched(processor)


@pytest.fixture
async def intake(watched: Watched) -> AsyncIterator[Intake]:
    """It opens nothing."""
    front = frontend(VOCABULARY)
    front = replace(front, processor=watched, model=replace(front.model, max_context=100_000))
    landing = Landing.of(64 * LAYOUT.block_bytes, LAYOUT)
    wanted = terms(blocks=2**20, cache_bytes=2**40, fingerprint=watched.fingerprint)
    rows = RowIntake(wanted, landing, Encoder().fetcher(landing))
    made = Intake(front, Adapters(lambda info: pytest.fail(f"{info}"), 0), None, None, rows, requires_rows=True)
    yield made
    watched.gate.set()
    await made.close()


def video(steps: int, key: int = 1, rows: int = ROWS) -> ItemLayout:
    return ItemLayout(
        Modality.VIDEO,
        (Run(0, rows * steps),),
        rows * steps,
        4 * rows * steps,
        Grid(steps, 2, 2 * rows),
        bytes([key]) * 32,
        times=tuple(0.5 * step for step in range(steps)),
    )


def asked(watched: Watched, *videos: ItemLayout, **changes: Any) -> GenerateRequest:
    pad = watched.placeholders[Modality.VIDEO]
    references = tuple(reference(one, fingerprint=watched.fingerprint) for one in videos)
    plain = GenerateRequest("r", "demo", (5, *[pad] * len(videos), 6), references=references)
    return replace(plain, **changes)


def expected(watched: Watched, request: GenerateRequest) -> tuple[PromptPlan, Positions]:
    """As it is where nobody minds how long it takes."""
    inputs = [EncodedInput(one.item.layout, np.empty((0, 0), np.uint8)) for one in request.references]
    plan, _ = watched.processor.plan(np.array(request.prompt, np.int32), inputs)
    return plan, watched.processor.positions(plan)


def test_what_is_long() -> None:
    assert not is_long(LONG_PROMPT, [video(MANY_TIMES)])
    assert is_long(LONG_PROMPT + 1)
    assert is_long(1, [video(MANY_TIMES), video(1)])
    placed = replace(video(2), runs=(Run(0, 2), Run(9, 2)), times=())
    assert is_long(1, [placed] * (MANY_TIMES // 2 + 1))
    assert not is_long(1, [placed] * (MANY_TIMES // 2))


@pytest.mark.parametrize(("steps", "on_loop"), [((MANY_TIMES,), True), ((MANY_TIMES + 1,), False), ((100, 100), False)])
async def test_many_steps_are_planned_elsewhere_and_alike(
    intake: Intake, watched: Watched, steps: tuple[int, ...], on_loop: bool
) -> None:
    request = asked(watched, *(video(count, key) for key, count in enumerate(steps)))
    draft = await intake.draft(request, 0.0)
    assert watched.on_loop() == {"plan": [on_loop], "positions": [on_loop]}
    plan, positions = expected(watched, request)
    assert draft.planned.plan.token_ids.tolist() == plan.token_ids.tolist()
    assert draft.planned.plan.items == plan.items
    assert draft.planned.positions.table.tolist() == positions.table.tolist()
    assert draft.planned.positions.delta == positions.delta


async def test_the_plan_of_another_engine_is_looked_through_elsewhere(intake: Intake, watched: Watched) -> None:
    request = asked(watched, video(MANY_TIMES + 1))
    plan, positions = expected(watched, request)
    bare = replace(request, references=())
    draft = await intake.attach(bare, plan, prompt_digest(plan), 0.0)
    assert watched.on_loop() == {"plan": [], "positions": [False]}
    assert draft.planned.plan is plan
    assert draft.planned.positions.table.tolist() == positions.table.tolist()
    wrong = replace(plan, token_ids=np.where(np.arange(len(plan)) == plan.items[0].start, 5, plan.token_ids))
    with pytest.raises(Exception, match="does not fit where its media items lie"):
        await intake.attach(bare, wrong, prompt_digest(wrong), 0.0)
    with pytest.raises(InvalidRequest, match=r"contradicts itself: the digest of its plan is \w{16}, not 0{16}$"):
        await intake.attach(bare, plan, bytes(32), 0.0)


async def test_long_text_too(intake: Intake, watched: Watched) -> None:
    draft = await intake.draft(GenerateRequest("r", "demo", (5,) * (LONG_PROMPT + 1)), 0.0)
    assert watched.on_loop()["positions"] == [False]
    prepared = await intake.prepare(draft, None)
    assert prepared.request.plan is draft.planned.plan
    assert watched.on_loop()["positions"] == [False]
    await intake.draft(GenerateRequest("s", "demo", (5,) * 100), 0.0)
    assert watched.on_loop()["positions"] == [False, True]


async def test_what_is_written_between_steps_is_counted_before_it_is(intake: Intake, watched: Watched) -> None:
    """Their rows alone would fit."""
    steps = 30_000
    with pytest.raises(PromptTooLong, match=rf"has at least {2 + steps * (ROWS + 3)} tokens; the context"):
        await intake.draft(asked(watched, video(steps)), 0.0)
    assert watched.threads == {"plan": [], "positions": []}


async def test_the_exact_length_is_checked_too(intake: Intake, watched: Watched) -> None:
    steps = 15_000
    request = asked(watched, video(steps))
    with pytest.raises(PromptTooLong, match=r"the prompt has \d+ tokens; the context"):
        await intake.draft(request, 0.0)
    assert watched.on_loop() == {"plan": [False], "positions": []}


async def test_log_probabilities_may_begin_between_the_steps(intake: Intake, watched: Watched) -> None:
    request = asked(watched, video(10))
    length = len(expected(watched, request)[0])
    last = LogprobOptions(prompt=True, prompt_start=length - 1)
    await intake.draft(replace(request, logprobs=last), 0.0)
    with pytest.raises(Exception, match=f"prompt_logprob_start is {length} but the prompt has only {length} tokens"):
        await intake.draft(replace(request, logprobs=replace(last, prompt_start=length)), 0.0)


async def test_who_is_cancelled_leaves_when_nothing_goes_on(intake: Intake, watched: Watched) -> None:
    """And what had not begun is never done."""
    watched.gate.clear()
    request = asked(watched, video(MANY_TIMES + 1))
    runs, waits = (asyncio.create_task(intake.draft(request, 0.0)) for _ in range(2))
    while not watched.threads["plan"]:
        await asyncio.sleep(0.001)
    runs.cancel()
    waits.cancel()
    await asyncio.sleep(0.01)
    assert waits.cancelled()
    assert not runs.done()
    watched.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await runs
    assert len(watched.threads["plan"]) == 1
    await intake.draft(request, 0.0)  # its references wait as before


async def test_the_end_waits_for_what_runs_and_refuses_what_waits() -> None:
    thread, gate, begun = PromptThread(), threading.Event(), threading.Event()

    def run() -> str:
        begun.set()
        gate.wait(20)
        return "done"

    runs = asyncio.create_task(thread.run(run, long=True))
    await asyncio.to_thread(begun.wait)
    waits = asyncio.create_task(thread.run(lambda: pytest.fail("it is begun after the end"), long=True))
    await asyncio.sleep(0)
    closing = asyncio.create_task(thread.close())
    await asyncio.sleep(0)
    with pytest.raises(Draining):
        await thread.run(run, long=True)
    gate.set()
    await closing
    assert await runs == "done"
    with pytest.raises(Draining, match="the engine is shutting down"):
        await waits
    assert await thread.run(threading.get_ident, long=False) == threading.get_ident()


async def test_no_more_wait_than_may() -> None:
    thread, gate = PromptThread(), threading.Event()
    waiting = [asyncio.create_task(thread.run(gate.wait, long=True)) for _ in range(MAX_LONG_PROMPTS)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="64 long prompts already wait to be prepared; retry later"):
        await thread.run(gate.wait, long=True)
    assert await thread.run(threading.get_ident, long=False) == threading.get_ident()
    gate.set()
    assert await asyncio.gather(*waiting) == [True] * MAX_LONG_PROMPTS
    assert await thread.run(threading.get_ident, long=True) != threading.get_ident()
    await thread.close()
