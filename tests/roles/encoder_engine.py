"""An encoder engine with a real tower in this process, and what an engine does that takes its rows."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tests.pictures_here import decode_picture
from tests.roles.encoder_asks import ready_of
from tests.roles.pair import Memory
from triptych.cli.assemble import Moves, Rows, encoder
from triptych.cli.loaded import load_encoder
from triptych.cli.options import EngineOptions
from triptych.core.config import MIB
from triptych.core.media import RawBytes
from triptych.core.media_options import PictureOptions
from triptych.engine.row_arena import ROW_LAYOUT
from triptych.media.limits import RequestBudget
from triptych.processors.identity import content_key
from triptych.transport.contract import BlockMemory, FetchOutcome, Move
from triptych.transport.memory import MemoryFetcher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import torch

    from triptych.cli.loaded import LoadedTower
    from triptych.core.encoded import EncodedItem, EncoderReference
    from triptych.core.encoder_input import EncoderInput
    from triptych.core.request import GenerateRequest
    from triptych.roles.desk import Desk
    from triptych.transport.contract import FetchResult


def load_tower(directory: Path, **changes: object) -> LoadedTower:
    """A checkpoint's tower; the model is known as ``demo``."""
    return load_encoder(str(directory), EngineOptions(served_name="demo", **changes), lambda done, total: None)


class Taken(NamedTuple):
    """What a consumer got."""

    outcome: FetchOutcome
    data: bytes
    """All rows of the item."""


class Consumer:
    """Takes rows into blocks of its own."""

    def __init__(self, memory: Memory, blocks: int = 64) -> None:
        room = np.zeros((blocks, ROW_LAYOUT.block_bytes), np.uint8)
        self._pool = BlockMemory(ROW_LAYOUT, room, np.zeros(blocks, np.int64))
        self._fetcher = MemoryFetcher(self._pool, memory.exchange)

    def take(self, item: EncodedItem) -> Taken:
        """Now."""
        handle = item.handle
        results: list[FetchResult] = []
        self._fetcher.check(handle)
        self._fetcher.fetch(handle, [Move(index, index) for index in range(handle.blocks)], 60, results.append)
        size = item.layout.rows * item.row_bytes
        assert handle.blocks == ROW_LAYOUT.blocks(size)
        data = self._pool.memory[: handle.blocks].reshape(-1)[:size].tobytes()
        return Taken(results[0].outcome, data)


@dataclass
class Bench:
    """One encoder engine, and who takes its rows."""

    role: Desk
    memory: Memory
    consumer: Consumer
    loaded: LoadedTower

    async def encode(self, request: GenerateRequest) -> tuple[EncoderReference, ...]:
        """To its end."""
        answer = await self.role.accept(request)
        try:
            return (await ready_of(answer)).references
        finally:
            await answer.aclose()

    def inputs(self, request: GenerateRequest) -> list[EncoderInput]:
        """Its media as the tower reads them."""
        processor, budget = self.loaded.frontend.processor, RequestBudget(self.loaded.frontend.limits)
        opened = []
        for index, item in enumerate(request.media):
            assert isinstance(item.source, RawBytes)
            picture = decode_picture(index, item.source.data, budget, fit=processor.picture_fit(PictureOptions()))
            key = content_key(
                item.source.data,
                options=PictureOptions().canonical(),
                fingerprint=processor.fingerprint,
                salt=request.cache.salt,
                uuid=item.uuid,
            )
            opened.append(processor.encoder_input(index, picture, key))
        return opened

    def rows(self, request: GenerateRequest) -> list[torch.Tensor]:
        """Of each of its media, straight from the tower, all in one call."""
        spec = self.loaded.model.spec
        return [rows.to(spec.dtype) for rows in self.loaded.model.tower.encode(self.inputs(request))]

    def held(self) -> dict[str, float]:
        """All that is held for somebody now."""
        statistics = self.role.statistics()
        counts = {
            **{what: statistics["scheduler"][what] for what in ("sessions", "leased_bytes", "held_bytes")},
            "running": self.role.load().running_requests,
            "queued": self.role.load().queued_requests,
            "encoder rows": statistics["encoder_cache"]["held_bytes"],
            "permits": statistics["media_admission"]["shares_in_use"],
            "outputs": statistics["encoder_outputs"]["waiting"],
            "in the transport": len(self.memory.exchange.sessions),
        }
        return {what: count for what, count in counts.items() if count}

    async def idle(self) -> None:
        """Wait until nothing is held."""
        for _ in range(3000):
            if not self.held():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"still held: {self.held()}")


@asynccontextmanager
async def running_encoder(loaded: LoadedTower, *, ttl: float = 60.0, quota: int = 4 * MIB) -> AsyncIterator[Bench]:
    """It is drained in the end."""
    memory = Memory()
    moves = Moves(memory, ttl)
    role = encoder(loaded, uuid.uuid4().hex, Rows(moves, quota), check=True)
    try:
        yield Bench(role, memory, Consumer(memory), loaded)
    finally:
        await role.drain(0)
        await asyncio.to_thread(moves.close)
        assert memory.exchange.sessions == {}
