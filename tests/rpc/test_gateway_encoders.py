"""Encoders that fail, or are not there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.chat_files import write_chat_files
from tests.rpc.gateway_harness import TEXT, asking, error_of, running, until, uri
from tests.rpc.gateway_parts import Decode, Encoder, Prefill, Reader, Shelf
from triptych.core.errors import (
    Draining,
    DuplicateRequest,
    Internal,
    InvalidRequest,
    MediaError,
    MediaUnavailable,
    Overloaded,
)
from triptych.core.events import Failed, Finished, FinishReason, Tokens, Usage
from triptych.core.media import Stage
from triptych.gateway.limits import GatewayLimits
from triptych.wire.gen import lifecycle_pb2
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
    "error", [Overloaded("full"), Draining("connection lost"), TransientFailure("lost"), DuplicateRequest("in use")]
)
async def test_what_one_encoder_cannot_do_another_one_does(directory: Path, shelf: Shelf, error: TriptychError) -> None:
    one, two, reader = Encoder(directory, shelf), Encoder(directory, shelf, "e:2"), Reader(directory, shelf=shelf)
    one.failures = [error]
    async with running(one, two, reader) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(*range(12)))).status_code == 200
        assert len(one.requests) == 1
        assert len(two.requests) == 2
        assert set(one.items) <= set(two.items)
        ids = [request.request_id for encoder in (one, two) for request in encoder.requests]
        assert len(set(ids)) == len(ids)  # ending one, however late, ends no other
        assert [shelf.items[name] for name in reader.offered[0]] == [uri(number) for number in range(12)]
        await until(run.nothing_is_held)
        assert shelf.each("used")


async def test_an_encoder_that_dies_while_it_encodes(directory: Path, shelf: Shelf) -> None:
    one, two, reader = Encoder(directory, shelf), Encoder(directory, shelf, "e:2"), Reader(directory, shelf=shelf)
    async with running(one, two, reader) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(*range(12)))).status_code == 200
        one.kill()
        assert (await run.chat(messages=asking(*range(12)))).status_code == 200
        assert reader.offered[1] == [name for name in reader.offered[1] if name.startswith("e:2/")]
        await until(run.nothing_is_held)
        assert shelf.each("used")


async def test_an_encoder_whose_answer_does_not_come(directory: Path, shelf: Shelf) -> None:
    one, two, reader = Encoder(directory, shelf), Encoder(directory, shelf, "e:2"), Reader(directory, shelf=shelf)
    one.on_the_way = [asyncio.Event()]
    async with running(one, two, reader, limits=GatewayLimits(encode_seconds=0.05)) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(*range(12)))).status_code == 200
        assert one.ended.is_set()
        await until(run.nothing_is_held)
        assert one.aborted == [one.requests[0].request_id]
        assert two.aborted == []
        assert shelf.each("used", "released")
        two.on_the_way = [asyncio.Event()]
        response = await run.chat(messages=asking(1))
        assert response.status_code == 503
        assert "no encoder engine for 'tiny' is left" in error_of(response)["message"]
        assert "media item 0: e:" in error_of(response)["message"]
        assert "were not encoded within 0.05 s" in error_of(response)["message"]
        await until(run.nothing_is_held)
        assert shelf.each("used", "released")


async def test_an_encoder_whose_answer_is_lost(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    async with running(encoder, reader) as run:
        encoder.lost = Draining("e:1 ended the answer without a terminal event")
        response = await run.chat(messages=asking(1, 2))
        assert response.status_code == 503
        await until(run.nothing_is_held)
        assert encoder.aborted == [encoder.requests[0].request_id]
        assert shelf.each("released")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MediaError(0, "cannot be decoded", Stage.DECODE), 400),
        (MediaUnavailable(0, "no memory", Stage.FETCH), 400),
        (InvalidRequest("media item 0: it is too large"), 400),
        (InvalidRequest("broken"), 400),
        (Internal("a bug"), 500),
    ],
)
async def test_what_is_wrong_with_an_item_is_final_and_names_it(
    directory: Path, shelf: Shelf, error: TriptychError, status: int
) -> None:
    one, two, reader = Encoder(directory, shelf), Encoder(directory, shelf, "e:2"), Reader(directory, shelf=shelf)
    two.on_the_way = [asyncio.Event()]
    one.failures = [error]
    async with running(one, two, reader) as run:
        await run.all_ready()
        response = await run.chat(messages=asking(*range(12)))
        assert response.status_code == status
        (item,) = (number for number in range(12) if uri(number) == one.items[0])
        named = "media item" in str(error)
        assert error_of(response)["param"] == (f"messages[0].content[{item}]" if named else None)
        assert (f"media item {item}: " in error_of(response)["message"]) == named
        assert len(one.requests) == 1
        assert two.ended.is_set()
        assert reader.requests == []
        await until(run.nothing_is_held)
        assert two.aborted == [two.requests[0].request_id]
        assert shelf.each("released")


async def test_what_is_encoded_is_let_go_when_another_item_is_wrong(directory: Path, shelf: Shelf) -> None:
    one, two, reader = Encoder(directory, shelf), Encoder(directory, shelf, "e:2"), Reader(directory, shelf=shelf)
    gate = asyncio.Event()
    one.instead = [gate, Failed("any", MediaError(0, "cannot be decoded", Stage.DECODE))]
    async with running(one, two, reader) as run:
        await run.all_ready()
        asked = asyncio.create_task(run.chat(messages=asking(*range(12))))
        await two.ended.wait()
        gate.set()
        assert (await asked).status_code == 400
        await until(run.nothing_is_held)
        assert sorted(two.released) == sorted(shelf.fates)
        assert shelf.each("released")


@pytest.mark.parametrize("missing", [1, 2])
async def test_an_encoder_that_hands_too_little_over(directory: Path, shelf: Shelf, missing: int) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    encoder.sends = lambda references: references[missing:]
    async with running(encoder, reader) as run:
        response = await run.chat(messages=asking(1, 2))
        assert response.status_code == 500
        assert f"e:1 encoded 2 media item(s) and handed {2 - missing} over" in error_of(response)["message"]
        assert reader.requests == []
        await until(run.nothing_is_held)
        assert len(encoder.released) == 2 - missing


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ([Finished("any", FinishReason.STOP, Usage(1, 1, 0))], 500),
        ([Finished("any", FinishReason.CANCELLED, Usage(1, 1, 0))], 499),
        ([Tokens("any", (1,), "It"), Failed("any", InvalidRequest("broken"))], 400),
    ],
)
async def test_an_encoder_that_does_something_else(directory: Path, shelf: Shelf, script: Any, status: int) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    encoder.instead = script
    async with running(encoder, reader) as run:
        assert (await run.chat(messages=asking(1))).status_code == status
        assert encoder.ended.is_set()
        assert reader.requests == []
        await until(run.nothing_is_held)


@pytest.mark.parametrize("apart", [False, True])
async def test_a_reader_with_a_tower_encodes_itself_when_no_encoder_is_left(
    directory: Path, shelf: Shelf, apart: bool
) -> None:
    encoder, reader = Encoder(directory, shelf), (Prefill if apart else Reader)(directory, shelf=shelf)
    reader.capabilities.requires_handoff = False
    encoder.failures = [Overloaded("full")]
    async with running(encoder, reader, *([Decode(directory)] if apart else [])) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(1, 2))).status_code == 200
        assert len(encoder.requests) == 1
        assert [len(reader.requests[0].media), len(reader.requests[0].references)] == [2, 0]
        assert (await run.chat(messages=asking(1))).status_code == 200
        assert [len(reader.requests[1].media), len(reader.requests[1].references)] == [0, 1]
        encoder.kill()
        await run.state(0, "unreachable")
        assert (await run.chat(messages=asking(1))).status_code == 200
        assert [len(reader.requests[2].media), len(reader.requests[2].references)] == [1, 0]
        await until(run.nothing_is_held)
        assert shelf.each("used")


async def test_a_reader_with_a_tower_that_knows_no_references(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory)
    async with running(encoder, reader) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(1))).status_code == 200
        assert encoder.requests == []
        assert len(reader.requests[0].media) == 1
        misfits = (await run.http.get("/health")).json()["misfits"]
        assert misfits == ["e:1 and pd:1 do not fit together: the latter takes no encoder outputs"]


async def test_what_is_full_at_all_encoders_is_said(directory: Path, shelf: Shelf) -> None:
    one, two, reader = Encoder(directory, shelf), Encoder(directory, shelf, "e:2"), Reader(directory, shelf=shelf)
    one.failures, two.failures = [Overloaded("full")] * 10, [Overloaded("full")] * 10
    async with running(one, two, reader) as run:
        await run.all_ready()
        response = await run.chat(messages=asking(1))
        assert response.status_code == 429
        assert error_of(response)["message"].startswith("media item 0: full")
        assert (len(one.requests), len(two.requests)) == (1, 1)
        assert reader.requests == []


@pytest.mark.parametrize("apart", [False, True])
async def test_without_an_encoder_only_text_is_answered(directory: Path, shelf: Shelf, apart: bool) -> None:
    readers = [Prefill(directory, shelf=shelf), Decode(directory)] if apart else [Reader(directory, shelf=shelf)]
    async with running(*readers, whole=False) as run:
        await run.all_ready()
        assert [model["id"] for model in (await run.http.get("/v1/models")).json()["data"]] == ["tiny"]
        assert (await run.chat(messages=TEXT)).status_code == 200
        response = await run.chat(messages=asking(1))
        assert response.status_code == 503
        assert error_of(response)["code"] == "unavailable"
        assert error_of(response)["message"].startswith("no encoder engine for 'tiny' can be used: none is known")
        health = await run.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert health.json()["detail"].startswith("no encoder engine for 'tiny' can be used: none is known")
        waiting = asyncio.create_task(run.gateway.router.wait_ready())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        waiting.cancel()


async def test_an_encoder_that_is_away_is_missed(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    async with running(encoder, reader) as run:
        assert (await run.http.get("/health")).json()["status"] == "ok"
        encoder.state = lifecycle_pb2.HEALTH_STATE_NOT_READY
        await run.state(0, "not ready")
        response = await run.chat(messages=asking(1))
        assert response.status_code == 503
        assert "e:1, encoder, is not ready" in error_of(response)["message"]
        assert (await run.http.get("/health")).json()["status"] == "degraded"
        encoder.state = lifecycle_pb2.HEALTH_STATE_DEGRADED
        await run.state(0, "degraded")
        assert (await run.chat(messages=asking(1))).status_code == 200


async def test_encoders_alone_answer_nothing(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    async with running(encoder, reader) as run:
        await run.all_ready()
        reader.kill()
        await run.state(1, "unreachable")
        response = await run.chat(messages=asking(1))
        assert response.status_code == 503
        assert "pd:1, aggregated, is unreachable" in error_of(response)["message"]
        assert encoder.requests == []
        assert (await run.http.get("/health")).status_code == 503


async def test_a_model_that_takes_pictures_in_no_form(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory)
    reader.modalities = []
    async with running(encoder, reader) as run:
        await run.all_ready()
        response = await run.chat(messages=asking(1))
        assert response.status_code == 400
        assert error_of(response)["code"] == "unsupported_feature"
