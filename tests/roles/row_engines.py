"""The encoder apart: an encoder engine, engines that take its rows, and one that does all by itself; the demo model."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from tests.roles.pair import CODEC as SESSIONS
from tests.roles.pair import Memory
from tests.roles.running import Answered, ask_all
from triptych.cli.assemble import Moves, Rows, aggregated, decode, encoder, prefill
from triptych.cli.flags import DEMO
from triptych.cli.loaded import load, load_encoder
from triptych.core.config import MIB
from triptych.core.encoded import EncoderReference
from triptych.core.events import EncoderReady, PrefillReady
from triptych.core.request import EncodeOptions
from triptych.wire.codec_reference import ReferenceCodec
from triptych.wire.gen import encoder_pb2, kv_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from triptych.cli.loaded import LoadedModel, LoadedTower
    from triptych.cli.options import EngineOptions
    from triptych.cli.transports import Transport
    from triptych.core.request import GenerateRequest
    from triptych.core.session import Session
    from triptych.roles.desk import Desk

REFERENCES = ReferenceCodec()


class Models(NamedTuple):
    """The demo model as each engine has it, on a thread of its own."""

    whole: LoadedModel
    encoder: LoadedTower
    both: LoadedModel
    """Without the encoder, as the other two."""
    prefill: LoadedModel
    decode: LoadedModel


def load_models(chosen: EngineOptions) -> Models:
    def one(*, tower: bool) -> LoadedModel:
        return load(DEMO, chosen, lambda done, total: None, tower=tower)

    tower = load_encoder(DEMO, chosen, lambda done, total: None)
    return Models(one(tower=True), tower, one(tower=False), one(tower=False), one(tower=False))


@dataclass
class Engines:
    """E, PD, P and D, and beside them the engine that does it all."""

    whole: Desk
    encoder: Desk
    both: Desk
    prefill: Desk
    decode: Desk

    async def idle(self) -> None:
        """Wait until nothing is held anywhere, but by caches."""
        for _ in range(3000):
            if not self._held():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"still held: {self._held()}")

    def _held(self) -> list[str]:
        held = []
        for name in ("whole", "encoder", "both", "prefill", "decode"):
            role = getattr(self, name)
            load, ledgers = role.load(), role.statistics()
            counts = {
                "running": load.running_requests,
                "queued": load.queued_requests,
                "used blocks": load.used_blocks,
                "rows in use": ledgers["encoder_cache"]["held_bytes"],
                "waiting sessions": ledgers.get("kv_sessions", {}).get("waiting", 0),
                "waiting outputs": ledgers.get("encoder_outputs", {}).get("waiting", 0),
                "rows on their way": ledgers.get("row_intake", {}).get("held_bytes", 0),
                "waiting for rows": ledgers.get("row_intake", {}).get("waiting", 0),
            }
            held += [f"{name}: {count} {what}" for what, count in counts.items() if count]
        return held


@asynccontextmanager
async def running_engines(
    models: Models, rows: Transport | None = None, *, ttl: float = 60.0, quota: int = 4 * MIB
) -> AsyncIterator[Engines]:
    """All are drained in the end. Rows move by ``rows``, KV through memory."""
    kv, moves = Moves(Memory(), 60.0), Moves(rows or Memory(), ttl)
    taking = Rows(moves, quota, required=True)
    roles: list[Desk] = []
    try:
        roles.append(aggregated(models.whole, uuid.uuid4().hex, check=True))
        roles.append(encoder(models.encoder, uuid.uuid4().hex, Rows(moves, quota), check=True))
        roles.append(aggregated(models.both, uuid.uuid4().hex, None, taking, check=True))
        roles.append(prefill(models.prefill, uuid.uuid4().hex, kv, taking, check=True))
        roles.append(decode(models.decode, uuid.uuid4().hex, kv, check=True))
        yield Engines(*roles)
    finally:
        for role in roles:
            await role.drain(0)
        await asyncio.to_thread(moves.close)
        await asyncio.to_thread(kv.close)


async def encode(role: Desk, request: GenerateRequest) -> tuple[EncoderReference, ...]:
    """The references to a request's media, as they travel."""
    answer = await role.accept(replace(request, encode=EncodeOptions()))
    try:
        (ready,) = [event async for event in answer]
    finally:
        await answer.aclose()
    assert isinstance(ready, EncoderReady), ready
    return tuple(travelled(one) for one in ready.references)


def travelled(one: object) -> EncoderReference:
    """As it comes out of the wire at the other engine."""
    assert isinstance(one, EncoderReference)
    data = REFERENCES.encode(one).SerializeToString()
    return REFERENCES.decode(encoder_pb2.EncoderCacheRef.FromString(data))


async def referring(engines: Engines, request: GenerateRequest) -> GenerateRequest:
    """The same request with encoder outputs in place of its media."""
    if not request.media:
        return request
    return replace(request, media=(), references=await encode(engines.encoder, request))


async def ask_both(engines: Engines, request: GenerateRequest) -> list[Answered]:
    """E, then PD."""
    return await ask_all(engines.both, await referring(engines, request))


async def begin(engines: Engines, request: GenerateRequest) -> Session:
    """E, then P; the session as it travels."""
    answer = await engines.prefill.accept(replace(await referring(engines, request), handoff=True))
    try:
        events = [event async for event in answer]
    finally:
        await answer.aclose()
    ready = events[-1]
    assert isinstance(ready, PrefillReady), ready
    data = SESSIONS.encode(ready.session).SerializeToString()
    return SESSIONS.decode(kv_pb2.KvSessionRef.FromString(data))


async def ask_apart(engines: Engines, request: GenerateRequest) -> list[Answered]:
    """E, then P, then D, which gets no picture and no reference."""
    session = await begin(engines, request)
    return await ask_all(engines.decode, replace(request, media=(), session=session))
