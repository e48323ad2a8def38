from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from triptych.core.errors import IntegrityError
from triptych.core.kv_events import BlockRemoved
from triptych.engine.blocks import BlockPool
from triptych.engine.journal import KvJournal


def test_allocation_is_refused_whole_when_there_are_too_few() -> None:
    pool = BlockPool(3)
    assert pool.allocate(2) is not None
    assert pool.allocate(2) is None
    assert pool.available == 1


def test_the_least_recently_released_content_is_overwritten_first() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.enlist(first, b"first")
    pool.enlist(second, b"second")
    pool.release([second])
    pool.release([first])
    assert pool.allocate(1) == (second,)
    assert pool.find(b"first") == first
    assert pool.find(b"second") is None


def test_a_chain_loses_its_tail_before_its_head() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    for number, block in enumerate(table):
        pool.enlist(block, bytes([number]))
    pool.release(table)
    assert pool.allocate(2) == (table[2], table[1])
    assert [pool.find(bytes([number])) for number in range(3)] == [table[0], None, None]
    assert pool.statistics().evictions == 2


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(2)
    cached, plain = pool.allocate(2)
    pool.enlist(cached, b"content")
    pool.release([cached, plain])
    assert pool.allocate(1) == (plain,)
    assert pool.find(b"content") == cached


def test_a_shared_block_stays_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.enlist(block, b"content")
    pool.share([block])
    pool.release([block])
    assert pool.allocate(1) is None
    pool.release([block])
    assert pool.find(b"content") == block
    assert pool.allocate(1) == (block,)
    assert pool.find(b"content") is None


def test_sharing_a_reclaimable_block_protects_it() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.enlist(block, b"content")
    pool.release([block])
    assert pool.idle([block]) == 1
    pool.share([block])
    assert pool.idle([block]) == 0
    assert pool.available == 0


def test_a_held_block_can_be_shared_whether_it_can_be_found_or_not() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.enlist(first, b"content")
    assert not pool.enlist(second, b"content")
    pool.share([second])
    pool.release([second])
    assert pool.available == 0
    pool.release([second])
    pool.check_integrity({first: 1})


def test_the_journal_hears_of_what_is_overwritten_and_of_what_is_forgotten() -> None:
    journal = KvJournal()
    pool = BlockPool(2, journal)
    first, second = pool.allocate(2)
    assert pool.enlist(first, b"first")
    assert pool.enlist(second, b"second")
    assert not pool.enlist(second, b"second")
    pool.release([first])
    assert journal.take() == ()
    pool.allocate(1)
    pool.release([second], forget=True)
    assert journal.take() == (BlockRemoved(b"first"), BlockRemoved(b"second"))
    assert journal.take() == ()


def test_the_second_block_of_equal_content_is_not_findable() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.enlist(first, b"content")
    pool.enlist(second, b"content")
    assert pool.find(b"content") == first


def test_forgotten_content_cannot_be_found_while_others_still_hold_it() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.enlist(block, b"content")
    pool.share([block])
    pool.release([block], forget=True)
    assert pool.find(b"content") is None
    pool.release([block])
    pool.check_integrity({})


@pytest.mark.parametrize("misuse", ["release", "share", "enlist"])
def test_misuse_is_a_bug(misuse: str) -> None:
    pool = BlockPool(1)
    with pytest.raises(IntegrityError):
        pool.enlist(0, b"content") if misuse == "enlist" else getattr(pool, misuse)([0])


class BlockPoolMachine(RuleBasedStateMachine):
    """Against a model: tables that hold blocks, and what each content's block must be."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        held = {block for table in self.tables for block in table}
        if blocks is None:
            assert count > 6 - len(held)
            return
        assert not held & set(blocks)
        assert len(set(blocks)) == count
        for block in blocks:
            self._forget(block)
        self.tables.append(list(blocks))

    @rule(table=st.integers(0, 9), place=st.integers(0, 9), content=st.binary(min_size=1, max_size=1))
    def enlist(self, table: int, place: int, content: bytes) -> None:
        if table >= len(self.tables) or place >= len(self.tables[table]):
            return
        block = self.tables[table][place]
        if block not in self.content:
            assert self.pool.enlist(block, content) == (content not in self.content.values())
            if content not in self.content.values():
                self.content[block] = content

    @rule(content=st.binary(min_size=1, max_size=1))
    def share(self, content: bytes) -> None:
        block = self.pool.find(content)
        if block is not None:
            self.pool.share([block])
            self.tables.append([block])

    @rule(table=st.integers(0, 9), count=st.integers(1, 4))
    def share_held(self, table: int, count: int) -> None:
        if table < len(self.tables):
            self.pool.share(self.tables[table][:count])
            self.tables.append(self.tables[table][:count])

    @rule(table=st.integers(0, 9), forget=st.booleans())
    def release(self, table: int, forget: bool) -> None:
        if table < len(self.tables):
            blocks = self.tables.pop(table)
            self.pool.release(blocks, forget=forget)
            if forget:
                for block in blocks:
                    self._forget(block)

    def _forget(self, block: int) -> None:
        content = self.content.pop(block, None)
        assert content is None or self.pool.find(content) is None

    @invariant()
    def everything_adds_up(self) -> None:
        references: dict[int, int] = {}
        for table in self.tables:
            for block in table:
                references[block] = references.get(block, 0) + 1
        self.pool.check_integrity(references)
        for block, content in self.content.items():
            assert self.pool.find(content) == block
        statistics = self.pool.statistics()
        assert statistics.held == len(references)
        assert statistics.held + statistics.reclaimable + statistics.free == statistics.total


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
