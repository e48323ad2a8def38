"""Clients that go away while their pictures are encoded, handed over and used; nothing stays behind, ever."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from tests.chat_files import write_chat_files
from tests.rpc.engine_twin import finished
from tests.rpc.gateway_harness import Caller, asking, running, until
from tests.rpc.gateway_parts import Decode, Encoder, Prefill, Reader, Shelf
from triptych.core.errors import Overloaded, ReferenceNotFound
from triptych.core.events import Tokens
from triptych.wire.status import TransientFailure

if TYPE_CHECKING:
    from pathlib import Path

    from tests.rpc.engine_twin import EngineTwin


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_files(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.gateway.route.REFRESH_SECONDS", 0.01)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


async def leave(caller: Caller, where: EngineTwin) -> None:
    """Once the request is waited for there."""
    await where.waiting.wait()
    caller.gone.set()
    await caller.task
    assert where.ended.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_while_the_picture_is_encoded(directory: Path, shelf: Shelf, stream: bool) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    encoder.before = [asyncio.Event()]
    async with running(encoder, reader) as run:
        await leave(Caller(run, stream=stream, messages=asking(1, 2)), encoder)
        await until(run.nothing_is_held)
        assert encoder.aborted == [encoder.requests[0].request_id]
        assert encoder.released == []
        assert reader.requests == []
        assert shelf.fates == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_while_references_are_on_their_way(directory: Path, shelf: Shelf, stream: bool) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    gate = asyncio.Event()
    encoder.before, encoder.on_the_way = [gate], [asyncio.Event()]
    async with running(encoder, reader) as run:
        caller = Caller(run, stream=stream, messages=asking(1, 2))
        await encoder.waiting.wait()
        gate.set()
        await until(lambda: bool(shelf.fates))
        await leave(caller, encoder)
        await until(run.nothing_is_held)
        assert encoder.aborted == [encoder.requests[0].request_id]
        assert encoder.released == []
        assert shelf.each("released")


async def test_while_one_of_two_encoders_has_not_answered(directory: Path, shelf: Shelf) -> None:
    one, two, reader = Encoder(directory, shelf), Encoder(directory, shelf, "e:2"), Reader(directory, shelf=shelf)
    one.on_the_way = [asyncio.Event()]
    async with running(one, two, reader) as run:
        await run.all_ready()
        caller = Caller(run, messages=asking(*range(12)))
        await two.ended.wait()
        await leave(caller, one)
        await until(run.nothing_is_held)
        assert one.aborted == [one.requests[0].request_id]
        assert (one.released, two.aborted) == ([], [])
        assert len(two.released) == len(two.requests[0].media)
        assert shelf.each("released")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_while_rows_are_taken(directory: Path, shelf: Shelf, stream: bool, late: bool) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    reader.takes_late, reader.script = late, [asyncio.Event(), finished()]
    async with running(encoder, reader) as run:
        await leave(Caller(run, stream=stream, messages=asking(1, 2)), reader)
        await until(run.nothing_is_held)
        assert encoder.released == ["e:1/0/0", "e:1/0/1"]
        assert shelf.each("released" if late else "used")


@pytest.mark.parametrize("late", [False, True])
async def test_while_the_prompt_is_computed(directory: Path, shelf: Shelf, late: bool) -> None:
    encoder, prefill, decode = Encoder(directory, shelf), Prefill(directory, shelf=shelf), Decode(directory)
    prefill.takes_late, prefill.before = late, [asyncio.Event()]
    async with running(encoder, prefill, decode) as run:
        await leave(Caller(run, messages=asking(1, 2)), prefill)
        await until(run.nothing_is_held)
        assert prefill.aborted == [prefill.requests[0].request_id]
        assert encoder.released == ["e:1/0/0", "e:1/0/1"]
        assert shelf.each("released" if late else "used")


@pytest.mark.parametrize("amid", [False, True])
async def test_while_the_answer_is_decoded(directory: Path, shelf: Shelf, amid: bool) -> None:
    encoder, prefill, decode = Encoder(directory, shelf), Prefill(directory, shelf=shelf), Decode(directory)
    decode.script = [*([Tokens("any", (1,), "It")] if amid else []), asyncio.Event(), finished()]
    async with running(encoder, prefill, decode) as run:
        await leave(Caller(run, stream=True, messages=asking(1, 2)), decode)
        await until(run.nothing_is_held)
        assert prefill.aborted == ([] if amid else ["p:1/0"])
        assert encoder.released == encoder.aborted == []
        assert shelf.each("used")


async def test_while_another_encoder_is_tried(directory: Path, shelf: Shelf) -> None:
    one, two, reader = Encoder(directory, shelf), Encoder(directory, shelf, "e:2"), Reader(directory, shelf=shelf)
    one.failures = [Overloaded("full")]
    two.before = [asyncio.Event()]
    async with running(one, two, reader) as run:
        await run.all_ready()
        caller = Caller(run, messages=asking(*range(12)))
        await until(lambda: len(two.requests) == 2)
        await leave(caller, two)
        await until(run.nothing_is_held)
        assert sorted(two.aborted) == sorted(request.request_id for request in two.requests)
        assert shelf.fates == {}


async def test_a_gateway_that_ends_lets_everything_go_first(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    reader.takes_late, reader.script = True, [asyncio.Event(), finished()]
    async with running(encoder, reader) as run:
        await leave(Caller(run, messages=asking(1, 2)), reader)
    assert shelf.each("released")


async def test_an_encoder_that_is_gone_needs_no_telling(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    reader.takes_late, reader.script = True, [asyncio.Event(), finished()]
    async with running(encoder, reader) as run:
        caller = Caller(run, messages=asking(1, 2))
        await reader.waiting.wait()
        encoder.kill()
        await leave(caller, reader)
        await until(run.nothing_is_held)
        assert encoder.released == []


class Pause(asyncio.Event):
    """Some turns of the event loop, never the same number."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    async def wait(self) -> bool:  # type: ignore[override]
        for _ in range(self._chance.randrange(20)):
            await asyncio.sleep(0)
        return True


@pytest.mark.parametrize("seed", range(4))
async def test_everybody_leaves_at_any_moment(directory: Path, seed: int) -> None:
    chance, shelf = random.Random(seed), Shelf()
    encoders = Encoder(directory, shelf), Encoder(directory, shelf, "e:2")
    prefills = Prefill(directory, "p:1", shelf), Prefill(directory, "p:2", shelf)
    decodes = Decode(directory, "d:1"), Decode(directory, "d:2")
    pause, errors = Pause(chance), (Overloaded("full"), TransientFailure("lost"), ReferenceNotFound("spent"))
    for encoder in encoders:
        encoder.before, encoder.on_the_way = [pause], [pause]
        encoder.failures = [chance.choice(errors[:2]) for _ in range(10)]
    for prefill in prefills:
        prefill.before, prefill.takes_late = [pause], bool(seed % 2)
        prefill.failures = [chance.choice(errors) for _ in range(10)]
    for decode in decodes:
        decode.script.insert(0, pause)
    async with running(*encoders, *prefills, *decodes) as run:
        await run.all_ready()
        callers = [Caller(run, stream=bool(n % 2), messages=asking(n % 9, n % 5)) for n in range(100)]
        while live := [caller for caller in callers if not caller.task.done()]:
            for _ in range(chance.randrange(8)):
                await asyncio.sleep(0)
            if any(engine.in_flight for engine in run.gateway.router.engines):
                chance.choice(live).gone.set()
        await until(run.nothing_is_held)
        assert shelf.each("used", "released")
        assert {fates[0] for fates in shelf.fates.values()} == {"used", "released"}
