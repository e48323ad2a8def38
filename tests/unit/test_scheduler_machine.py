"""Whatever happens in whatever order: ledgers agree, everybody ends once, answers are those given alone."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.requests import content_key, item, request
from tests.unit.simulation import ROW_BYTES, Heard, SimulatedRunner, answer_alone, run_all
from triptych.core.config import SchedulerConfig
from triptych.core.events import Failed, Finished, FinishReason
from triptych.core.request import CacheOptions, Stopping
from triptych.engine.scheduler import Scheduler

CONFIG = SchedulerConfig(
    max_batched_tokens=9,
    max_running_requests=4,
    max_context=44,
    block_size=4,
    num_blocks=12,
    encoder_items=2,
    encoder_tokens=40,
    encoder_cache_bytes=14 * ROW_BYTES,
)

pictures = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(0, 3)),  # picture, rows, text before it
    max_size=3,
)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(CONFIG, ROW_BYTES)
        self.runner = SimulatedRunner(CONFIG)
        self.heard = Heard()
        self.requests: dict[str, object] = {}
        self.now = 0.0

    @rule(
        shown=pictures,
        text=st.integers(1, 20),
        family=st.integers(0, 1),
        max_tokens=st.integers(1, 24),
        min_tokens=st.integers(0, 2),
        ignore_eos=st.booleans(),
        bypass=st.booleans(),
    )
    def add(
        self,
        shown: list[tuple[int, int, int]],
        text: int,
        family: int,
        max_tokens: int,
        min_tokens: int,
        ignore_eos: bool,
        bypass: bool,
    ) -> None:
        items, at = [], 0
        for picture, rows, gap in shown:
            # the rows of a picture are part of what it is, so they are part of its name
            at += gap
            framed = rows > 4
            runs = ((at, 3), (at + 4, rows - 3 + 1)) if framed else ((at, rows),)
            items.append(item(picture * 100 + rows, *runs, framing=(at + 4,) if framed else ()))
            at = items[-1].end
        length = min(at + text, 42)
        items = [layout for layout in items if layout.end <= length]
        name = f"r{len(self.requests)}"
        made = request(
            name,
            [10 + family + number % 7 for number in range(length)],
            items,
            stopping=Stopping(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), ignore_eos=ignore_eos),
            cache=CacheOptions(bypass_prefix_cache=bypass),
            arrival=self.now,
        )
        self.requests[name] = made
        self.scheduler.add(made)

    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        if self.requests:
            self.heard.take(self.scheduler.abort(f"r{pick % len(self.requests)}", self.now))

    @rule(
        steps=st.integers(1, 6),
        abort=st.integers(0, 1000),
        broken=st.integers(0, 1000),
        picture=st.none() | st.integers(1, 5),
        interfere=st.booleans(),
    )
    def step(self, steps: int, abort: int, broken: int, picture: int | None, interfere: bool) -> None:
        for number in range(steps):
            if not self.scheduler.busy:
                return
            self.now += 1
            last = interfere and number == steps - 1 and bool(self.requests)
            self.runner.bad_pictures = (
                {content_key(picture * 100 + rows) for rows in range(1, 13)} if last and picture else set()
            )
            self.runner.bad_requests = {f"r{broken % len(self.requests)}"} if last and broken % 3 == 0 else set()
            plan = self.scheduler.plan(self.now)
            result = self.runner.run(plan)
            if last:
                self.heard.take(self.scheduler.abort(f"r{abort % len(self.requests)}", self.now))
            self.heard.take(self.scheduler.apply(result, self.now))
            self.scheduler.check_integrity()

    @invariant()
    def ledgers_agree(self) -> None:
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        self.runner.bad_pictures, self.runner.bad_requests = set(), set()
        run_all(self.scheduler, self.runner, self.heard)
        assert set(self.heard.ends) == set(self.requests)
        assert not self.runner.known
        statistics = self.scheduler.statistics()
        assert statistics.blocks.held == statistics.encoder_cache.held_bytes == 0
        assert statistics.accepted == statistics.finished + statistics.cancelled + statistics.failed
        load = self.scheduler.load()
        assert load.running_tokens == load.waiting_tokens == load.running_requests == load.queued_requests == 0
        for name, made in self.requests.items():
            self.check_answer(name, made)

    def check_answer(self, name: str, made: object) -> None:
        expected = answer_alone(made, CONFIG.max_context)
        shown = self.heard.tokens.get(name, [])
        end = self.heard.ends[name]
        if isinstance(end, Failed) or end.reason is FinishReason.CANCELLED:
            assert shown == expected[: len(shown)]
            return
        assert isinstance(end, Finished)
        assert end.usage.completion_tokens == len(expected)
        assert shown == (expected[:-1] if end.reason is FinishReason.STOP else expected)
        assert 0 <= end.usage.cached_prompt_tokens < end.usage.prompt_tokens == len(made.plan)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
