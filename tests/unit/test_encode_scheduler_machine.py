"""An encode scheduler and whoever takes what it hands over, in whatever order: nothing is lost, or held for ever."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.requests import content_key
from tests.unit.encode_bench import LAYOUT, Bench, asked, picture_of
from triptych.core.errors import InvalidRequest
from triptych.core.events import Encoded, Failed, Finished, FinishReason, RowsGone

names = st.integers(0, 1000)
pictures = st.integers(1, 6)
ROWS = {1: 3, 2: 4, 3: 9, 4: 12, 5: 1, 6: 20}
"""Of each picture, but for those who are wrong about it."""


class EncodeMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(6, 16), items=st.integers(1, 4), tokens=st.integers(10, 100), cache=st.integers(21, 60)
    )
    def start(self, blocks: int, items: int, tokens: int, cache: int) -> None:
        self.bench = Bench(blocks=blocks, encoder_items=items, encoder_tokens=tokens, encoder_cache_bytes=cache)
        self.now = 0.0
        self.made: dict[str, int] = {}
        """Pictures by name."""
        self.cached: set[str] = set()
        """Names of those in whose group one came without input."""

    @rule(
        group=st.lists(st.tuples(pictures, st.booleans()), min_size=1, max_size=4),
        priority=st.integers(-2, 2),
        wrong=st.integers(0, 9),
    )
    def add(self, group: list[tuple[int, bool]], priority: int, wrong: int) -> None:
        first = len(self.made)
        known = [cached and self.bench.scheduler.statistics().encoder_cache.entries > 0 for _, cached in group]
        made = [
            asked(
                f"r{first + number}",
                picture,
                ROWS[picture] + (wrong == 0 and len(group) == 1),
                cached=cached,
                arrival=self.now,
                priority=priority,
            )
            for number, ((picture, _), cached) in enumerate(zip(group, known, strict=True))
        ]
        if sum(LAYOUT.blocks(each.layout.rows) for each in made) > self.bench.scheduler.statistics().blocks.total:
            with pytest.raises(InvalidRequest, match="--encoder-quota"):
                self.bench.add(*made)
            return
        self.bench.add(*made)
        self.made.update({each.request_id: picture for each, (picture, _) in zip(made, group, strict=True)})
        if any(each.input is None for each in made):
            self.cached.update(each.request_id for each in made)

    @precondition(lambda self: self.made)
    @rule(picks=st.lists(names, min_size=1, max_size=3))
    def abort(self, picks: list[int]) -> None:
        for pick in picks:
            self.bench.abort(self._name(pick))

    def _name(self, pick: int) -> str:
        return list(self.made)[pick % len(self.made)]

    @precondition(lambda self: self.bench.runner.sessions)
    @rule(pick=names)
    def take(self, pick: int) -> None:
        """A consumer takes one; that nobody reads its blocks any more is told at some later time."""
        sessions = list(self.bench.runner.sessions)
        session_id = sessions[pick % len(sessions)]
        key = self.bench.runner.take(session_id)
        assert picture_of(key) == self.made[session_id.removeprefix("s ")]

    @precondition(lambda self: self.made)
    @rule(pick=names)
    def withdraw(self, pick: int) -> None:
        """Of any item, whether its session is open or not."""
        self.bench.scheduler.withdraw(f"s {self._name(pick)}")

    @precondition(lambda self: self.bench.runner.freed)
    @rule(count=st.integers(1, 4))
    def release(self, count: int) -> None:
        for session_id in self.bench.runner.freed[:count]:
            self.bench.scheduler.release(session_id)
        del self.bench.runner.freed[:count]

    @rule(
        steps=st.integers(1, 5),
        abort=st.lists(names, max_size=2),
        picture=st.none() | pictures,
        store=st.none() | names,
    )
    def step(self, steps: int, abort: list[int], picture: int | None, store: int | None) -> None:
        bench = self.bench
        for number in range(steps):
            if not bench.scheduler.busy:
                return
            self.now += 1
            last = number == steps - 1 and bool(self.made)
            bench.runner.bad_pictures = {content_key(picture)} if last and picture else set()
            bench.runner.bad_stores = {self._name(store)} if last and store is not None else set()
            before = bench.scheduler.load()
            plan = bench.scheduler.plan(self.now)
            bench.hear(bench.scheduler.take_events())
            result = bench.runner.run(plan)
            if before.running_requests:
                assert plan.items, "somebody was admitted, and nobody gets on"
            if last:
                for pick in abort:
                    bench.hear(bench.scheduler.abort(self._name(pick), self.now))
            bench.hear(bench.scheduler.apply(result, self.now))
            bench.scheduler.check_integrity()

    @invariant()
    def ledgers_agree(self) -> None:
        bench = self.bench
        bench.scheduler.check_integrity()
        statistics = bench.scheduler.statistics()
        # The transport and the ledger differ by what is told later only.
        open_blocks = sum(len(session.blocks) for session in bench.runner.sessions.values())
        assert open_blocks * LAYOUT.block_bytes <= statistics.leased_bytes <= statistics.held_bytes
        assert statistics.sessions == len(bench.runner.sessions) + len(set(bench.runner.freed))
        assert statistics.encoder_cache.held_bytes == 0  # between steps
        assert sum(bench.runner.rows.values()) == statistics.encoder_cache.used_bytes

    def teardown(self) -> None:
        bench = self.bench
        bench.runner.bad_pictures, bench.runner.bad_stores = set(), set()
        for _ in range(200):
            bench.run()
            bench.tell()
            for session_id in tuple(bench.runner.sessions):  # their time is over
                bench.scheduler.withdraw(session_id)
            if not bench.scheduler.busy:
                break
        bench.settle()
        assert set(bench.ends) == set(self.made)
        for name, end in bench.ends.items():
            assert isinstance(end, Encoded | Failed | Finished | RowsGone)
            assert (name in self.cached) or not isinstance(end, RowsGone)
            if isinstance(end, Finished):
                assert end.reason is FinishReason.CANCELLED


TestEncodeMachine = EncodeMachine.TestCase
TestEncodeMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
