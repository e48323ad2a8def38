"""Everything that can happen to rows on their way in, in any order: no block has two owners, and in the end none."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.roles.row_fakes import BLOCKS, Held, layout_of, numbers, reference
from triptych.core.errors import Overloaded, TriptychError
from triptych.roles.row_intake import RowLimits
from triptych.transport.contract import FetchOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.roles.row_ticket import RowTicket

SHAPES = ((1, 1), (4, 5), (8, 8), (12, 16))
"""1, 1, 3 and 9 blocks."""
BAD = (FetchOutcome.GONE, FetchOutcome.FAILED, FetchOutcome.CANCELLED)


@dataclass
class Asked:
    ticket: RowTicket
    keys: list[int]
    shapes: list[tuple[int, int]]
    task: asyncio.Task[object]


@dataclass
class Storm:
    """Rows that come, fail, hang and are given up."""

    held: Held
    keys: int = 0
    asked: list[Asked] = field(default_factory=list)
    refused: int = 0
    shown: dict[str, tuple[int, tuple[int, int]]] = field(default_factory=dict)
    """Key and shape by session."""

    def ask(self, number: int) -> None:
        """One to three items that fit together."""
        shapes = [SHAPES[(number >> shift) % 4] for shift in (0, 2, 4)][: 1 + number % 3]
        layouts = []
        for shape in shapes:
            self.keys += 1
            layouts.append(layout_of(*shape, self.keys))
        given = [reference(layout) for layout in layouts]
        while sum(one.item.handle.blocks for one in given) > BLOCKS:
            given.pop()
        keys = [self.keys - len(shapes) + 1 + index for index in range(len(given))]
        for one, key, shape in zip(given, keys, shapes, strict=False):
            self.shown[one.item.handle.session_id] = key, shape
        try:
            ticket = self.held.rows.line_up(given)
        except Overloaded:
            self.refused += 1
            return
        self.asked.append(Asked(ticket, keys, shapes, asyncio.ensure_future(self._take(ticket))))

    async def _take(self, ticket: RowTicket) -> object:
        try:
            return await ticket.take()
        except TriptychError as error:
            return error

    def finish(self, number: int) -> None:
        pending = [fetch for fetch in self.held.fetcher.begun if not fetch.ended]
        if pending:
            fetch = pending[number % len(pending)]
            key, shape = self.shown[fetch.handle.session_id]
            rows = numbers(layout_of(*shape, key))
            if number % 11 == 10:
                rows = rows.copy()
                rows.view("uint32")[-1, -1] = 0x7FC00000
            fetch.finish(rows, moved=0 if number % 13 == 12 else None)

    def fail(self, number: int) -> None:
        pending = [fetch for fetch in self.held.fetcher.begun if not fetch.ended]
        if pending:
            pending[number % len(pending)].end(BAD[number % 3], "said the test")

    def give_up(self, number: int) -> None:
        if self.asked:
            self.asked[number % len(self.asked)].ticket.give_up()

    def hang(self, number: int) -> None:
        """The time of all that is under way is over."""
        for one in self.asked:
            timer = one.ticket.timer
            if timer is not None and not timer.cancelled() and (number % 2 or one.ticket.waiting):
                timer._run()
                timer.cancel()

    async def turns(self, number: int) -> None:
        for _ in range(number % 8):
            await asyncio.sleep(0)

    def check(self) -> None:
        """At every moment."""
        self.held.integrity()
        now = self.held.rows.statistics()
        assert now["quarantined_bytes"] <= now["held_bytes"] <= now["capacity_bytes"]
        waiting = [one for one in self.asked if one.ticket.waiting]
        assert now["waiting"] == len(waiting)
        if waiting:
            assert waiting[0].ticket.needed > self.held.landing.blocks.available

    async def end(self) -> None:
        """Everybody leaves; then every fetch ends, as it was asked to."""
        for one in self.asked:
            one.ticket.give_up()
        self.check()
        for fetch in self.held.fetcher.begun:
            if not fetch.ended:
                assert fetch.cancels == 1
                fetch.end(FetchOutcome.CANCELLED)
        await asyncio.gather(*(one.task for one in self.asked))
        await self.held.rows.close()
        await self.turns(7)
        self.check()
        assert self.held.nothing()
        now = self.held.rows.statistics()
        taken = [one for one in self.asked if not isinstance(one.task.result(), TriptychError)]
        for one in taken:
            rows = one.task.result()
            assert [own.tobytes() for own in rows] == [
                numbers(layout_of(*shape, key)).tobytes() for key, shape in zip(one.keys, one.shapes, strict=False)
            ]
        ends = ("crowded", "gone", "failed", "damaged", "given_up")
        assert len(self.asked) == len(taken) + sum(now[name] for name in ends)
        assert now["refused"] == self.refused
        assert now["taken"] >= sum(len(one.keys) for one in taken)


ACTIONS: tuple[Callable[[Storm, int], object], ...] = (
    Storm.ask,
    Storm.finish,
    Storm.fail,
    Storm.give_up,
    Storm.hang,
    Storm.turns,
)


async def run(steps: list[tuple[int, int]]) -> None:
    storm = Storm(Held.of(limits=RowLimits(wait_seconds=3600, fetch_seconds=3600, max_waiting=4)))
    for action, number in steps:
        done = ACTIONS[action](storm, number)
        if asyncio.iscoroutine(done):
            await done
        storm.check()
    await storm.end()


def step(*actions: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.sampled_from(actions), st.integers(0, 255))


@settings(max_examples=300)
@given(st.lists(step(0, 0, 1, 1, 2, 3, 4, 5, 5), max_size=60))
@example([(0, 3), (0, 3), (4, 1), (5, 5), (1, 0), (5, 7), (0, 1)])
def test_no_block_has_two_owners_and_in_the_end_nobody_has_any(steps: list[tuple[int, int]]) -> None:
    asyncio.run(run(steps))
