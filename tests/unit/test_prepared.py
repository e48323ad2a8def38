"""Items that come again: made once, shared while they are made, kept within bounds, and forgotten when they fail."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.requests import content_key, item
from tests.stepping import Steps
from triptych.core.encoder_input import EncoderInput
from triptych.core.errors import IntegrityError, MediaError, MediaUnavailable
from triptych.core.media import Stage
from triptych.media.prepared import OVERHEAD_BYTES, PreparedItems
from triptych.media.work import until_ended

if TYPE_CHECKING:
    from collections.abc import Coroutine

UNIT = OVERHEAD_BYTES + 1000
CAPACITY = 3 * UNIT
TONES = np.zeros((1, 256), np.float32)
BUG = ZeroDivisionError("a bug")


def prepared(picture: int, units: int = 1) -> EncoderInput:
    """Takes that many units of the memory."""
    patches = np.zeros((units * UNIT - OVERHEAD_BYTES, 1, 1, 1, 1), np.uint8)
    return EncoderInput(item(picture, (0, 1)), patches, TONES)


class Maker:
    """Prepares one item, when its gate opens."""

    def __init__(
        self, loop: Steps, picture: int, *, units: int = 1, stubborn: bool = False, error: Exception | None = None
    ) -> None:
        self.picture = picture
        self.made = prepared(picture, units)
        self.begun = 0
        self.ended = 0
        self._stubborn = stubborn
        self._error = error
        self._gate = loop.create_future()

    def open(self) -> None:
        if not self._gate.done():
            self._gate.set_result(None)

    async def make(self) -> EncoderInput:
        self.begun += 1
        try:
            await (until_ended(self._gate) if self._stubborn else asyncio.shield(self._gate))
            if self._error is not None:
                raise self._error
            return self.made
        finally:
            self.ended += 1

    @property
    def runs(self) -> bool:
        return self.begun > self.ended


class Store:
    """A memory and a loop of its own."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.loop = Steps()
        self.items = PreparedItems(capacity)

    def ask(self, index: int, maker: Maker) -> asyncio.Task[EncoderInput]:
        with self.loop.running():
            return self.loop.create_task(self.items.get(index, content_key(maker.picture), maker.make))

    def asked(self, index: int, maker: Maker) -> asyncio.Task[EncoderInput]:
        asked = self.ask(index, maker)
        self.loop.settle()
        return asked

    def put(self, picture: int, units: int = 1) -> Maker:
        """One is made."""
        maker = Maker(self.loop, picture, units=units)
        asked = self.ask(0, maker)
        maker.open()
        self.loop.settle()
        assert asked.result() is maker.made
        return maker

    def has(self, *pictures: int) -> list[bool]:
        return [content_key(picture) in self.items._items for picture in pictures]

    def assert_still(self) -> None:
        assert self.items.statistics()["making"] == 0
        assert not self.loop.errors
        assert not [future for future in self.loop.pending() if isinstance(future, asyncio.Task)]


def test_an_item_that_comes_again_is_not_made_again() -> None:
    store = Store()
    first = store.put(1)
    again = Maker(store.loop, 1)
    assert store.asked(3, again).result() is first.made
    assert again.begun == 0
    assert store.items.statistics() == {
        "items": 1,
        "bytes": UNIT,
        "making": 0,
        "hits": 1,
        "misses": 1,
        "joined": 0,
        "evicted": 0,
    }


def test_an_item_that_is_being_made_is_made_once_for_all() -> None:
    store = Store()
    maker, other = Maker(store.loop, 1), Maker(store.loop, 1)
    asked = [store.ask(0, maker), store.ask(5, other), store.ask(2, other)]
    store.loop.settle()
    assert store.items.statistics()["making"] == 1
    maker.open()
    store.loop.settle()
    assert [one.result() is maker.made for one in asked] == [True] * 3
    assert other.begun == 0
    assert (store.items.statistics()["joined"], store.items.statistics()["misses"]) == (2, 1)
    store.assert_still()


def test_the_least_recently_used_makes_room() -> None:
    store = Store()
    for picture in (1, 2, 3):
        store.put(picture)
    store.asked(0, Maker(store.loop, 1))
    store.put(4)
    assert store.has(1, 2, 3, 4) == [True, False, True, True]
    store.put(5, units=2)
    assert store.has(1, 2, 3, 4, 5) == [False, False, False, True, True]
    assert store.items.statistics()["evicted"] == 3
    assert store.items.statistics()["bytes"] == CAPACITY


def test_finding_an_item_is_a_use_of_it_and_who_has_found_it_has_it() -> None:
    store = Store()
    for picture in (1, 2, 3):
        store.put(picture)
    found = store.items.find(content_key(1))
    store.put(4)
    assert store.has(1, 2) == [True, False]
    assert store.items.find(content_key(2)) is None
    for picture in (5, 6, 7):
        store.put(picture)
    assert store.has(1) == [False]
    assert found is not None
    assert found.layout.content_key == content_key(1)
    assert store.items.statistics()["hits"] == 1


def test_what_is_larger_than_the_memory_is_not_kept_and_drives_nothing_out() -> None:
    store = Store()
    store.put(1)
    store.put(2, units=4)
    assert store.has(1, 2) == [True, False]
    assert store.items.statistics()["evicted"] == 0
    store.put(3, units=3)  # as large as the memory
    assert store.has(1, 3) == [False, True]


def test_an_item_that_is_forgotten_while_somebody_has_it_is_theirs_and_is_made_again() -> None:
    store = Store()
    held = store.put(1).made
    store.put(2, units=3)
    assert store.has(1) == [False]
    assert held.layout.content_key == content_key(1)
    assert store.put(1).made is not held


def test_everybody_is_told_about_their_own_item_and_who_comes_later_tries_again() -> None:
    store = Store()
    maker = Maker(store.loop, 1, error=MediaUnavailable(9, "no memory", Stage.DECODE))
    asked = [store.ask(index, maker) for index in (0, 5)]
    store.loop.settle()
    maker.open()
    store.loop.settle()
    errors = [one.exception() for one in asked]
    assert [type(error) for error in errors] == [MediaUnavailable] * 2
    assert [str(error) for error in errors] == ["media item 0: decode: no memory", "media item 5: decode: no memory"]
    assert [error.index for error in errors if isinstance(error, MediaError)] == [0, 5]
    store.put(1)
    store.assert_still()


def test_what_is_no_fault_of_the_item_is_raised_as_it_is() -> None:
    store = Store()
    maker = Maker(store.loop, 1, error=BUG)
    asked = [store.ask(index, maker) for index in (0, 5)]
    maker.open()
    store.loop.settle()
    assert [one.exception() for one in asked] == [BUG, BUG]
    store.assert_still()


def test_who_leaves_others_leaves_at_once_and_they_get_what_they_wait_for() -> None:
    store = Store()
    maker = Maker(store.loop, 1, stubborn=True)
    first, second = store.ask(0, maker), store.ask(1, maker)
    store.loop.settle()
    first.cancel()
    store.loop.settle()
    assert first.cancelled()
    assert not second.done()
    maker.open()
    store.loop.settle()
    assert second.result() is maker.made
    store.assert_still()


def test_the_last_one_to_leave_waits_for_the_end() -> None:
    store = Store()
    maker = Maker(store.loop, 1, stubborn=True)
    first, second = store.ask(0, maker), store.ask(1, maker)
    store.loop.settle()
    first.cancel()
    for _ in range(2):
        second.cancel()
        store.loop.settle()
        assert (first.cancelled(), second.done(), maker.runs) == (True, False, True)
    maker.open()
    store.loop.settle()
    assert second.cancelled()
    assert not maker.runs
    assert store.has(1) == [False]
    store.assert_still()


def test_how_an_item_ends_that_nobody_waits_for_goes_to_no_log() -> None:
    store = Store()

    async def broken() -> EncoderInput:
        try:
            await asyncio.Event().wait()
        finally:
            raise BUG

    with store.loop.running():
        caller = store.loop.create_task(store.items.get(0, content_key(1), broken))
    store.loop.settle()
    caller.cancel()
    store.loop.settle()
    assert caller.cancelled()
    del caller
    store.loop.forget()
    store.assert_still()


def test_who_comes_while_an_item_ends_for_nobody_has_it_made_anew() -> None:
    store = Store()
    old, new, other = Maker(store.loop, 1, stubborn=True), Maker(store.loop, 1), Maker(store.loop, 1)
    leaver = store.asked(0, old)
    leaver.cancel()
    store.loop.settle()
    asked = [store.asked(1, new), store.asked(2, other), store.asked(3, other)]
    assert new.begun == 0
    asked[2].cancel()
    store.loop.settle()
    assert asked[2].cancelled()
    old.open()
    store.loop.settle()
    assert (new.begun, other.begun) == (1, 0)
    new.open()
    store.loop.settle()
    assert asked[0].result() is asked[1].result() is new.made
    store.assert_still()


def test_what_is_made_in_spite_of_being_cancelled_is_kept() -> None:
    store = Store()

    async def deaf() -> EncoderInput:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return prepared(1)
        raise AssertionError

    with store.loop.running():
        caller = store.loop.create_task(store.items.get(0, content_key(1), deaf))
    store.loop.settle()
    caller.cancel()
    store.loop.settle()
    assert caller.cancelled()
    assert store.has(1) == [True]
    store.assert_still()


def test_an_item_may_be_made_of_another_and_not_of_itself() -> None:
    store = Store()

    def make(picture: int) -> Coroutine[object, object, EncoderInput]:
        return store.items.get(picture, content_key(picture), lambda: make(max(picture - 1, 1)))

    with store.loop.running():
        caller = store.loop.create_task(make(3))
    store.loop.settle()
    assert isinstance(caller.exception(), IntegrityError)
    assert store.has(1, 2, 3) == [False] * 3

    async def of_another() -> EncoderInput:
        inner = Maker(store.loop, 1)
        inner.open()
        await store.items.get(0, content_key(1), inner.make)
        return prepared(2)

    with store.loop.running():
        caller = store.loop.create_task(store.items.get(0, content_key(2), of_another))
    store.loop.settle()
    assert caller.result().layout.content_key == content_key(2)
    assert store.has(1, 2) == [True, True]
    store.assert_still()


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("others", [0, 1])
def test_nothing_is_left_of_a_caller_that_leaves_at_any_moment(others: int, *, stubborn: bool) -> None:
    moments = over = 0
    while not over:
        store = Store()
        maker = Maker(store.loop, 1, stubborn=stubborn)
        asked = [store.ask(index, maker) for index in range(1 + others)]
        steps = 0
        while True:
            if steps == moments:
                asked[0].cancel()
            steps += 1
            if not store.loop.step():
                if maker._gate.done():
                    break
                maker.open()
        over = steps <= moments
        assert all(one.done() for one in asked)
        assert not maker.runs
        assert not over or asked[0].result() is maker.made
        assert not others or asked[1].result() is maker.made
        store.assert_still()
        assert not [future for future in store.loop.pending() if future is not maker._gate]
        moments += 1
    assert moments > 4


class Asked:
    """One caller."""

    def __init__(self, index: int, maker: Maker, task: asyncio.Task[EncoderInput]) -> None:
        self.index = index
        self.maker = maker
        self.task = task
        self.cancelled = False


class PreparedMachine(RuleBasedStateMachine):
    """Callers come and are cancelled, makers end, fail and linger, between any two callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store()
        self.loop = self.store.loop
        self.asked: list[Asked] = []

    @rule(
        picture=st.integers(0, 3),
        units=st.integers(1, 4),
        how=st.sampled_from(("plain", "plain", "stubborn", "bad", "bug")),
    )
    def ask(self, picture: int, units: int, how: str) -> None:
        errors = {"bad": MediaError(99, "it is broken", Stage.DECODE), "bug": BUG}
        maker = Maker(self.loop, picture, units=units, stubborn=how == "stubborn", error=errors.get(how))
        index = len(self.asked)
        self.asked.append(Asked(index, maker, self.store.ask(index, maker)))

    @precondition(lambda self: self.asked)
    @rule(number=st.integers(0))
    def cancel(self, number: int) -> None:
        one = self.asked[number % len(self.asked)]
        one.cancelled = one.task.cancel() or one.cancelled

    @precondition(lambda self: self.asked)
    @rule(number=st.integers(0))
    def open(self, number: int) -> None:
        self.asked[number % len(self.asked)].maker.open()

    @rule(steps=st.integers(1, 3))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.loop.step()
            self.watch()

    @rule()
    def settle(self) -> None:
        while self.loop.step():
            self.watch()
        assert self.store.items.statistics()["making"] == len([one for one in self.asked if one.maker.runs])

    @invariant()
    def watch(self) -> None:
        now = self.store.items.statistics()
        running = [one.maker.picture for one in self.asked if one.maker.runs]
        assert len(running) == len(set(running))
        wanted = {one.maker.picture for one in self.asked if not one.task.done()}
        assert wanted.issuperset(running)
        assert 0 <= now["bytes"] <= CAPACITY
        assert now["items"] == sum(self.store.has(0, 1, 2, 3))
        assert all(one.maker.begun <= 1 for one in self.asked)

    def teardown(self) -> None:
        for _ in range(len(self.asked) + 1):
            for one in self.asked:
                one.maker.open()
            self.settle()
        for one in self.asked:
            if one.task.cancelled():
                assert one.cancelled
                continue
            error = one.task.exception()
            if isinstance(error, MediaError):
                assert error.index == one.index
            elif error is None:
                assert one.task.result().layout.content_key == content_key(one.maker.picture)
            else:
                assert error is BUG
        self.store.assert_still()
        assert not self.loop.pending()
        now = self.store.items.statistics()
        if not any(one.cancelled for one in self.asked):
            assert now["misses"] == sum(one.maker.begun for one in self.asked)
            assert now["hits"] + now["misses"] + now["joined"] == len(self.asked)
        kept = [picture for picture in range(4) if self.store.has(picture) == [True]]
        items = [self.store.asked(0, Maker(self.loop, picture)).result() for picture in kept]
        assert now["bytes"] == sum(one.patches.nbytes + OVERHEAD_BYTES for one in items)


TestPreparedMachine = PreparedMachine.TestCase
