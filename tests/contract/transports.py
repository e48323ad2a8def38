"""The transports that the suite runs over, and what it needs to drive one. A new transport is one more row."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from triptych.core.handles import KvLayout, RowLayout
from triptych.transport.contract import BlockMemory, FetchOutcome, Move, SessionEvent, SessionState
from triptych.transport.memory import MemoryExchange, MemoryFetcher, MemoryPublisher
from triptych.transport.nixl_agent import NixlOptions
from triptych.transport.nixl_fetcher import NixlFetcher
from triptych.transport.nixl_publisher import NixlPublisher
from triptych.transport.shared_dir_fetcher import SharedDirFetcher
from triptych.transport.shared_dir_publisher import SharedDirLimits, SharedDirPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from triptych.core.handles import Handle
    from triptych.transport.contract import Fetch, Fetcher, FetchResult, Publisher

    Tell = Callable[[str, SessionEvent], None]

PATIENCE = 60.0
"""Seconds after which a test gives up. Nothing is expected to take them."""
ORPHAN_SECONDS = 0.2
SMALL = KvLayout(layers=2, kv_heads=2, head_size=8, block_size=4, dtype="float32", itemsize=4)
"""1 KiB a block."""
LARGE = KvLayout(layers=4, kv_heads=8, head_size=64, block_size=16, dtype="float32", itemsize=4)
"""256 KiB a block."""
SMALL_ROWS = RowLayout(SMALL.block_bytes)
LARGE_ROWS = RowLayout(2**16)

BlockLayout = KvLayout | RowLayout
ANY_LAYOUT = pytest.mark.parametrize("layout", [SMALL, SMALL_ROWS], ids=["kv", "rows"])
"""Transports know no difference: a few tests show it."""


@dataclass(frozen=True, slots=True)
class TransportRow:
    """How one implementation is built."""

    name: str
    place: Callable[[Path], Any]
    """What both sides are given, from a directory that is the test's own. Text, where ``processes`` is set."""
    publisher: Callable[[Any, BlockMemory, str, Tell], Publisher]
    """From the place, the pool, the instance id and ``tell``."""
    fetcher: Callable[[Any, BlockMemory, str], Fetcher]
    """From the place, the pool and the instance id."""
    leftovers: Callable[[Any], Sequence[str]]
    """What is still in the place after both sides were closed; nothing should be."""
    processes: bool
    """Whether the sides may be two processes."""
    inherits: bool = False
    """Whether what a killed consumer was taking can be taken again before it is withdrawn."""
    usable: Callable[[], bool] = lambda: True
    """Whether what it needs is installed."""


def _listing(place: str) -> list[str]:
    return os.listdir(place) if Path(place).exists() else []


TRANSPORTS = {
    row.name: row
    for row in (
        TransportRow(
            name="memory",
            place=lambda _: MemoryExchange(),
            publisher=lambda place, pool, instance, tell: MemoryPublisher(pool, instance, tell, place),
            fetcher=lambda place, pool, _: MemoryFetcher(pool, place),
            leftovers=lambda place: [str(key) for key in place.sessions],
            processes=False,
        ),
        TransportRow(
            name="shared-dir",
            place=lambda directory: str(directory / "kv"),
            publisher=lambda place, pool, instance, tell: SharedDirPublisher(
                pool, instance, tell, Path(place), SharedDirLimits(orphan_seconds=ORPHAN_SECONDS)
            ),
            fetcher=lambda place, pool, instance: SharedDirFetcher(pool, instance, Path(place), ORPHAN_SECONDS),
            leftovers=_listing,
            processes=True,
            inherits=True,
        ),
        TransportRow(
            name="nixl",
            place=lambda directory: f"secret of {directory}",
            publisher=lambda place, pool, instance, tell: NixlPublisher(
                pool, instance, tell, NixlOptions(place.encode())
            ),
            fetcher=lambda place, pool, instance: NixlFetcher(pool, instance, NixlOptions(place.encode())),
            leftovers=lambda _: [],
            processes=True,
            usable=lambda: importlib.util.find_spec("nixl_cu12") is not None,
        ),
    )
}


def rows(*, processes: bool = False) -> list[Any]:
    """The transports as parameters of a test; with ``processes`` those whose sides may be two of them."""
    return [
        pytest.param(row, id=row.name, marks=pytest.mark.skipif(not row.usable(), reason=f"no {row.name} here"))
        for row in TRANSPORTS.values()
        if row.processes or not processes
    ]


def straight(blocks: int) -> list[Move]:
    """All blocks, each to the same place."""
    return [Move(index, index) for index in range(blocks)]


def make_pool(layout: BlockLayout, blocks: int, seed: int) -> BlockMemory:
    """A pool of random bytes: no two blocks are alike, and no two seeds."""
    rng = np.random.default_rng(seed)
    memory = rng.integers(0, 256, (blocks, layout.block_bytes), dtype=np.uint8)
    return BlockMemory(layout, memory, np.zeros(blocks, np.int64))


class Told:
    """What a publisher says of its sessions; complains when it says too much, or in the wrong order."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self._heard: list[tuple[str, SessionEvent]] = []
        self._changed = threading.Condition()

    def __call__(self, session_id: str, event: SessionEvent) -> None:
        with self._changed:
            if (session_id, event) in self._heard:
                self.wrong.append(f"{session_id} {event} twice")
            if event is SessionEvent.TAKEN and (session_id, SessionEvent.FREE) not in self._heard:
                self.wrong.append(f"{session_id} taken before it was free")
            self._heard.append((session_id, event))
            self._changed.notify_all()

    def has(self, session_id: str, event: SessionEvent) -> bool:
        return (session_id, event) in self._heard

    def wait(self, session_id: str, event: SessionEvent) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.has(session_id, event), PATIENCE), f"{session_id} never {event}"

    def free(self) -> set[str]:
        return {session_id for session_id, event in self._heard if event is SessionEvent.FREE}


class Fetching:
    """One fetch and its end; keeps what the targets held then, and overwrites them as their next owner would."""

    MARK = 0xEE

    def __init__(self, fetcher: Fetcher, pool: BlockMemory) -> None:
        self.wrong: list[str] = []
        self.result: FetchResult | None = None
        self.held: dict[int, bytes] = {}
        """By source: what arrived."""
        self._fetcher = fetcher
        self._pool = pool
        self._moves: Sequence[Move] = ()
        self._ended = threading.Event()
        self._fetch: Fetch | None = None
        self._marks = False

    def start(
        self, handle: Handle[Any], moves: Sequence[Move], seconds: float = PATIENCE, *, marks: bool = False
    ) -> None:
        self._moves, self._marks = moves, marks
        self._fetch = self._fetcher.fetch(handle, moves, seconds, self._done)

    def _done(self, result: FetchResult) -> None:
        if self._ended.is_set():
            self.wrong.append(f"ended twice: {self.result}, {result}")
        for move in self._moves:
            self.held[move.source] = self._pool.memory[move.target].tobytes()
            if self._marks:
                self._pool.memory[move.target] = self.MARK
        self.result = result
        self._ended.set()

    def cancel(self) -> None:
        assert self._fetch is not None
        self._fetch.cancel()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> FetchOutcome:
        assert self._ended.wait(PATIENCE), "the fetch never ended"
        assert self.result is not None
        assert bool(self.result.reason) == (self.result.outcome is not FetchOutcome.FINISHED)
        return self.result.outcome

    def check_marks(self) -> None:
        """Nothing has written into the targets since the fetch ended."""
        if self._marks:
            assert all((self._pool.memory[move.target] == self.MARK).all() for move in self._moves)


class Sides:
    """A producer and a consumer of one transport."""

    def __init__(self, transport: TransportRow, place: Any, layout: BlockLayout, blocks: int) -> None:
        self.transport = transport
        self.place = place
        self.told = Told()
        self.source = make_pool(layout, blocks, 1)
        self.target = make_pool(layout, blocks, 2)
        self.instance = uuid.uuid4().hex
        self.publisher = transport.publisher(place, self.source, self.instance, self.told)
        self.fetcher = transport.fetcher(place, self.target, uuid.uuid4().hex)
        self.opened: list[str] = []
        self.fetches: list[Fetching] = []

    def open(self) -> str:
        session_id = uuid.uuid4().hex
        self.publisher.open(session_id)
        self.opened.append(session_id)
        return session_id

    def offer(self, blocks: Sequence[int]) -> Handle[Any]:
        """A sealed session of these blocks."""
        session_id = self.open()
        self.publisher.publish(session_id, blocks)
        return self.publisher.seal(session_id)

    def fetch(self, handle: Handle[Any], moves: Sequence[Move], **more: Any) -> Fetching:
        self.fetcher.check(handle)
        fetching = Fetching(self.fetcher, self.target)
        self.fetches.append(fetching)
        fetching.start(handle, moves, **more)
        return fetching

    def take(self, handle: Handle[Any], moves: Sequence[Move], **more: Any) -> FetchOutcome:
        return self.fetch(handle, moves, **more).wait()

    def wait_for_return(self, handle: Handle[Any]) -> SessionState:
        """How the session stands once nobody is taking it."""
        wait_until(lambda: self.publisher.state(handle.session_id) is not SessionState.TAKING, "it never came back")
        return self.publisher.state(handle.session_id)

    def settled(self) -> bool:
        """Whether both hold nothing any more."""
        produced, consumed = self.publisher.statistics(), self.fetcher.statistics()
        held = [produced[name] for name in ("sessions", "bytes")]
        held += [consumed[name] for name in ("fetches", "bytes", "overdue", "overdue_bytes")]
        return not any(held)

    def close(self, *, consumer_first: bool = True) -> None:
        """Close both, and check what holds whatever happened before."""
        ends = [self.fetcher.close, self.publisher.close]
        for end in ends if consumer_first else reversed(ends):
            end()
        self.fetcher.close()
        self.publisher.close()
        assert self.told.free() == set(self.opened)
        assert not self.told.wrong
        for fetching in self.fetches:
            assert fetching.ended
            assert not fetching.wrong
        assert self.settled()
        assert not self.transport.leftovers(self.place)


@contextlib.contextmanager
def sides(transport: TransportRow, directory: Path, layout: BlockLayout = SMALL, blocks: int = 8) -> Iterator[Sides]:
    """Both sides for the length of a test, and the checks at its end if it gets there."""
    both = Sides(transport, transport.place(directory), layout, blocks)
    try:
        yield both
    except BaseException:
        both.fetcher.close()
        both.publisher.close()
        raise
    both.close()


def wait_until(condition: Callable[[], bool], reason: str) -> None:
    """Look again until it is so."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError(reason)
