"""Encoder outputs that fit the fake roles, a transport that does what the test says, and engines that take rows."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.roles.fake_engine import MODEL, FakeEngine, frontend
from tests.roles.fake_sessions import folded
from tests.roles.media_parts import media_intake
from triptych.core.encoded import EncodedItem, EncoderReference
from triptych.core.errors import InvalidRequest
from triptych.core.handles import Handle, RowLayout
from triptych.core.layout import Grid, ItemLayout, Run
from triptych.core.media import Modality
from triptych.core.request import GenerateRequest, Sampling, Stopping
from triptych.roles.adapters import Adapters
from triptych.roles.aggregated import Aggregated
from triptych.roles.contract import EngineDescription, RoleName
from triptych.roles.desk import Desk
from triptych.roles.intake import Intake
from triptych.roles.leases import Leases
from triptych.roles.live import LiveRequests
from triptych.roles.prefill import Prefill
from triptych.roles.reference_checks import RowTerms
from triptych.roles.row_intake import Landing, RowIntake, RowLimits
from triptych.transport.contract import FetchOutcome, FetchResult, SessionEvent
from triptych.transport.memory import MemoryExchange, MemoryFetcher, MemoryPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from triptych.core.handles import RowHandle
    from triptych.transport.contract import BlockMemory, Fetcher, Move

LAYOUT = RowLayout(1024)
ROW_BYTES = 48
"""Of float32: 12 numbers. A block holds 21 rows and a third."""
BLOCKS = 12
BACKEND = "memory"
VOCABULARY = 2048
_names = itertools.count()


def terms(*, blocks: int = BLOCKS, layout: RowLayout = LAYOUT, **changes: Any) -> RowTerms:
    plain = RowTerms(
        fingerprint=frontend().processor.fingerprint,
        dtype="float32",
        row_bytes=ROW_BYTES,
        backend=BACKEND,
        layout=layout,
        arena_blocks=blocks,
        cache_bytes=100 * 1024,
    )
    return replace(plain, **changes)


def layout_of(h: int = 4, w: int = 4, key: int = 1) -> ItemLayout:
    """A picture of h x w merged cells."""
    return ItemLayout(
        modality=Modality.IMAGE,
        runs=(Run(0, h * w),),
        rows=h * w,
        encoder_tokens=4 * h * w,
        grid=Grid(1, 2 * h, 2 * w),
        content_key=key.to_bytes(32, "big"),
    )


def reference(layout: ItemLayout | None = None, handle: RowHandle | None = None, **changes: Any) -> EncoderReference:
    """One that everything about is right; ``changes`` are the item's or its own."""
    layout = layout or layout_of()
    if handle is None:
        blocks = LAYOUT.blocks(layout.rows * ROW_BYTES)
        handle = Handle(f"rows-{next(_names)}", BACKEND, "encoder-1", LAYOUT, blocks, b"")
    item = EncodedItem(layout, handle, ROW_BYTES, "float32")
    plain = EncoderReference(item, frontend().processor.fingerprint, time.time_ns() + 3600 * 10**9)
    own = {name: value for name, value in changes.items() if name in ("fingerprint", "expires_unix_nanos")}
    rest = {name: value for name, value in changes.items() if name not in own}
    return replace(plain, item=replace(item, **rest), **own)


def numbers(layout: ItemLayout, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Rows of finite numbers, as bytes: [rows, row bytes]."""
    rng = np.random.default_rng([seed, int.from_bytes(layout.content_key, "big")])
    return rng.standard_normal((layout.rows, ROW_BYTES // 4)).astype(np.float32).view(np.uint8)


def in_blocks(rows: npt.NDArray[np.uint8], layout: RowLayout = LAYOUT) -> npt.NDArray[np.uint8]:
    """The same as they lie in an arena, with junk behind them: [blocks, block bytes]."""
    flat = rows.reshape(-1)
    blocks = np.full((layout.blocks(len(flat)), layout.block_bytes), 0xFF, np.uint8)
    blocks.reshape(-1)[: len(flat)] = flat
    return blocks


# -- a transport that does what the test says --------------------------------------------------------------------------


@dataclass(eq=False)
class HeldFetch:
    """Under way until the test ends it."""

    handle: RowHandle
    moves: Sequence[Move]
    seconds: float
    done: Callable[[FetchResult], None]
    memory: npt.NDArray[np.uint8]
    cancels: int = 0
    ended: bool = False

    @property
    def targets(self) -> list[int]:
        return [move.target for move in self.moves]

    def cancel(self) -> None:
        self.cancels += not self.ended  # its end may not have been heard yet

    def finish(self, rows: npt.NDArray[np.uint8], moved: int | None = None) -> None:
        """All of it is there."""
        blocks = in_blocks(rows)
        for move in self.moves:
            self.memory[move.target] = blocks[move.source]
        self.end(FetchOutcome.FINISHED, moved=blocks.nbytes if moved is None else moved)

    def end(self, outcome: FetchOutcome, reason: str = "", moved: int = 0) -> None:
        assert not self.ended
        self.ended = True
        self.done(FetchResult(outcome, reason, moved))


@dataclass
class HeldFetcher:
    """Remembers what it is to fetch."""

    pool: BlockMemory
    begun: list[HeldFetch] = field(default_factory=list)
    refuse: str = ""
    """What ``check`` says is wrong."""
    breaks_at: int = -1
    """The number of the fetch that raises."""

    def check(self, handle: RowHandle) -> None:
        if self.refuse:
            raise InvalidRequest(self.refuse)

    def fetch(
        self, handle: RowHandle, moves: Sequence[Move], seconds: float, done: Callable[[FetchResult], None]
    ) -> HeldFetch:
        if len(self.begun) == self.breaks_at:
            raise RuntimeError("a bug")
        self.begun.append(HeldFetch(handle, moves, seconds, done, self.pool.memory))
        return self.begun[-1]

    def statistics(self) -> dict[str, float]:
        return {"fetches": sum(not fetch.ended for fetch in self.begun)}

    def close(self) -> None:
        pass


@dataclass
class Held:
    """Rows that come in as the test says."""

    rows: RowIntake
    landing: Landing
    fetcher: HeldFetcher

    @classmethod
    def of(cls, blocks: int = BLOCKS, limits: RowLimits | None = None) -> Held:
        """Call it on the event loop."""
        landing = Landing.of(blocks * LAYOUT.block_bytes, LAYOUT)
        fetcher = HeldFetcher(landing.memory)
        return cls(RowIntake(terms(blocks=blocks), landing, fetcher, limits), landing, fetcher)

    def integrity(self) -> None:
        """What is held is what is under way or being copied."""
        held = {block: 1 for block in range(self.landing.blocks.total) if self.landing.blocks.holds(block)}
        self.landing.blocks.check_integrity(held)
        written = [target for fetch in self.fetcher.begun if not fetch.ended for target in fetch.targets]
        assert len(set(written)) == len(written)
        assert set(written) <= set(held)

    def nothing(self) -> bool:
        """Whether nothing is held any more."""
        now = self.rows.statistics()
        return not any(now[name] for name in ("waiting", "fetching", "held_bytes", "quarantined_bytes"))


async def until(condition: Callable[[], bool]) -> None:
    """Let things happen until it holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


# -- an encoder engine, as far as rows come from it --------------------------------------------------------------------


class Encoder:
    """Publishes rows of its arena through this process."""

    def __init__(self, blocks: int = 64, layout: RowLayout = LAYOUT) -> None:
        self.exchange = MemoryExchange()
        self._landing = Landing.of(blocks * layout.block_bytes, layout)
        self._blocks: dict[str, tuple[int, ...]] = {}
        self._publisher = MemoryPublisher(self._landing.memory, "encoder-1", self._tell, self.exchange)

    def encode(self, layout: ItemLayout, rows: npt.NDArray[np.uint8] | None = None) -> EncoderReference:
        """A reference to rows of an item."""
        data = in_blocks(numbers(layout) if rows is None else rows, self._landing.memory.layout)
        blocks = self._landing.blocks.allocate(len(data))
        assert blocks is not None
        self._landing.memory.memory[list(blocks)] = data
        name = f"rows-{next(_names)}"
        self._blocks[name] = blocks
        self._publisher.open(name)
        self._publisher.publish(name, blocks)
        return reference(layout, self._publisher.seal(name))

    def _tell(self, name: str, event: SessionEvent) -> None:
        """On the event loop, as everything of this transport."""
        if event is SessionEvent.FREE:
            self._landing.blocks.release(self._blocks.pop(name))

    def release(self, one: EncoderReference) -> None:
        """Nobody shall take it."""
        self._publisher.withdraw(one.item.handle.session_id)

    def waits(self, one: EncoderReference) -> bool:
        """Whether it can still be taken."""
        return ("encoder-1", one.item.handle.session_id) in self.exchange.sessions

    def fetcher(self, landing: Landing) -> Fetcher:
        return MemoryFetcher(landing.memory, self.exchange)


# -- engines that take rows --------------------------------------------------------------------------------------------


def consumer(
    engine: FakeEngine,
    rows: RowIntake | None,
    *,
    role: RoleName = RoleName.AGGREGATED,
    requires_rows: bool = False,
    max_outputs: int = 8,
) -> Desk:
    """An aggregated or a prefill engine whose rows come in by ``rows``. Call it on the event loop."""
    description = EngineDescription(
        role=role,
        instance_id="incarnation",
        device="cpu",
        dtype="float32",
        block_size=16,
        num_blocks=100,
        max_running_requests=8,
        max_batched_tokens=256,
        max_num_sequences=max_outputs,
        guided=False,
        max_loras=0,
        kv_event_buffer=0,
        kv_event_heartbeat=3600.0,
    )
    front = frontend(VOCABULARY)
    intake = Intake(front, Adapters(_nothing, 0), None, media_intake(front), rows, requires_rows=requires_rows)
    live = LiveRequests(engine, frontend().tokenizer, max_outputs)
    if role is RoleName.AGGREGATED:
        return Desk(description, intake, engine, live, Aggregated(intake, engine, live))
    leases = Leases(engine, 3600)
    return Desk(description, intake, engine, live, Prefill(intake, engine, live, leases, MODEL), leases)


def with_references(*references: EncoderReference, **changes: Any) -> GenerateRequest:
    """A prompt of token ids with a marker for each."""
    plain = GenerateRequest(
        "r",
        "demo",
        folded(*[b""] * len(references)),
        sampling=Sampling(seed=3),
        stopping=Stopping(max_tokens=4),
        references=references,
    )
    return replace(plain, **changes)


def _nothing(info: object) -> Any:
    raise AssertionError(f"{info} was read")
