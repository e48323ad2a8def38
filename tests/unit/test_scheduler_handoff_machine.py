"""Two schedulers that hand prompts over, in whatever order: nothing is lost, read too early, or held for ever."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.requests import content_key, group, request
from tests.unit.handoff_bench import Pair, Side, exported
from tests.unit.simulation import answer_alone
from tests.unit.test_scheduler_machine import CONFIG, logprobs, prompts, stoppings
from triptych.core.errors import InvalidRequest, PromptTooLong
from triptych.core.events import Failed, Finished, FinishReason, Prefilled
from triptych.core.request import CacheOptions, Sampling, Stopping

if TYPE_CHECKING:
    from triptych.core.logprobs import LogprobOptions
    from triptych.core.request import Request

names = st.integers(0, 1000)
sides = st.sampled_from(("prefill", "decode"))
FIELDS = {field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(CONFIG)}


class HandoffMachine(RuleBasedStateMachine):
    @initialize(few=st.integers(4, 14), blocks=st.integers(11, 30))
    def start(self, few: int, blocks: int) -> None:
        roomy = {"num_blocks": blocks, "max_running_requests": 6}
        self.pair = Pair(prefill=FIELDS | {"max_batched_tokens": few}, **(FIELDS | roomy))
        self.made = 0
        self.whole: dict[tuple[str, str], Request] = {}
        """Requests by side and name, as one engine would have had them."""
        self.exports: dict[str, list[Request]] = {}
        """Groups by their sessions."""
        self.now = 0.0

    def _side(self, name: str) -> Side:
        return getattr(self.pair, name)

    @rule(
        side=st.sampled_from(("prefill", "prefill", "decode", "export", "export", "export")),
        prompt=prompts(),
        count=st.sampled_from((1, 1, 2, 3)),
        stopping=stoppings,
        seed=st.none() | st.integers(0, 3),
        options=logprobs,
        priority=st.integers(-2, 2),
        bypass=st.booleans(),
        steps=st.sampled_from((0, 0, 1, 9)),
    )
    def add(
        self,
        side: str,
        prompt: tuple[list[int], list[object]],
        count: int,
        stopping: tuple[int, int, bool],
        seed: int | None,
        options: LogprobOptions,
        priority: int,
        bypass: bool,
        steps: int,
    ) -> None:
        tokens, items = prompt
        most, least, ignore_eos = stopping
        self.made += 1
        made = request(
            f"r{self.made}",
            tokens,
            items,
            sampling=Sampling(temperature=0) if seed is None else Sampling(seed=seed),
            stopping=Stopping(max_tokens=most, min_tokens=min(least, most), ignore_eos=ignore_eos),
            cache=CacheOptions(bypass_prefix_cache=bypass),
            logprobs=dataclasses.replace(options, prompt_start=min(options.prompt_start, len(tokens) - 1)),
            arrival=self.now,
            priority=priority,
        )
        members = group(made, count)
        where = "decode" if side == "decode" else "prefill"
        self.whole.update({(where, each.request_id): each for each in members})
        if side == "export":
            self.exports[f"s {made.request_id}"] = members
            members = exported(members)
        self._side(where).scheduler.add(members)
        for _ in range(steps):
            if self._side(where).scheduler.busy:
                self._side(where).step(self.now)

    def _ready(self) -> list[str]:
        """Sessions of which every output has its first token."""
        ends = self.pair.prefill.heard.ends
        return [
            session
            for session, members in self.exports.items()
            if all(isinstance(ends.get(each.request_id), Prefilled) for each in members)
        ]

    @precondition(lambda self: self._ready())
    @rule(pick=names, priority=st.integers(-2, 2), again=st.integers(0, 5))
    def resume(self, pick: int, priority: int, again: int) -> None:
        """Go on from a session, perhaps not for the first time."""
        ready = self._ready()
        if again:
            ready = [session for session in ready if session in self.pair.exchange.sessions] or ready
        session = ready[pick % len(ready)]
        self.made += 1
        members = [
            dataclasses.replace(each, request_id=f"d{self.made} {each.request_id}", priority=priority, arrival=self.now)
            for each in self.pair.resumed(self.exports[session])
        ]
        try:
            self.pair.decode.scheduler.add(members)
        except (InvalidRequest, PromptTooLong):
            assert all(self.pair.decode.scheduler._roster.find(each.request_id) is None for each in members)
            return
        self.whole.update({("decode", each.request_id): each for each in members})

    @precondition(lambda self: self.exports)
    @rule(pick=names, seldom=st.integers(0, 3))
    def withdraw(self, pick: int, seldom: int) -> None:
        if not seldom:
            self.pair.prefill.scheduler.withdraw(list(self.exports)[pick % len(self.exports)])

    @precondition(lambda self: self.pair.exchange.freed)
    @rule(count=st.integers(1, 4))
    def release(self, count: int) -> None:
        freed = self.pair.exchange.freed
        for session in freed[:count]:
            self.pair.prefill.scheduler.release(session)
        del freed[:count]

    @precondition(lambda self: self.pair.decode.runner.loads)
    @rule(picks=st.lists(names, min_size=1, max_size=4), broken=st.integers(0, 5))
    def end_loads(self, picks: list[int], broken: int) -> None:
        for pick in picks:
            loads = sorted(self.pair.decode.runner.loads)
            if loads:
                self.pair.decode.end_load(loads[pick % len(loads)], broken=broken == 0)

    @precondition(lambda self: self.whole)
    @rule(picks=st.lists(names, min_size=1, max_size=3))
    def abort(self, picks: list[int]) -> None:
        for pick in picks:
            self._abort(pick)

    def _abort(self, pick: int) -> None:
        where, name = list(self.whole)[pick % len(self.whole)]
        self._side(where).heard.take(self._side(where).scheduler.abort(name, self.now))

    @rule(
        where=sides,
        steps=st.integers(1, 6),
        abort=st.lists(names, max_size=2),
        broken=st.integers(0, 1000),
        picture=st.none() | st.integers(1, 5),
        interfere=st.booleans(),
    )
    def step(self, where: str, steps: int, abort: list[int], broken: int, picture: int | None, interfere: bool) -> None:
        side = self._side(where)
        for number in range(steps):
            if not side.scheduler.busy:
                return
            self.now += 1
            last = interfere and number == steps - 1 and bool(self.whole)
            side.runner.bad_pictures = (
                {content_key(picture * 100 + rows) for rows in range(1, 13)} if last and picture else set()
            )
            victim = {list(self.whole)[broken % len(self.whole)][1]} if last else set()
            side.runner.bad_requests = victim if broken % 3 == 0 else set()
            side.runner.bad_stores = victim if broken % 3 == 1 else set()
            plan = side.scheduler.plan(self.now)
            result = side.runner.run(plan)
            if last:
                for pick in abort:
                    self._abort(pick)
            side.heard.take(side.scheduler.apply(result, self.now))
            side.scheduler.check_integrity()

    @invariant()
    def ledgers_agree(self) -> None:
        for side in (self.pair.prefill, self.pair.decode):
            side.scheduler.check_integrity()
            load = side.scheduler.load()
            assert load.used_blocks == side.scheduler.statistics().blocks.held

    def teardown(self) -> None:
        for side in (self.pair.prefill, self.pair.decode):
            side.runner.bad_pictures, side.runner.bad_requests, side.runner.bad_stores = set(), set(), set()
        for _ in range(100):
            self.pair.settle()
            if self.pair.decode.runner.loads:
                self.pair.decode.end_loads()
            else:
                for session in list(self.pair.exchange.sessions):  # their time is over
                    self.pair.prefill.scheduler.withdraw(session)
                if not self.pair.prefill.scheduler.busy:
                    break
        self.pair.nothing_is_held()
        for (where, name), made in self.whole.items():
            self.check_answer(self._side(where), name, made)
        for side in (self.pair.prefill, self.pair.decode):
            assert side.scheduler.load().running_requests == side.scheduler.load().queued_requests == 0
        statistics = self.pair.decode.scheduler.statistics()
        assert statistics.imported_sessions <= self.pair.prefill.scheduler.statistics().exported_sessions

    def check_answer(self, side: Side, name: str, made: Request) -> None:
        expected = answer_alone(made, CONFIG.max_context)
        shown, end = side.heard.tokens.get(name, []), side.heard.ends[name]
        assert shown == expected[: len(shown)]
        assert (name in side.heard.admitted) <= (made.resume is not None)
        if isinstance(end, Prefilled):
            assert shown == []
            assert end.first.token_id == expected[0]
            assert (end.first.finish is None) == (len(expected) > 1)
        elif isinstance(end, Finished) and end.reason is not FinishReason.CANCELLED:
            assert end.usage.completion_tokens == len(expected)
            assert len(shown) == len(expected) - (end.reason is FinishReason.STOP)
            assert made.resume is None or name in side.heard.admitted
        else:
            assert isinstance(end, Failed | Finished)


TestHandoffMachine = HandoffMachine.TestCase
TestHandoffMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
