"""The journal of cached blocks: numbers without gaps, replay and snapshots that agree with the truth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.roles.kv_changes import apply, block, removed
from triptych.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvBatch, KvChange
from triptych.roles import kv_history
from triptych.roles.kv_history import SNAPSHOT_CHANGES, KvHistory

if TYPE_CHECKING:
    import pytest

KEPT = 5
NAMES = 12


class HistoryMachine(RuleBasedStateMachine):
    """Truth is what the changes say. A follower reads along, now and then begins again, and never disagrees."""

    def __init__(self) -> None:
        super().__init__()
        self.history = KvHistory(KEPT)
        self.truth: dict[bytes, BlockStored] = {}
        self.states: list[dict[bytes, BlockStored]] = [{}]
        """After each batch, by its number."""

    def happen(self, *changes: KvChange) -> None:
        self.history.append(changes, unix_nanos=len(self.states))
        for change in changes:
            apply(self.truth, KvBatch(0, 0, (change,)))
        self.states.append(dict(self.truth))

    @rule(name=st.integers(0, NAMES))
    def store(self, name: int) -> None:
        if bytes([name]) * 32 not in self.truth:
            self.happen(block(name, (name - 1) // 2 if name else None))  # a tree; parents come and go

    @precondition(lambda self: self.truth)
    @rule(pick=st.integers(0, 10**6), again=st.booleans())
    def remove(self, pick: int, again: bool) -> None:
        gone = list(self.truth.values())[pick % len(self.truth)]
        self.happen(BlockRemoved(gone.block_hash), *([gone] if again else []))

    @rule()
    def clear(self) -> None:
        self.happen(AllBlocksCleared())

    @rule(meanwhile=st.lists(st.integers(0, NAMES), max_size=3))
    def take_a_snapshot_while_more_happens(self, meanwhile: list[int]) -> None:
        number = self.history.latest
        batches = self.history.snapshot(unix_nanos=7)
        for name in meanwhile:
            self.store(name)
        read = list(batches)
        assert {batch.sequence for batch in read} == {number}
        assert read[-1].changes == ()
        assert all(batch.changes for batch in read[:-1])
        assert read[0].changes[0] == AllBlocksCleared()
        state = {b"\xff" * 32: block(255)}  # something stale
        for batch in read:
            apply(state, batch)
        assert state == self.states[number]
        stored = [change for batch in read for change in batch.changes if isinstance(change, BlockStored)]
        place = {one.block_hash: index for index, one in enumerate(stored)}
        assert len(place) == len(stored)
        assert all(place.get(one.parent, -1) < place[one.block_hash] for one in stored)

    @invariant()
    def the_kept_batches_lead_to_the_truth(self) -> None:
        history = self.history
        assert history.latest == len(self.states) - 1
        assert history.kept == min(KEPT, history.latest)
        assert history.read(history.oldest - 1) is None
        assert history.read(history.latest + 1) is None
        for start in range(history.oldest, history.latest + 2):
            state = dict(self.states[start - 1])
            for number in range(start, history.latest + 1):
                batch = history.read(number)
                assert batch is not None
                assert batch.sequence == number
                apply(state, batch)
                assert state == self.states[number]
        assert history.present == len(self.truth)


TestHistory = HistoryMachine.TestCase


def test_a_parent_that_was_stored_again_later_still_comes_first() -> None:
    history = KvHistory(8)
    history.append((block(1), block(2, 1), block(3, 2)), 0)
    history.append((removed(1), removed(2)), 0)
    history.append((block(2, 1), block(1)), 0)
    first, end = history.snapshot(0)
    assert [change for change in first.changes if isinstance(change, BlockStored)] == [
        block(1),
        block(2, 1),
        block(3, 2),
    ]
    assert end.changes == ()


def test_a_large_snapshot_comes_in_batches_of_bounded_size() -> None:
    history = KvHistory(8)
    many = tuple(
        BlockStored(index.to_bytes(32, "big"), None, (), (), 0, "", "") for index in range(2 * SNAPSHOT_CHANGES + 3)
    )
    history.append(many, 0)
    sizes = [len(batch.changes) for batch in history.snapshot(0)]
    assert sizes == [SNAPSHOT_CHANGES, SNAPSHOT_CHANGES, 4, 0]


def test_large_batches_leave_the_buffer_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_history, "MAX_CHANGES", 10)
    history = KvHistory(100)
    for index in range(6):
        history.append((block(index), block(index + 100), removed(index + 100)), 0)
    assert (history.oldest, history.latest) == (4, 6)
    history.append(tuple(block(index) for index in range(20)), 0)
    assert (history.oldest, history.latest) == (7, 7)  # the last one stays, whatever its size
