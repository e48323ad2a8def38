"""What a producer answers to the words of consumers, in any order and however often they come."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import IntegrityError, Overloaded
from triptych.transport.contract import SessionState
from triptych.transport.nixl_ledger import MAX_SESSIONS, REMEMBERED, LedgerSession, NixlLedger
from triptych.transport.nixl_words import Verb, Word, parse_word

CLAIM, DONE, BACK, SPOILT = Verb


def offer(ledger: NixlLedger, session_id: str = "S") -> LedgerSession:
    ledger.open(session_id)
    ledger.publish(session_id, [1, 2], [5, 6])
    return ledger.seal(session_id)


def say(ledger: NixlLedger, verb: Verb, session: LedgerSession, consumer: int) -> LedgerSession | None:
    return ledger.hear(Word(verb, session.slot, session.tag, consumer))


def row(ledger: NixlLedger, session: LedgerSession) -> tuple[int, int]:
    tag, consumer = ledger.table[session.slot].tolist()
    return tag, consumer


def test_the_first_to_claim_has_it() -> None:
    ledger = NixlLedger()
    session = offer(ledger)
    assert row(ledger, session) == (session.tag, 0)
    assert ledger.state("S") is SessionState.WAITING
    for consumer, answer in ((7, session), (8, None), (7, None)):
        assert say(ledger, CLAIM, session, consumer) is answer
        assert row(ledger, session) == (session.tag, 7)
    assert ledger.claimed == 1
    assert ledger.state("S") is SessionState.TAKING
    for verb in (DONE, BACK, SPOILT):
        assert say(ledger, verb, session, 8) is None
    assert row(ledger, session) == (session.tag, 7)
    assert say(ledger, DONE, session, 7) is session
    assert row(ledger, session) == (0, 0)
    assert (ledger.held, ledger.claimed) == (0, 0)
    assert ledger.state("S") is SessionState.UNKNOWN


def test_what_is_given_back_is_the_next_ones() -> None:
    ledger = NixlLedger()
    session = offer(ledger)
    say(ledger, CLAIM, session, 7)
    assert say(ledger, BACK, session, 7) is session
    assert (row(ledger, session), ledger.claimed) == ((session.tag, 0), 0)
    assert ledger.state("S") is SessionState.WAITING
    assert say(ledger, CLAIM, session, 7) is None  # said before, heard late
    assert say(ledger, CLAIM, session, 8) is session
    assert say(ledger, BACK, session, 7) is None
    assert row(ledger, session) == (session.tag, 8)
    assert say(ledger, SPOILT, session, 8) is session
    assert row(ledger, session) == (0, 0)


def test_a_claim_that_is_overtaken_claims_nothing() -> None:
    ledger = NixlLedger()
    session = offer(ledger)
    for verb in (BACK, CLAIM):
        assert say(ledger, verb, session, 7) is None
    assert row(ledger, session) == (session.tag, 0)
    for consumer in range(1000, 3000):
        say(ledger, CLAIM, session, consumer)
        say(ledger, BACK, session, consumer)
    assert len(session.past) == REMEMBERED


def test_whoever_did_not_claim_is_not_done() -> None:
    ledger = NixlLedger()
    session = offer(ledger)
    for verb in (DONE, BACK, SPOILT):
        assert say(ledger, verb, session, 7) is None
    assert row(ledger, session) == (session.tag, 0)


def test_words_about_what_is_over_or_not_yet() -> None:
    ledger = NixlLedger()
    ledger.open("S")
    early = ledger.sessions()[0]
    for verb in Verb:
        assert say(ledger, verb, early, 7) is None
    assert row(ledger, early) == (0, 0)
    ledger.publish("S", [1], [1])
    session = ledger.seal("S")
    assert ledger.remove("S") is session
    assert ledger.remove("S") is None
    successor = offer(ledger, "T")
    assert successor.slot == session.slot
    for verb in Verb:
        assert say(ledger, verb, session, 7) is None
    assert row(ledger, successor) == (successor.tag, 0)


def test_a_successor_does_not_inherit_the_consumer() -> None:
    ledger = NixlLedger()
    first = offer(ledger)
    say(ledger, CLAIM, first, 7)
    ledger.remove("S")
    second = offer(ledger, "T")
    assert row(ledger, second) == (second.tag, 0)
    assert (second.consumer, ledger.claimed) == (0, 0)


def test_the_stamp_goes_before_the_memory_does() -> None:
    ledger, other = NixlLedger(), NixlLedger()
    assert ledger.table[0].tobytes() == ledger.stamp != other.stamp
    ledger.deface()
    assert not ledger.table[0].any()


def test_bounds_and_bugs() -> None:
    ledger = NixlLedger()
    for index in range(MAX_SESSIONS):
        ledger.open(f"{index}")
    with pytest.raises(Overloaded, match=f"{MAX_SESSIONS} sessions"):
        ledger.open("one more")
    with pytest.raises(IntegrityError, match="open already"):
        ledger.open("5")
    ledger.seal("5")
    for call in (lambda: ledger.seal("5"), lambda: ledger.publish("5", [1], [1]), lambda: ledger.seal("unknown")):
        with pytest.raises(IntegrityError, match="not open"):
            call()
    ledger.remove("7")
    ledger.open("one more")


@given(st.lists(st.tuples(st.sampled_from(["offer", "remove", *Verb]), st.integers(0, 3), st.integers(1, 4))))
def test_any_order(events: list[tuple[str | Verb, int, int]]) -> None:
    """One consumer at a time has a session, until its own last word; nothing of it is heard after that."""
    ledger = NixlLedger()
    sessions: list[LedgerSession] = []
    over: set[str] = set()
    last_words: set[tuple[str, int]] = set()
    for what, which, consumer in events:
        if what == "offer":
            sessions.append(offer(ledger, f"{len(sessions)}"))
            continue
        if not sessions:
            continue
        session = sessions[-1 - which % len(sessions)]
        ended = None
        if what == "remove":
            ended = ledger.remove(session.session_id)
        else:
            assert isinstance(what, Verb)
            owner = row(ledger, session)[1] if session.session_id not in over else 0
            changed = say(ledger, what, session, consumer)
            if changed is not None:
                assert changed is session
                assert owner == (0 if what is CLAIM else consumer)
                assert what is not CLAIM or (session.session_id, consumer) not in last_words
                ended = changed if what in (DONE, SPOILT) else None
            elif session.session_id not in over:
                assert row(ledger, session)[1] == owner
            if what is not CLAIM and session.session_id not in over:
                last_words.add((session.session_id, consumer))
        if ended is not None:
            assert ended is session
            assert session.session_id not in over
            over.add(session.session_id)
        living = [each for each in sessions if each.session_id not in over]
        assert {each.session_id for each in ledger.sessions()} == {each.session_id for each in living}
        assert all(row(ledger, each) == (each.tag, each.consumer) for each in living)
        assert ledger.claimed == sum(bool(each.consumer) for each in living)
        assert int((ledger.table[1:, 0] != 0).sum()) == len(living)


@given(st.sampled_from(Verb), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(1, 2**64 - 1))
def test_words_travel(verb: Verb, slot: int, tag: int, consumer: int) -> None:
    word = Word(verb, slot, tag, consumer)
    assert parse_word(word.pack()) == word


@given(st.one_of(st.binary(max_size=64), st.tuples(st.integers(0, 31), st.integers(0, 255))))
def test_other_messages_are_nothing(change: bytes | tuple[int, int]) -> None:
    packed = bytearray(Word(CLAIM, 1, 2, 3).pack())
    if isinstance(change, tuple):
        packed[change[0]] = change[1]
    else:
        packed = bytearray(change)
    word = parse_word(bytes(packed))
    assert word is None or word.pack() == packed
    assert parse_word(struct.pack("<8sIIQQ", b"TriptBk2", 5, 1, 2, 3)) is None
    assert parse_word(struct.pack("<8sIIQQ", b"TriptBk2", 1, 1, 2, 0)) is None
