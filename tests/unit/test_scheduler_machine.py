"""Whatever happens in whatever order: ledgers agree, everybody ends once, answers are those given alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.requests import FakeAdapter, content_key, group, item, request
from tests.unit.simulation import ROW_BYTES, Heard, Mirror, SimulatedRunner, answer_alone, prompt_logprobs, run_all
from triptych.core.config import SchedulerConfig
from triptych.core.errors import DuplicateRequest
from triptych.core.events import Failed, Finished, FinishReason
from triptych.core.logprobs import LogprobOptions
from triptych.core.request import CacheOptions, Sampling, Stopping
from triptych.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from triptych.core.request import Request

CONFIG = SchedulerConfig(
    max_batched_tokens=9,
    max_running_requests=4,
    max_context=44,
    block_size=4,
    num_blocks=12,
    encoder_items=2,
    encoder_tokens=40,
    encoder_cache_bytes=14 * ROW_BYTES,
    priority_seconds=8.0,
)
SLOW = dataclasses.replace(CONFIG, max_batched_tokens=4, max_running_requests=3, block_size=2, num_blocks=22)
"""Prefills of many steps, in the middle of which blocks run out."""
ADAPTERS = (None, FakeAdapter(1), FakeAdapter(2))

pictures = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(0, 3)),  # picture, rows, text before it
    max_size=3,
)
stoppings = st.tuples(st.integers(1, 24), st.integers(0, 2), st.booleans())  # max_tokens, min_tokens, ignore_eos
logprobs = st.builds(
    lambda prompt, start, output: LogprobOptions(prompt=prompt, prompt_start=start if prompt else 0, output=output),
    st.booleans(),
    st.integers(0, 12),
    st.booleans(),
)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[object]]:
    """Tokens and items: few of each, so that much is shared."""
    items, at = [], 0
    for picture, rows, gap in draw(pictures):
        # the rows of a picture are part of what it is, so they are part of its name
        at += gap
        framed = rows > 4
        runs = ((at, 3), (at + 4, rows - 3 + 1)) if framed else ((at, rows),)
        items.append(item(picture * 100 + rows, *runs, framing=(at + 4,) if framed else ()))
        at = items[-1].end
    length = min(at + draw(st.integers(1, 20)), 42)
    family = draw(st.integers(0, 1))
    return [10 + family + number % 7 for number in range(length)], [each for each in items if each.end <= length]


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.start(CONFIG)
        self.heard = Heard()
        self.requests: dict[str, Request] = {}
        self.now = 0.0

    @initialize(config=st.sampled_from((CONFIG, SLOW)))
    def start(self, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(config, ROW_BYTES, kv_changes=True)
        self.runner = SimulatedRunner(config)
        self.mirror = Mirror(config.block_size)

    @rule(
        prompt=prompts(),
        count=st.sampled_from((1, 1, 1, 2, 3)),
        stopping=stoppings,
        seed=st.none() | st.integers(0, 3),
        options=logprobs,
        priority=st.integers(-3, 3),
        adapter=st.sampled_from(ADAPTERS),
        bypass=st.booleans(),
        grammar=st.booleans(),
    )
    def add(
        self,
        prompt: tuple[list[int], list[object]],
        count: int,
        stopping: tuple[int, int, bool],
        seed: int | None,
        options: LogprobOptions,
        priority: int,
        adapter: FakeAdapter | None,
        bypass: bool,
        grammar: bool,
    ) -> None:
        tokens, items = prompt
        most, least, ignore_eos = stopping
        made = request(
            f"r{len(self.requests)}",
            tokens,
            items,
            sampling=Sampling(temperature=0) if seed is None else Sampling(seed=seed),
            stopping=Stopping(max_tokens=most, min_tokens=min(least, most), ignore_eos=ignore_eos),
            cache=CacheOptions(bypass_prefix_cache=bypass),
            logprobs=dataclasses.replace(options, prompt_start=min(options.prompt_start, len(tokens) - 1)),
            arrival=self.now,
            priority=priority,
            adapter=adapter,
            grammar=object() if grammar else None,
        )
        members = group(made, count)
        self.scheduler.add(members)
        self.requests.update((each.request_id, each) for each in members)

    @rule(pick=st.integers(0, 1000), count=st.integers(2, 3))
    def add_a_group_with_a_live_id(self, pick: int, count: int) -> None:
        live = sorted(set(self.requests) - set(self.heard.ends))
        if live:
            members = group(request("refused", [10]), count)
            members[-1] = dataclasses.replace(members[-1], request_id=live[pick % len(live)])
            before = self.scheduler.load(), self.scheduler.statistics()
            with pytest.raises(DuplicateRequest):
                self.scheduler.add(members)
            assert (self.scheduler.load(), self.scheduler.statistics()) == before

    def _name(self, pick: int) -> str:
        return list(self.requests)[pick % len(self.requests)]

    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        if self.requests:
            self.heard.take(self.scheduler.abort(self._name(pick), self.now))

    @rule(
        steps=st.integers(1, 6),
        abort=st.lists(st.integers(0, 1000), max_size=3),
        broken=st.integers(0, 1000),
        picture=st.none() | st.integers(1, 5),
        interfere=st.booleans(),
    )
    def step(self, steps: int, abort: list[int], broken: int, picture: int | None, interfere: bool) -> None:
        for number in range(steps):
            if not self.scheduler.busy:
                return
            self.now += 1
            last = interfere and number == steps - 1 and bool(self.requests)
            self.runner.bad_pictures = (
                {content_key(picture * 100 + rows) for rows in range(1, 13)} if last and picture else set()
            )
            self.runner.bad_requests = {self._name(broken)} if last and broken % 3 == 0 else set()
            plan = self.scheduler.plan(self.now)
            result = self.runner.run(plan)
            if last:
                for pick in abort:
                    self.heard.take(self.scheduler.abort(self._name(pick), self.now))
            self.heard.take(self.scheduler.apply(result, self.now))
            self.mirror.take(self.scheduler.take_kv_changes())
            self.scheduler.check_integrity()

    @invariant()
    def ledgers_agree(self) -> None:
        self.scheduler.check_integrity()
        assert self.mirror.findable == set(self.scheduler._roster.pool._block_of)
        assert not self.scheduler.take_kv_changes()

    def teardown(self) -> None:
        self.runner.bad_pictures, self.runner.bad_requests = set(), set()
        run_all(self.scheduler, self.runner, self.heard)
        self.mirror.take(self.scheduler.take_kv_changes())
        self.ledgers_agree()
        assert set(self.heard.ends) == set(self.requests)
        assert not self.runner.known
        statistics = self.scheduler.statistics()
        assert statistics.blocks.held == statistics.encoder_cache.held_bytes == 0
        assert statistics.accepted == statistics.finished + statistics.cancelled + statistics.failed
        assert statistics.cached_prompt_tokens <= statistics.prompt_tokens
        load = self.scheduler.load()
        assert load.running_tokens == load.waiting_tokens == load.running_requests == load.queued_requests == 0
        for name, made in self.requests.items():
            self.check_answer(name, made)
        for stored in self.mirror.stored.values():
            self.check_block(stored)

    def check_answer(self, name: str, made: Request) -> None:
        expected = answer_alone(made, CONFIG.max_context)
        shown = self.heard.tokens.get(name, [])
        end = self.heard.ends[name]
        self.check_logprobs(name, made)
        if isinstance(end, Failed) or end.reason is FinishReason.CANCELLED:
            assert shown == expected[: len(shown)]
            return
        assert isinstance(end, Finished)
        assert end.usage.completion_tokens == len(expected)
        assert shown == (expected[:-1] if end.reason is FinishReason.STOP else expected)
        assert 0 <= end.usage.cached_prompt_tokens < end.usage.prompt_tokens == len(made.plan)

    def check_logprobs(self, name: str, made: Request) -> None:
        tokens, end = self.heard.tokens.get(name, []), self.heard.ends[name]
        assert len(self.heard.logprobs.get(name, [])) == (len(tokens) if made.logprobs.output else 0)
        prompt = self.heard.prompts.get(name)
        leads = "." not in name
        if not made.logprobs.prompt or not leads:
            assert prompt is None
        elif prompt is not None:
            assert prompt.token_ids == tuple(made.plan.token_ids.tolist())
            assert [each and each.logprob for each in prompt.logprobs] == prompt_logprobs(made)
        else:
            assert not tokens
            assert isinstance(end, Failed) or end.reason is FinishReason.CANCELLED

    def check_block(self, stored: object) -> None:
        made = self.requests[stored.request_id]
        prefix = self.mirror.prefix(stored)
        whole = [*made.plan.token_ids.tolist(), *answer_alone(made, CONFIG.max_context)]
        assert prefix == whole[: len(prefix)]
        start, end = len(prefix) - self.mirror.block_size, len(prefix)
        assert stored.item_keys == tuple(each.content_key for each in made.plan.items if each.overlaps(start, end))
        assert stored.lora_id == (made.adapter.lora_id if made.adapter else 0)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
