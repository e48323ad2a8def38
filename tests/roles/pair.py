"""One engine, and two that do the same together: the demo model, all in this process."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from tests.roles.running import Answered, ask_all
from triptych.cli.assemble import Moves, aggregated, decode, prefill
from triptych.cli.flags import DEMO
from triptych.cli.loaded import load
from triptych.core.events import PrefillReady, Prompt
from triptych.core.session import KvSession
from triptych.transport.memory import MemoryExchange, MemoryFetcher, MemoryPublisher
from triptych.wire.codec_session import SessionCodec
from triptych.wire.gen import kv_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from triptych.cli.loaded import LoadedModel
    from triptych.cli.options import EngineOptions
    from triptych.core.request import GenerateRequest
    from triptych.roles.desk import Desk
    from triptych.transport.contract import BlockMemory, SessionEvent

CODEC = SessionCodec()


class Models(NamedTuple):
    """The demo model three times: each engine's thread needs its own."""

    whole: LoadedModel
    prefill: LoadedModel
    decode: LoadedModel
    """Without the encoder."""


def load_models(chosen: EngineOptions) -> Models:
    def one(*, tower: bool) -> LoadedModel:
        return load(DEMO, chosen, lambda done, total: None, tower=tower)

    return Models(one(tower=True), one(tower=True), one(tower=False))


class Memory:
    """KV between the engines of this process."""

    backend = "memory"

    def __init__(self) -> None:
        self.exchange = MemoryExchange()

    def publisher(
        self, pool: BlockMemory, instance_id: str, tell: Callable[[str, SessionEvent], None]
    ) -> MemoryPublisher:
        return MemoryPublisher(pool, instance_id, tell, self.exchange)

    def fetcher(self, pool: BlockMemory, instance_id: str) -> MemoryFetcher:
        return MemoryFetcher(pool, self.exchange)


@dataclass
class Pair:
    """Prefill and decode, and beside them the engine that does both."""

    whole: Desk
    prefill: Desk
    decode: Desk
    memory: Memory

    async def idle(self) -> None:
        """Wait until nothing is held anywhere, but by the prefix caches."""
        for _ in range(6000):
            if not self._held():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"still held: {self._held()}")

    def _held(self) -> list[str]:
        held = []
        for name in ("prefill", "decode"):
            role = getattr(self, name)
            load, scheduler = role.load(), role.statistics()["scheduler"]
            counts = {
                "running": load.running_requests,
                "queued": load.queued_requests,
                "used blocks": load.used_blocks,
                "permits": role.statistics()["media_admission"]["shares_in_use"],
                "encoder rows": role.statistics()["encoder_cache"]["held_bytes"],
                "waiting sessions": role.statistics().get("kv_sessions", {}).get("waiting", 0),
                **{what: scheduler[what] for what in ("sessions", "leased_blocks", "loads", "loading_blocks")},
            }
            held += [f"{name}: {count} {what}" for what, count in counts.items() if count]
        return held + [f"transport: {key}" for key in self.memory.exchange.sessions]


@asynccontextmanager
async def running_pair(models: Models, *, ttl: float = 60.0) -> AsyncIterator[Pair]:
    """The three are drained in the end."""
    memory = Memory()
    moves = Moves(memory, ttl)
    roles = [aggregated(models.whole, uuid.uuid4().hex, check=True)]
    try:
        roles.append(prefill(models.prefill, uuid.uuid4().hex, moves, check=True))
        roles.append(decode(models.decode, uuid.uuid4().hex, moves, check=True))
        yield Pair(*roles, memory)
    finally:
        for role in roles:
            await role.drain(0)
        await asyncio.to_thread(moves.close)


@asynccontextmanager
async def running_equals(models: Models) -> AsyncIterator[tuple[Desk, Desk]]:
    """Two aggregated engines, each of which can do either part."""
    moves = Moves(Memory(), 60.0)
    roles = [aggregated(model, uuid.uuid4().hex, moves, check=True) for model in (models.whole, models.prefill)]
    try:
        yield roles[0], roles[1]
    finally:
        for role in roles:
            await role.drain(0)
        await asyncio.to_thread(moves.close)


def travelled(session: KvSession) -> KvSession:
    """As it comes out of the wire at the other engine."""
    return CODEC.decode(kv_pb2.KvSessionRef.FromString(CODEC.encode(session).SerializeToString()))


class Begun(NamedTuple):
    """What a prefill engine has said."""

    ready: PrefillReady
    prompt: Prompt | None

    @property
    def session(self) -> KvSession:
        """As it travels."""
        assert isinstance(self.ready.session, KvSession)
        return travelled(self.ready.session)


async def begin(role: Desk, request: GenerateRequest) -> Begun:
    """The first leg, as routers send it: of the answer's length they say that it is one token."""
    stopping = replace(request.stopping, max_tokens=max(1, request.stopping.min_tokens))
    answer = await role.accept(replace(request, handoff=True, stopping=stopping))
    try:
        events = [event async for event in answer]
    finally:
        await answer.aclose()
    *prompts, ready = events
    assert isinstance(ready, PrefillReady), ready
    assert len(prompts) == request.logprobs.prompt
    return Begun(ready, prompts[0] if prompts else None)


async def ask_apart(pair: Pair, request: GenerateRequest) -> list[Answered]:
    """Prefill, then decode, which gets no picture; the outputs in order."""
    begun = await begin(pair.prefill, request)
    outputs = await ask_all(pair.decode, replace(request, session=begun.session, media=()))
    return [output._replace(prompt=begun.prompt) for output in outputs]
