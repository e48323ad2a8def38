"""References that are gone, refused, or not used; each is used or let go, once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.chat_files import write_chat_files
from tests.rpc.engine_twin import EngineTwin
from tests.rpc.gateway_harness import asking, error_of, running, until
from tests.rpc.gateway_parts import Decode, Encoder, Prefill, Reader, Shelf
from triptych.core.errors import (
    Draining,
    Internal,
    InvalidRequest,
    KvSessionNotFound,
    KvTransferFailed,
    Overloaded,
    ReferenceMismatch,
    ReferenceNotFound,
    RowTransferFailed,
)
from triptych.core.events import Failed, Tokens
from triptych.wire.status import TransientFailure

if TYPE_CHECKING:
    from pathlib import Path

    from triptych.core.errors import TriptychError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_files(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.gateway.route.REFRESH_SECONDS", 0.01)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.mark.parametrize(
    "error",
    [
        ReferenceNotFound("media item 1: spent"),
        RowTransferFailed("media item 1: lost"),
        KvSessionNotFound("spent"),
        KvTransferFailed("lost"),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
async def test_items_are_encoded_again_when_their_rows_are_gone(
    directory: Path, shelf: Shelf, error: TriptychError, apart: bool
) -> None:
    encoder, reader = Encoder(directory, shelf), (Prefill if apart else Reader)(directory, shelf=shelf)
    reader.failures = [error]
    async with running(encoder, reader, *([Decode(directory)] if apart else [])) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(1, 2))).status_code == 200
        assert reader.offered == [["e:1/0/0", "e:1/0/1"], ["e:1/1/0", "e:1/1/1"]]
        await until(run.nothing_is_held)
        assert encoder.released == ["e:1/0/0", "e:1/0/1"]
        assert shelf.each("used", "released")


async def test_rows_that_go_on_getting_lost_are_an_error(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    reader.failures = [RowTransferFailed(f"media item {n}: lost") for n in (1, 0, 1, 1)]
    async with running(encoder, reader) as run:
        response = await run.chat(messages=asking(1, 2))
        assert response.status_code == 503
        assert error_of(response)["param"] == "messages[0].content[0]"
        assert (len(encoder.requests), len(reader.requests)) == (2, 2)
        await until(run.nothing_is_held)
        assert shelf.each("released")
        assert len(encoder.released) == 4


async def test_one_encoder_whose_rows_get_lost_is_left_for_another(directory: Path, shelf: Shelf) -> None:
    encoders = Encoder(directory, shelf), Encoder(directory, shelf, "e:2")
    readers = Reader(directory, "pd:1", shelf), Reader(directory, "pd:2", shelf)
    async with running(*encoders, *readers) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(1))).status_code == 200
        (usual,) = (encoder for encoder in encoders if encoder.requests)
        for reader in readers:
            reader.failures = [RowTransferFailed("media item 0: lost")]
        assert (await run.chat(messages=asking(1))).status_code == 200
        assert len(usual.requests) == 3  # the other one was next, and then both had failed once
        assert sum(len(encoder.requests) for encoder in encoders) == 4
        await until(run.nothing_is_held)
        assert shelf.each("used", "released")


async def test_a_tower_helps_when_encoders_go_on_losing_rows(directory: Path, shelf: Shelf) -> None:
    encoder = Encoder(directory, shelf)
    readers = [Reader(directory, f"pd:{n}", shelf) for n in (1, 2, 3)]
    for reader in readers:
        reader.capabilities.requires_handoff = False
    for reader in readers[:2]:
        reader.failures = [ReferenceNotFound("media item 0: spent")]
    async with running(encoder, *readers) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(1))).status_code == 200
        assert len(encoder.requests) == 2
        (last,) = readers[2].requests
        assert (len(last.media), last.references) == (1, ())
        await until(run.nothing_is_held)
        assert shelf.each("released")


@pytest.mark.parametrize("apart", [False, True])
async def test_for_want_of_room_the_same_references_go_to_another_reader(
    directory: Path, shelf: Shelf, apart: bool
) -> None:
    kind = Prefill if apart else Reader
    encoder, one, two = Encoder(directory, shelf), kind(directory, "pd:1", shelf), kind(directory, "pd:2", shelf)
    one.failures = two.failures = [Overloaded("full")]
    async with running(encoder, one, two, *([Decode(directory)] if apart else [])) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(1, 2))).status_code == 200
        assert one.offered == two.offered == [["e:1/0/0", "e:1/0/1"]]
        await until(run.nothing_is_held)
        assert encoder.released == []
        assert shelf.each("used")


async def test_references_that_turn_out_to_be_spent_are_made_again(directory: Path, shelf: Shelf) -> None:
    encoder, one, two = Encoder(directory, shelf), Reader(directory, "pd:1", shelf), Reader(directory, "pd:2", shelf)
    one.failures = two.failures = [Draining("connection lost")]  # after it had taken them
    one.spends = two.spends = True
    async with running(encoder, one, two) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(1))).status_code == 200
        (first, second) = (one, two) if len(one.requests) == 1 else (two, one)
        assert first.offered == [["e:1/0/0"]]
        assert second.offered == [["e:1/0/0"], ["e:1/1/0"]]
        await until(run.nothing_is_held)
        assert shelf.each("used")


async def test_all_readers_are_full(directory: Path, shelf: Shelf) -> None:
    encoder, one, two = Encoder(directory, shelf), Reader(directory, "pd:1", shelf), Reader(directory, "pd:2", shelf)
    one.failures, two.failures = [Overloaded("full")] * 5, [Overloaded("full")] * 5
    async with running(encoder, one, two) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(1, 2))).status_code == 429
        assert [len(twin.requests) for twin in (encoder, one, two)] == [1, 1, 1]
        await until(run.nothing_is_held)
        assert encoder.released == ["e:1/0/0", "e:1/0/1"]
        assert shelf.each("released")


@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidRequest("never"), 400), (ReferenceMismatch("media item 1: dtype"), 500), (Internal("broken"), 500)],
)
async def test_what_would_fail_again_lets_the_rows_go(
    directory: Path, shelf: Shelf, error: TriptychError, status: int
) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    reader.failures = [error]
    async with running(encoder, reader) as run:
        response = await run.chat(messages=asking(1, 2))
        assert response.status_code == status
        assert error_of(response)["param"] == ("messages[0].content[1]" if "item" in str(error) else None)
        assert (len(encoder.requests), len(reader.requests)) == (1, 1)
        await until(run.nothing_is_held)
        assert encoder.released == ["e:1/0/0", "e:1/0/1"]
        assert shelf.each("released")


@pytest.mark.parametrize("error", [KvTransferFailed("lost"), Draining("connection lost")])
async def test_a_prefill_that_is_repeated_needs_new_references(
    directory: Path, shelf: Shelf, error: TriptychError
) -> None:
    encoder, prefill = Encoder(directory, shelf), Prefill(directory, shelf=shelf)
    one, two = Decode(directory), Decode(directory, "d:2")
    one.failures = two.failures = [error]
    async with running(encoder, prefill, one, two) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(1))).status_code == 200
        assert prefill.offered == [["e:1/0/0"], ["e:1/1/0"]]
        await until(run.nothing_is_held)
        assert prefill.aborted == ["p:1/0"]
        assert encoder.released == []
        assert shelf.each("used")


async def test_a_prefill_that_was_refused_is_repeated_with_the_same_references(directory: Path, shelf: Shelf) -> None:
    encoder, decode = Encoder(directory, shelf), Decode(directory)
    one, two = Prefill(directory, "p:1", shelf), Prefill(directory, "p:2", shelf)
    one.failures = two.failures = [Draining("ending")]
    async with running(encoder, one, two, decode) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(1))).status_code == 200
        assert one.offered == two.offered == [["e:1/0/0"]]
        await until(run.nothing_is_held)
        assert shelf.each("used")


async def test_a_failure_amid_the_answer_is_the_clients(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    reader.script = [Tokens("any", (1,), "It"), Failed("any", Overloaded("the consumer did not read"))]
    async with running(encoder, reader) as run:
        assert (await run.chat(messages=asking(1))).status_code == 429
        await until(run.nothing_is_held)
        assert shelf.each("used")
        assert encoder.released == []


async def test_requests_at_once(directory: Path, shelf: Shelf) -> None:
    encoders = Encoder(directory, shelf), Encoder(directory, shelf, "e:2")
    prefills = Prefill(directory, "p:1", shelf), Prefill(directory, "p:2", shelf)
    encoders[0].failures = [TransientFailure("lost") for _ in range(20)]
    prefills[1].failures = [ReferenceNotFound("media item 0: spent") for _ in range(20)]
    async with running(*encoders, *prefills, Decode(directory)) as run:
        await run.all_ready()
        asked = [run.chat(messages=asking(number % 7, number % 5)) for number in range(100)]
        responses = await asyncio.gather(*asked)
        assert {response.status_code for response in responses} == {200}
        await until(run.nothing_is_held)
        assert shelf.each("used", "released")
        used = [name for name, fates in shelf.fates.items() if fates == ["used"]]
        assert len(used) == 200


async def test_an_engine_that_needs_no_encoder_beside_one_that_does(directory: Path, shelf: Shelf) -> None:
    encoder, reader, whole = Encoder(directory, shelf), Reader(directory, shelf=shelf), EngineTwin(directory, "w:1")
    async with running(encoder, reader, whole) as run:
        await run.all_ready()
        for _ in range(4):
            assert (await run.chat(messages=asking(1))).status_code == 200
        assert [len(request.references) for request in reader.requests] == [1, 1]
        assert [len(request.media) for request in whole.requests] == [1, 1]
        reader.failures = [Overloaded("full")]
        whole.refusal = Overloaded("full")
        assert (await run.chat(messages=asking(1))).status_code == 429
        await until(run.nothing_is_held)
        assert shelf.each("used", "released")
