"""Engines of every role behind real servers, all in this process; what they hand over goes through its memory."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from triptych.cli.assemble import ROLES, Moves, Rows, encoder
from triptych.cli.loaded import load, load_encoder
from triptych.cli.media import MediaFlags
from triptych.core.config import MIB
from triptych.roles.contract import RoleName
from triptych.rpc.server import serve_role
from triptych.transport.memory import MemoryExchange, MemoryFetcher, MemoryPublisher

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from triptych.cli.options import EngineOptions
    from triptych.roles.contract import Role
    from triptych.transport.contract import BlockMemory

ROW_BYTES = 4 * MIB


class Memory:
    """KV, or encoder rows, between engines of this process."""

    backend = "memory"

    def __init__(self, exchange: MemoryExchange) -> None:
        self._exchange = exchange

    def publisher(self, pool: BlockMemory, instance_id: str, tell: Any) -> MemoryPublisher:
        return MemoryPublisher(pool, instance_id, tell, self._exchange)

    def fetcher(self, pool: BlockMemory, instance_id: str) -> MemoryFetcher:
        return MemoryFetcher(pool, self._exchange)


class Build(NamedTuple):
    """What engines of one test are made of."""

    model: str
    options: EngineOptions
    exchange: MemoryExchange
    requires_rows: bool
    """Whether those that compute prompts take media by their rows only."""
    media: MediaFlags = MediaFlags()

    def moves(self, cleanup: AsyncExitStack) -> Moves:
        moves = Moves(Memory(self.exchange), 60)
        cleanup.callback(moves.close)
        return moves

    def role(self, name: RoleName, cleanup: AsyncExitStack) -> Role:
        if name is RoleName.ENCODER:
            tower = load_encoder(self.model, self.options, no_progress, self.media)
            return encoder(tower, uuid.uuid4().hex, Rows(self.moves(cleanup), ROW_BYTES), check=True)
        reads = name is not RoleName.DECODE and not self.requires_rows
        loaded = load(self.model, self.options, no_progress, self.media, tower=reads)
        moves = None if name is RoleName.AGGREGATED else self.moves(cleanup)
        rows = Rows(self.moves(cleanup), ROW_BYTES, required=True) if self.requires_rows else None
        return ROLES[name](loaded, uuid.uuid4().hex, moves, rows, check=True)


def no_progress(done: int, total: int) -> None:
    pass


async def host(files: dict[str, bytes], cleanup: AsyncExitStack) -> int:
    """The port of a server on this machine that gives files away by their names."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        found = files.get(head.split(b" ")[1].decode().removeprefix("/"))
        body = b"" if found is None else found
        writer.write(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n" % (404 if found is None else 200, len(body)))
        writer.write(body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    cleanup.callback(server.close)
    return int(server.sockets[0].getsockname()[1])


async def start(name: RoleName, build: Build, cleanup: AsyncExitStack) -> str:
    """The address of an engine."""
    role = build.role(name, cleanup)
    cleanup.push_async_callback(role.drain, 0)
    server = await serve_role(role, "127.0.0.1", 0, on_shutdown=lambda grace: True)
    cleanup.push_async_callback(server.stop, None)
    return server.address


async def listen(name: RoleName, build: Build, cleanup: AsyncExitStack) -> Any:
    """A channel to an engine."""
    channel = grpc.aio.insecure_channel(await start(name, build, cleanup))
    cleanup.push_async_callback(channel.close)
    return channel
