"""Requests whose pictures are encoded by engines of their own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.chat_files import write_chat_files
from tests.rpc.gateway_harness import TEXT, asking, running, until, uri
from tests.rpc.gateway_parts import ENCODE_SPANS, Decode, Encoder, Prefill, Reader, Shelf
from triptych.core.request import EncodeOptions
from triptych.gateway.affinity import MAX_AHEAD

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_files(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.gateway.route.REFRESH_SECONDS", 0.01)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


async def test_an_encoder_and_a_whole_engine(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    async with running(encoder, reader) as run:
        response = await run.chat(messages=asking(3, 1, 2), temperature=0, max_tokens=5)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == "It is red"
        (encode,), (read,) = encoder.requests, reader.requests
        assert encode.encode == EncodeOptions("shared-dir")
        assert encoder.items == [uri(3), uri(1), uri(2)]
        assert (encode.model, encode.references, encode.handoff) == ("tiny", (), False)
        assert encode.request_id.startswith(f"{read.request_id}/")
        assert (read.media, read.encode) == ((), None)
        assert reader.offered == [["e:1/0/0", "e:1/0/1", "e:1/0/2"]]
        assert read.sampling.temperature == 0
        assert read.stopping.max_tokens == 5
        await until(run.nothing_is_held)
        assert shelf.each("used")
        assert encoder.released == encoder.aborted == []


async def test_an_encoder_a_prefill_and_a_decode_engine(directory: Path, shelf: Shelf) -> None:
    encoder, prefill, decode = Encoder(directory, shelf), Prefill(directory, shelf=shelf), Decode(directory)
    async with running(encoder, prefill, decode) as run:
        response = await run.chat(messages=asking(1, 2))
        assert response.status_code == 200, response.text
        assert prefill.offered == [["e:1/0/0", "e:1/0/1"]]
        assert prefill.requests[0].handoff
        assert decode.sessions == ["p:1/0"]
        assert (decode.requests[0].media, decode.requests[0].references) == ((), ())
        assert decode.requests[0].prompt == prefill.requests[0].prompt
        spans = (await run.http.get(f"/v1/timeline/{response.json()['id']}")).json()["spans"]
        assert {span["process"] for span in spans} == {"gateway", "encoder e:1", "prefill p:1", "decode d:1"}
        encoding = [(span["name"], span["start"], span["end"]) for span in spans if span["process"] == "encoder e:1"]
        assert encoding == [(span.name, span.start, span.end) for span in ENCODE_SPANS]
        await until(run.nothing_is_held)
        assert shelf.each("used")
        assert encoder.released == encoder.aborted == prefill.aborted == []


@pytest.mark.parametrize("apart", [False, True])
async def test_text_has_no_use_for_encoders(directory: Path, shelf: Shelf, apart: bool) -> None:
    encoder = Encoder(directory, shelf)
    readers: list[Any] = (
        [Prefill(directory, shelf=shelf), Decode(directory)] if apart else [Reader(directory, shelf=shelf)]
    )
    async with running(encoder, *readers) as run:
        assert (await run.chat(messages=TEXT)).status_code == 200
        encoder.kill()
        await run.state(0, "unreachable")
        assert (await run.chat(messages=TEXT)).status_code == 200
        assert encoder.requests == []


@pytest.mark.parametrize("first", [0, 1])
async def test_references_keep_the_order_of_the_items_whoever_comes_first(
    directory: Path, shelf: Shelf, first: int
) -> None:
    encoders = Encoder(directory, shelf), Encoder(directory, shelf, "e:2")
    gates = asyncio.Event(), asyncio.Event()
    for encoder, gate in zip(encoders, gates, strict=True):
        encoder.before = [gate]
    reader = Reader(directory, shelf=shelf)
    async with running(*encoders, reader) as run:
        await run.all_ready()
        asked = asyncio.create_task(run.chat(messages=asking(*range(12))))
        await asyncio.gather(*(encoder.waiting.wait() for encoder in encoders))
        gates[first].set()
        await encoders[first].ended.wait()
        assert reader.requests == []
        gates[1 - first].set()
        assert (await asked).status_code == 200
        assert [shelf.items[name] for name in reader.offered[0]] == [uri(number) for number in range(12)]
        assert [len(encoder.requests) for encoder in encoders] == [1, 1]
        assert set(encoders[0].items).isdisjoint(encoders[1].items)
        spans = (await run.http.get(f"/v1/timeline/{(await asked).json()['id']}")).json()["spans"]
        assert {"encoder e:1", "encoder e:2"} <= {span["process"] for span in spans}
        await until(run.nothing_is_held)
        assert shelf.each("used")


async def test_an_item_goes_where_it_went_before(directory: Path, shelf: Shelf) -> None:
    encoders = Encoder(directory, shelf), Encoder(directory, shelf, "e:2"), Encoder(directory, shelf, "e:3")
    async with running(*encoders, Reader(directory, shelf=shelf)) as run:
        await run.all_ready()
        for _ in range(3):
            for number in range(9):
                assert (await run.chat(messages=asking(number))).status_code == 200
        for encoder in encoders:
            assert encoder.items
            assert all(encoder.items.count(item) == 3 for item in encoder.items)


async def test_an_item_goes_elsewhere_when_its_encoder_is_much_busier(directory: Path, shelf: Shelf) -> None:
    encoders = Encoder(directory, shelf), Encoder(directory, shelf, "e:2")
    gate = asyncio.Event()
    for encoder in encoders:
        encoder.before = [gate]
    async with running(*encoders, Reader(directory, shelf=shelf)) as run:
        await run.all_ready()
        asked = [asyncio.create_task(run.chat(messages=asking(5))) for _ in range(2 * MAX_AHEAD)]
        await until(lambda: sum(len(encoder.requests) for encoder in encoders) == len(asked))
        counts = sorted(len(encoder.requests) for encoder in encoders)
        assert counts[0] > 0
        assert counts[1] - counts[0] in (MAX_AHEAD, MAX_AHEAD + 1)
        assert sum(engine.in_flight for engine in run.gateway.router.engines) == len(asked)
        gate.set()
        assert {response.status_code for response in await asyncio.gather(*asked)} == {200}
        await until(run.nothing_is_held)


async def test_large_items_are_hashed_by_a_worker(directory: Path, shelf: Shelf) -> None:
    encoders = Encoder(directory, shelf), Encoder(directory, shelf, "e:2")
    large = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2**20}}
    async with running(*encoders, Reader(directory, shelf=shelf)) as run:
        await run.all_ready()
        for _ in range(2):
            assert (await run.chat(messages=[{"role": "user", "content": [large]}])).status_code == 200
        assert sorted(len(encoder.requests) for encoder in encoders) == [0, 2]
