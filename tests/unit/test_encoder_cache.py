from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from triptych.core.errors import IntegrityError
from triptych.core.layout import Grid
from triptych.engine.encoder_cache import EncoderCache, EntryState, Outcome, Shape

A, B, C = b"a", b"b", b"c"
ONE, TWO = ("one", 0), ("two", 0)
WIDE, TALL = Grid(1, 2, 6), Grid(1, 6, 2)


def of(size: int, grid: Grid = WIDE) -> Shape:
    return Shape(size, grid)


def ready(cache: EncoderCache, key: bytes, size: int) -> None:
    """The key computed, and nobody holding it."""
    cache.acquire(key, of(size), ONE)
    cache.commit(key)
    cache.release(key, ONE)


def test_the_same_key_is_computed_once() -> None:
    cache = EncoderCache(10)
    assert cache.acquire(A, of(4), ONE) == (Outcome.NEW_RESERVATION, ())
    assert cache.acquire(A, of(4), TWO) == (Outcome.RESERVATION_HIT, ())
    cache.commit(A)
    assert cache.acquire(A, of(4), ("three", 0)) == (Outcome.READY_HIT, ())


def test_one_request_may_hold_one_picture_twice() -> None:
    cache = EncoderCache(10)
    cache.acquire(A, of(4), ("one", 0))
    assert cache.acquire(A, of(4), ("one", 1)).outcome is Outcome.RESERVATION_HIT
    cache.commit(A)
    cache.release(A, ("one", 0))
    assert not cache.idle(A)
    cache.release(A, ("one", 1))
    assert cache.idle(A)


def test_only_unheld_entries_go_and_the_least_recently_used_first() -> None:
    cache = EncoderCache(10)
    for key in (A, B):
        ready(cache, key, 4)
    cache.acquire(A, of(4), ONE)
    cache.release(A, ONE)  # B is older now
    assert cache.acquire(C, of(4), ONE) == (Outcome.NEW_RESERVATION, (B,))
    assert cache.state(A) is EntryState.READY
    assert cache.state(B) is EntryState.ABSENT


@pytest.mark.parametrize(("size", "evicted"), [(2, ()), (3, (A,)), (6, (A,)), (7, (A, B)), (10, (A, B))])
def test_exactly_as_much_goes_as_must(size: int, evicted: tuple[bytes, ...]) -> None:
    cache = EncoderCache(10)
    for key in (A, B):
        ready(cache, key, 4)
    assert cache.acquire(C, of(size), ONE) == (Outcome.NEW_RESERVATION, evicted)
    cache.check_integrity({C: {ONE}})


def test_no_space_is_not_now_and_evicts_nothing() -> None:
    cache = EncoderCache(10)
    ready(cache, A, 4)
    cache.acquire(B, of(6), ONE)
    assert cache.acquire(C, of(5), TWO) is None
    assert cache.state(A) is EntryState.READY
    assert cache.statistics().blocked == 1


def test_larger_than_the_cache_is_never() -> None:
    cache = EncoderCache(10)
    with pytest.raises(IntegrityError, match="bytes of encoder rows"):
        cache.acquire(A, of(11), ONE)


def test_a_follower_keeps_the_reservation_of_an_owner_who_left() -> None:
    cache = EncoderCache(10)
    cache.acquire(A, of(4), ONE)
    cache.acquire(A, of(4), TWO)
    cache.release(A, ONE)
    assert cache.state(A) is EntryState.RESERVED
    cache.commit(A)
    cache.release(A, TWO)
    assert cache.state(A) is EntryState.READY


def test_a_reservation_nobody_needs_is_dropped() -> None:
    cache = EncoderCache(10)
    cache.acquire(A, of(4), ONE)
    cache.release(A, ONE)
    assert cache.state(A) is EntryState.ABSENT
    assert cache.statistics().used_bytes == 0


def test_a_failure_tells_owner_and_followers() -> None:
    cache = EncoderCache(10)
    cache.acquire(A, of(4), ONE)
    cache.acquire(A, of(4), TWO)
    assert cache.fail(A) == {ONE, TWO}
    assert cache.state(A) is EntryState.ABSENT
    cache.check_integrity({})


@pytest.mark.parametrize("other", [of(5), of(4, TALL)])
def test_rows_of_another_shape_are_others(other: Shape) -> None:
    """As many bytes of another grid too: a reader takes them for what they are not."""
    cache = EncoderCache(10)
    cache.acquire(A, of(4), ONE)
    assert not cache.misses(A, of(4))
    assert cache.clashes(A, other)
    cache.commit(A)
    cache.release(A, ONE)
    assert not cache.clashes(A, other)
    assert cache.misses(A, other)
    assert cache.acquire(A, other, TWO) == (Outcome.NEW_RESERVATION, (A,))
    cache.check_integrity({A: {TWO}})


@pytest.mark.parametrize(
    "misuse",
    [
        lambda cache: cache.acquire(A, of(4), ONE),
        lambda cache: cache.acquire(A, of(5), TWO),
        lambda cache: cache.acquire(A, of(4, TALL), TWO),
        lambda cache: cache.release(A, TWO),
        lambda cache: cache.release(B, ONE),
        lambda cache: cache.commit(B),
        lambda cache: cache.fail(B),
    ],
)
def test_misuse_is_a_bug(misuse: object) -> None:
    cache = EncoderCache(10)
    cache.acquire(A, of(4), ONE)
    with pytest.raises(IntegrityError):
        misuse(cache)


SIZES = {bytes([key]): 1 + key for key in range(6)}
keys = st.sampled_from(sorted(SIZES))
holders = st.tuples(st.sampled_from(["one", "two", "three"]), st.integers(0, 1))


class EncoderCacheMachine(RuleBasedStateMachine):
    """Against a model of who holds what and what is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = EncoderCache(10)
        self.held: dict[bytes, set[tuple[str, int]]] = {}
        self.stored: set[bytes] = set()

    @rule(key=keys, holder=holders)
    def acquire(self, key: bytes, holder: tuple[str, int]) -> None:
        if holder in self.held.get(key, set()):
            return
        acquisition = self.cache.acquire(key, of(SIZES[key]), holder)
        if acquisition is None:
            assert sum(SIZES[k] for k in self.held) + SIZES[key] > 10
            return
        self.stored -= set(acquisition.evicted)
        assert not set(acquisition.evicted) & set(self.held)
        expected = (
            Outcome.READY_HIT
            if key in self.stored
            else Outcome.RESERVATION_HIT
            if key in self.held
            else Outcome.NEW_RESERVATION
        )
        assert acquisition.outcome is expected
        self.held.setdefault(key, set()).add(holder)

    @rule(key=keys, good=st.booleans())
    def finish(self, key: bytes, good: bool) -> None:
        if self.cache.state(key) is not EntryState.RESERVED:
            return
        if good:
            self.cache.commit(key)
            self.stored.add(key)
        else:
            assert self.cache.fail(key) == self.held.pop(key)

    @rule(key=keys, holder=holders)
    def release(self, key: bytes, holder: tuple[str, int]) -> None:
        if holder in self.held.get(key, set()):
            self.cache.release(key, holder)
            self.held[key].remove(holder)
            if not self.held[key]:
                del self.held[key]

    @invariant()
    def everything_adds_up(self) -> None:
        self.cache.check_integrity(self.held)
        for key in SIZES:
            ready = self.cache.state(key) is EntryState.READY
            assert ready == (key in self.stored)
        assert self.cache.statistics().held_bytes == sum(SIZES[key] for key in self.held)


TestEncoderCacheMachine = EncoderCacheMachine.TestCase
TestEncoderCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
