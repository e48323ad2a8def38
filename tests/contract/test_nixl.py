"""The nixl transport where it differs from others: connections, memory that is read in place, producers that hang."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from tests.contract.nixl_overwriter import pattern
from tests.contract.peer import ROOT, Peer, from_json, to_json
from tests.contract.transports import (
    LARGE,
    PATIENCE,
    SMALL,
    TRANSPORTS,
    Fetching,
    Told,
    make_pool,
    sides,
    straight,
    wait_until,
)
from triptych.core.errors import Draining, InvalidRequest, StartupError
from triptych.transport import nixl_fetch, nixl_peers
from triptych.transport.contract import BlockMemory, FetchOutcome, Move, SessionEvent, SessionState
from triptych.transport.nixl_agent import NixlAgent, NixlOptions
from triptych.transport.nixl_fetch import Taking
from triptych.transport.nixl_fetcher import NixlFetcher
from triptych.transport.nixl_peer import NixlPeer
from triptych.transport.nixl_publisher import NixlPublisher
from triptych.transport.nixl_state import parse_state, seal_state
from triptych.transport.nixl_words import Verb, Word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.contract.transports import Sides
    from triptych.core.handles import Handle
    from triptych.transport.contract import FetchResult

NIXL = TRANSPORTS["nixl"]
FINISHED, GONE, FAILED = FetchOutcome.FINISHED, FetchOutcome.GONE, FetchOutcome.FAILED
ANYWHERE = pytest.mark.parametrize("tls", ["", "tcp,self"], ids=["shared memory", "TCP"], indirect=True)
"""Where UCX has nothing but TCP, a producer's own thread sends what is read."""

pytestmark = pytest.mark.skipif(not NIXL.usable(), reason="no nixl here")


@pytest.fixture
def tls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setenv("UCX_TLS", request.param)


def peers(fetcher: Any) -> float:
    return fetcher.statistics()["peers"]


def forged(handle: Handle[Any], secret: str, **changes: Any) -> Handle[Any]:
    """Signed like ours, but of another place."""
    options = NixlOptions(secret.encode())
    state = parse_state(handle, options)
    place = msgspec.structs.replace(state.place, **changes)
    return dataclasses.replace(handle, state=seal_state(dataclasses.replace(state, place=place), options))


# what was found out about the library


def test_a_lie_that_is_signed_stays_within_what_was_registered(tmp_path: Path) -> None:
    with sides(NIXL, tmp_path) as both:
        size = both.source.memory.nbytes
        for block, name, distance in (
            (0, "memory", size),
            (0, "memory", -4),
            (7, "memory", 4),
            (7, "memory", -(2**30)),
            (0, "generations", 8 * 8),
            (7, "generations", 2**30),
            (7, "table", 2**30),
        ):
            before = both.target.memory.copy()
            handle = both.offer([block])
            address = getattr(parse_state(handle, NixlOptions(both.place.encode())).place, name)
            lie = forged(handle, both.place, **{name: address + distance})
            both.fetcher.check(lie)
            assert both.take(lie, straight(1)) in {GONE, FAILED}
            assert np.array_equal(both.target.memory[1:], before[1:])
            if name != "generations":  # which are looked at when the bytes are there
                assert np.array_equal(both.target.memory, before)
            both.publisher.withdraw(handle.session_id)
            threading.Event().wait(1.2 * nixl_peers.COLD_SECONDS)
        assert both.take(both.offer([1]), straight(1)) is FINISHED


def test_another_start_of_the_producer_is_not_mistaken_for_it(tmp_path: Path) -> None:
    with sides(NIXL, tmp_path) as both:
        handle = both.offer([1])
        before = both.target.memory.copy()
        assert both.take(forged(handle, both.place, stamp=bytes(16)), straight(1)) is GONE
        assert np.array_equal(both.target.memory, before)
        assert both.take(both.offer([1]), straight(1)) is FINISHED


def test_loading_the_library_leaves_logging_alone(tmp_path: Path) -> None:
    script = (
        "import logging, sys; from triptych.transport.nixl_agent import NixlAgent, NixlOptions\n"
        "logging.basicConfig(stream=sys.stderr)\n"
        "NixlAgent('x', NixlOptions(bytes(16))).close(); assert logging.raiseExceptions\n"
        "logging.getLogger('here').warning('still heard')"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout == ""
    assert ended.stderr == "WARNING:here:still heard\n"
    assert logging.raiseExceptions


def test_what_cannot_be_used_is_said_at_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, told, options = make_pool(SMALL, 4, 1), Told(), NixlOptions(bytes(16))
    nowhere = NixlOptions(bytes(16), device="nowhere0")
    with pytest.raises(StartupError, match="nowhere0"):
        NixlPublisher(pool, "P", told, nowhere)
    with pytest.raises(StartupError, match="nowhere0"):
        NixlFetcher(pool, "D", nowhere)
    for broken in (
        BlockMemory(SMALL, pool.memory[:, ::2], pool.generations),
        BlockMemory(SMALL, pool.memory, pool.generations[:2]),
        BlockMemory(SMALL, pool.memory, pool.generations.astype(np.int32)),
    ):
        with pytest.raises(StartupError, match=r"contiguous|generation"):
            NixlPublisher(broken, "P", told, options)
    monkeypatch.setitem(sys.modules, "nixl_cu12._api", None)
    with pytest.raises(StartupError, match="triptych\\[nixl\\]"):
        NixlFetcher(pool, "D", options)


def test_engines_of_another_secret_have_nothing_to_do_with_each_other(tmp_path: Path) -> None:
    with sides(NIXL, tmp_path) as both:
        stranger = NixlFetcher(both.target, "stranger", NixlOptions(b"a secret of others"))
        handle = both.offer([1])
        with pytest.raises(InvalidRequest, match="secret"):
            stranger.check(handle)
        unchecked = Fetching(stranger, both.target)
        unchecked.start(handle, straight(1))
        assert unchecked.wait() is FAILED
        stranger.close()
        assert both.take(handle, straight(1)) is FINISHED


# words


def test_words_that_are_lost_or_said_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: Counter[Verb] = Counter()
    say = NixlPeer.say

    def unreliable(peer: NixlPeer, word: Word) -> None:
        said[word.verb] += 1
        if word.verb is not Verb.CLAIM or said[word.verb] > 1:
            say(peer, word)
            say(peer, word)

    monkeypatch.setattr(NixlPeer, "say", unreliable)
    with sides(NIXL, tmp_path) as both:
        handle = both.offer([1, 2])
        assert both.take(handle, straight(2)) is FINISHED
        both.told.wait(handle.session_id, SessionEvent.TAKEN)
        assert said[Verb.CLAIM] > 1
        assert both.take(both.offer([3]), straight(1)) is FINISHED


def test_a_consumer_that_goes_without_a_word_leaves_the_session_to_withdraw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sides(NIXL, tmp_path) as both:
        handle = both.offer([1, 2])
        monkeypatch.setattr(NixlPeer, "say", lambda peer, word: None)
        assert both.take(handle, straight(2), seconds=0.3) is FAILED
        assert both.publisher.statistics()["sessions"] == 1
        assert not both.told.has(handle.session_id, SessionEvent.FREE)
        both.publisher.withdraw(handle.session_id)
        both.told.wait(handle.session_id, SessionEvent.FREE)


def test_a_session_that_nobody_can_use_is_free_at_once(tmp_path: Path) -> None:
    with sides(NIXL, tmp_path) as both:
        handle = both.offer(range(8))
        both.source.generations[5] += 1
        assert both.take(handle, straight(8)) is GONE
        both.told.wait(handle.session_id, SessionEvent.FREE)
        assert both.publisher.statistics()["spoilt"] == 1


@contextlib.contextmanager
def stranger(both: Sides, handle: Handle[Any]) -> Iterator[Callable[[Verb], None]]:
    """Another consumer of the session, of which only words are heard."""
    options = NixlOptions(both.place.encode())
    state = parse_state(handle, options)
    agent = NixlAgent("stranger", options)
    agent.connect(state.place.metadata, state.place.instance_id)

    def say(verb: Verb) -> None:
        agent.send(Word(verb, state.slot, state.tag, 6).pack())
        for _ in range(50):
            agent.received()
            threading.Event().wait(0.002)

    yield say
    agent.close()


def test_who_has_a_session_is_seen_by_the_producer_and_by_others(tmp_path: Path) -> None:
    with sides(NIXL, tmp_path) as both:
        handle = both.offer([1])
        state = both.publisher.state
        with stranger(both, handle) as say:
            assert state(handle.session_id) is SessionState.WAITING
            say(Verb.CLAIM)
            wait_until(lambda: state(handle.session_id) is SessionState.TAKING, "it is not claimed")
            assert both.take(handle, straight(1)) is GONE
            assert both.take(handle, straight(1), seconds=nixl_fetch.YIELD_SECONDS / 4) is FAILED
            assert state(handle.session_id) is SessionState.TAKING
            say(Verb.BACK)
            assert both.wait_for_return(handle) is SessionState.WAITING
            say(Verb.CLAIM)  # late: it has given the session back
            assert both.take(handle, straight(1)) is FINISHED
            both.told.wait(handle.session_id, SessionEvent.TAKEN)


def test_who_comes_while_it_is_given_back_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_fetch, "YIELD_SECONDS", PATIENCE)
    monkeypatch.setattr(nixl_fetch, "REPEAT_SECONDS", 2 * PATIENCE)
    seen, wait_for = threading.Event(), Taking._wait_for

    def waiting(taking: Taking, other: int, now: float) -> FetchResult | None:
        seen.set()
        return wait_for(taking, other, now)

    monkeypatch.setattr(Taking, "_wait_for", waiting)
    with sides(NIXL, tmp_path) as both:
        handle = both.offer([1])
        with stranger(both, handle) as say:
            say(Verb.CLAIM)
            wait_until(lambda: both.publisher.state(handle.session_id) is SessionState.TAKING, "it is not claimed")
            fetching = both.fetch(handle, straight(1))
            assert seen.wait(PATIENCE)
            assert not fetching.ended
            say(Verb.BACK)
            assert fetching.wait() is FINISHED


def test_a_last_word_that_is_lost_leaves_the_session_to_its_consumer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = NixlPeer.say
    with sides(NIXL, tmp_path) as both:
        handle = both.offer([1])
        with monkeypatch.context() as patch:
            patch.setattr(NixlPeer, "say", lambda peer, word: say(peer, word) if word.verb is Verb.CLAIM else None)
            assert both.take(handle, straight(1)) is FINISHED
        for _ in range(2):
            assert both.take(handle, straight(1)) is GONE
        assert both.publisher.state(handle.session_id) is SessionState.TAKING
        both.publisher.withdraw(handle.session_id)
        both.told.wait(handle.session_id, SessionEvent.FREE)
        assert both.take(handle, straight(1)) is GONE


def test_a_session_that_no_handle_can_name(tmp_path: Path) -> None:
    with sides(NIXL, tmp_path) as both:
        session_id = both.open()
        both.publisher.publish(session_id, [0, 1, 2, 3] * 10_000)
        with pytest.raises(InvalidRequest, match="40000 blocks"):
            both.publisher.seal(session_id)
        both.publisher.withdraw(session_id)
        both.told.wait(session_id, SessionEvent.FREE)
        empty = both.open()
        with pytest.raises(InvalidRequest, match="0 blocks"):
            both.publisher.seal(empty)


def test_nonsense_from_anybody_is_not_heard(tmp_path: Path) -> None:
    with sides(NIXL, tmp_path) as both:
        handle = both.offer([1])
        state = parse_state(handle, NixlOptions(both.place.encode()))
        agent = NixlAgent("stranger", NixlOptions(bytes(16)))
        agent.connect(state.place.metadata, state.place.instance_id)
        for message in (
            *(b"", b"nonsense", b"\xff" * 10_000),
            Word(Verb.CLAIM, 2**32 - 1, 5, 6).pack(),
            Word(Verb.CLAIM, state.slot, state.tag ^ 1, 6).pack(),
            Word(Verb.DONE, state.slot, state.tag, 6).pack(),
        ):
            agent.send(message)
        for _ in range(50):
            agent.received()
            threading.Event().wait(0.002)
        assert both.take(handle, straight(1)) is FINISHED
        agent.close()


# connections


def test_more_producers_than_are_connected_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_peers, "MAX_PEERS", 3)
    with sides(NIXL, tmp_path) as both:
        told, options = Told(), NixlOptions(both.place.encode())
        producers = [NixlPublisher(both.source, f"P{index}", told, options) for index in range(6)]
        for turn in range(2):
            for index, producer in enumerate(producers):
                session_id = f"{turn} {index}"
                producer.open(session_id)
                producer.publish(session_id, [index])
                assert both.take(producer.seal(session_id), straight(1)) is FINISHED
                assert np.array_equal(both.target.memory[0], both.source.memory[index])
        wait_until(lambda: peers(both.fetcher) <= 3, "too many are connected")
        for producer in producers:
            producer.close()


def test_producers_that_nobody_needs_are_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_peers, "PEER_IDLE_SECONDS", 0.05)
    monkeypatch.setattr("triptych.transport.nixl_fetcher.PEER_IDLE_SECONDS", 0.05)
    with sides(NIXL, tmp_path) as both:
        for _ in range(2):
            assert both.take(both.offer([1]), straight(1)) is FINISHED
            wait_until(lambda: not peers(both.fetcher), "it is still connected")


def test_one_engine_may_hand_over_to_itself(tmp_path: Path) -> None:
    pool, told, options = make_pool(SMALL, 8, 1), Told(), NixlOptions(str(tmp_path).encode())
    publisher, fetcher = NixlPublisher(pool, "both", told, options), NixlFetcher(pool, "both", options)
    publisher.open("S")
    publisher.publish("S", [1, 2, 3])
    fetching, expected = Fetching(fetcher, pool), pool.memory[1:4].copy()
    fetching.start(publisher.seal("S"), [Move(0, 5), Move(1, 6), Move(2, 7)])
    assert fetching.wait() is FINISHED
    assert np.array_equal(pool.memory[5:8], expected)
    fetcher.close()
    publisher.close()
    with pytest.raises(Draining):
        publisher.open("T")


def test_sessions_of_a_dead_producer_fail_fast_and_leave_nothing(tmp_path: Path) -> None:
    with sides(NIXL, tmp_path, LARGE, 8) as both:
        assert both.take(both.offer([1]), straight(1)) is FINISHED  # what a library keeps for good, it has now
        before = len(os.listdir("/proc/self/fd"))
        with Peer("producer", NIXL.name, both.place, 8) as peer:
            handles = [peer.offer(f"{index}", [index % 8]) for index in range(100)]
            assert both.take(handles.pop(), straight(1)) is FINISHED
            peer.kill()
            for handle in handles:
                assert both.take(handle, straight(1)) is FAILED
        wait_until(lambda: peers(both.fetcher) == 1, "the dead producer is still connected")
        assert len(os.listdir("/proc/self/fd")) == before
        assert both.take(both.offer([1]), straight(1)) is FINISHED


def test_killed_consumers_leave_nothing(tmp_path: Path) -> None:
    with sides(NIXL, tmp_path, LARGE, 32) as both:
        counts = []
        for _ in range(4):
            with Peer("consumer", NIXL.name, both.place, 32) as peer:
                handle = both.offer(range(32))
                peer.say("fetch", to_json(handle))
                threading.Event().wait(0.02)
            both.publisher.withdraw(handle.session_id)
            assert both.take(both.offer([1]), straight(1)) is FINISHED
            counts.append(len(os.listdir("/proc/self/fd")))
        assert max(counts[2:]) <= max(counts[:2])


# a producer that hangs


@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL])
def test_blocks_are_kept_while_a_producer_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: signal.Signals
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # so that it has to send
    blocks = 256
    with sides(NIXL, tmp_path, LARGE, blocks) as both, Peer("producer", NIXL.name, both.place, blocks) as peer:
        assert both.take(peer.offer("first", [0]), straight(1)) is FINISHED
        landed = both.target.memory[:, 0].copy()
        second = peer.offer("second", list(range(blocks)))
        fetching = both.fetch(second, straight(blocks), seconds=1, marks=True)
        wait_until(lambda: not np.array_equal(both.target.memory[:, 0], landed), "nothing arrives")
        peer.signal(signal.SIGSTOP)
        wait_until(lambda: bool(both.fetcher.statistics()["overdue"]), "it is not overdue")
        assert both.fetcher.statistics()["overdue_bytes"] == blocks * LARGE.block_bytes
        assert not fetching.ended
        assert both.take(both.offer([1, 2]), []) is FINISHED  # nobody else is concerned
        assert not fetching.ended
        peer.signal(then)
        assert fetching.wait() is FAILED
        statistics = both.fetcher.statistics()
        assert (statistics["overdue"], statistics["overdue_bytes"]) == (0, 0)
        fetching.check_marks()
        if then is signal.SIGCONT:
            again = both.fetch(second, straight(blocks))
            assert again.wait() is FINISHED
            memory = make_pool(LARGE, blocks, 1).memory
            assert again.held == {index: memory[index].tobytes() for index in range(blocks)}
            peer.end()
        else:
            assert both.take(second, []) is FAILED


def test_a_hanging_producer_does_not_keep_what_it_could_not_touch_yet(tmp_path: Path) -> None:
    with sides(NIXL, tmp_path, LARGE, 8) as both, Peer("producer", NIXL.name, both.place, 8) as peer:
        handle = peer.offer("first", [0])
        peer.signal(signal.SIGSTOP)
        assert both.take(handle, straight(1), seconds=0.2, marks=True) is FAILED
        peer.signal(signal.SIGCONT)
        assert both.take(handle, straight(1)) is FINISHED  # what was said to it has waited
        peer.end()


# blocks that are given to other content


@contextlib.contextmanager
def overwriter(place: str, blocks: int, sessions: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.contract.nixl_overwriter", place, str(blocks), str(sessions)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE) == 0


@ANYWHERE
@pytest.mark.parametrize("sessions", [200, pytest.param(4000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_overwritten_while_it_is_read(tls: None, tmp_path: Path, sessions: int) -> None:
    blocks = 64
    pool = make_pool(LARGE, blocks, 2)
    words = pool.memory.view(np.uint64)
    fetcher = NixlFetcher(pool, uuid.uuid4().hex, NixlOptions(str(tmp_path).encode()))
    outcomes: Counter[FetchOutcome] = Counter()
    with overwriter(str(tmp_path), blocks, sessions) as process:
        assert process.stdout is not None
        for session in range(sessions):
            handle = from_json(json.loads(process.stdout.readline()))
            fetching = Fetching(fetcher, pool)
            fetching.start(handle, straight(handle.blocks))
            outcomes[fetching.wait()] += 1
            if fetching.wait() is FINISHED:
                expected = np.array([pattern(session, index) for index in range(handle.blocks)], np.uint64)
                assert (words[: handle.blocks] == expected[:, None]).all(), session
    fetcher.close()
    assert set(outcomes) == {FINISHED, GONE}, outcomes
