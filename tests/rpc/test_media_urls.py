"""Pictures by URL through a real server: what may be fetched is, and nothing else is ever dialled."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.contract.test_fetch_refusals import HOSTS, INSIDE, named
from tests.contract.web import PUBLIC, Web, answer, fetcher, redirect
from tests.drawings import shape_png
from tests.roles.fake_engine import FakeEngine, fake_encoder, fake_role
from triptych.core.errors import MediaError, MediaUnavailable, TriptychError, UnsupportedFeature
from triptych.core.media import MediaItem, Modality, RawBytes, Stage, Url
from triptych.core.request import EncodeOptions, GenerateRequest
from triptych.rpc.server import serve_role
from triptych.wire.channel import EngineChannel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.contract.web import Caller
    from triptych.roles.desk import Desk

PROMPT = "<|vision_start|><|image_pad|><|vision_end|>what?"
RED = shape_png("circle", "red")
BLUE = shape_png("circle", "blue")


@pytest.fixture
async def web() -> AsyncIterator[Web]:
    """Behind every address that must not be dialled stands a server that would give a picture away."""
    web = Web()
    secret = await web.start(answer(RED), names=())
    for text in INSIDE:
        web.put(secret, named(text), address=text)
        web.put(secret, address=text, port=443)
    yield web
    assert secret.heads == []
    await web.stop()


class Client:
    """Asks a served engine, which computes nothing by itself."""

    def __init__(self, role: Desk, engine: FakeEngine, channel: EngineChannel) -> None:
        self.role = role
        self.engine = engine
        self._channel = channel
        self._count = 0

    def request(self, *items: MediaItem, encode: bool = False) -> GenerateRequest:
        self._count += 1
        asked = EncodeOptions() if encode else None
        return GenerateRequest(f"r{self._count}", "demo", PROMPT * len(items), media=items, encode=asked)

    async def refusal(self, *items: MediaItem, encode: bool = False) -> TriptychError:
        with pytest.raises(TriptychError) as caught:
            await self._channel.generate(self.request(*items, encode=encode))
        assert self.engine.submitted == []
        return caught.value

    async def submitted(self, *items: MediaItem, encode: bool = False) -> list[bytes]:
        """The content keys of what the engine gets."""
        before = len(self.engine.submitted)
        task = asyncio.create_task(self._channel.generate(self.request(*items, encode=encode)))
        try:
            async with asyncio.timeout(20):
                while len(self.engine.submitted) == before and not task.done():
                    await asyncio.sleep(0.001)
        finally:
            task.cancel()
            await asyncio.wait([task])
        group = self.engine.submitted[before]
        if encode:
            return [one.layout.content_key for one in group]
        return [layout.content_key for layout in group[0].plan.items]

    def held(self) -> list[float]:
        ledgers = self.role.statistics()
        admission, fetching = ledgers["media_admission"], ledgers["media_fetching"]
        return [
            admission["shares_in_use"] + admission["away"] + admission["returning"],
            admission["waiting"],
            ledgers["media_held"]["bytes"],
            ledgers["prepared_items"]["making"],
            ledgers["media_decoding"]["busy"],
            fetching["hosts"],
        ]


@pytest.fixture(params=["aggregated", "encoder"])
async def client(web: Web, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    engine = FakeEngine()
    make = fake_role if request.param == "aggregated" else fake_encoder
    role = make(engine, fetcher=fetcher(web))
    server = await serve_role(role, "127.0.0.1", 0)
    channel = EngineChannel(server.address)
    yield _Encoding(role, engine, channel) if request.param == "encoder" else Client(role, engine, channel)
    await channel.close()
    await server.stop(None)
    await role.drain(0)


class _Encoding(Client):
    """Asks for media to be encoded."""

    async def refusal(self, *items: MediaItem, encode: bool = True) -> TriptychError:
        return await super().refusal(*items, encode=encode)

    async def submitted(self, *items: MediaItem, encode: bool = True) -> list[bytes]:
        return await super().submitted(*items, encode=encode)


def by_url(url: str) -> MediaItem:
    return MediaItem(Modality.IMAGE, Url(url))


def raw(data: bytes) -> MediaItem:
    return MediaItem(Modality.IMAGE, RawBytes(data))


async def test_what_must_not_be_dialled_is_not(client: Client, web: Web) -> None:
    site = await web.start(answer(RED), address="93.184.216.35", names=("bounce.example",))
    urls = [f"http://{host}/a.png" for host in HOSTS] + [f"http://{named(address)}/" for address in INSIDE]
    for url in urls:
        error = await client.refusal(by_url(url))
        assert isinstance(error, MediaError), url
        assert (error.index, error.stage, error.retryable) == (0, Stage.FETCH, False)
        assert "which is not dialled" in error.reason
    assert web.dialled == []
    for url in urls:
        site.answers[0] = redirect(url)
        error = await client.refusal(by_url("http://bounce.example/"))
        assert isinstance(error, MediaError)
        assert "which is not dialled" in error.reason
    assert {address for address, _ in web.dialled} == {"93.184.216.35"}
    assert client.held() == [0] * 6


async def test_a_name_that_changes_its_mind_is_refused(client: Client, web: Web) -> None:
    await web.start(answer(RED))
    web.names["a.example"] = [[PUBLIC], ["127.0.0.1"]]
    first = await client.submitted(by_url("http://a.example/"))
    client.engine.submitted.clear()
    error = await client.refusal(by_url("http://a.example/"))
    assert isinstance(error, MediaError)
    assert "a loopback address" in error.reason
    assert web.dialled == [(PUBLIC, 80)]
    assert len(first) == 1


async def test_the_same_bytes_are_the_same_item_however_they_come(client: Client, web: Web) -> None:
    site = await web.start(answer(RED))
    one, two, three = await client.submitted(by_url("http://a.example/x"), raw(RED), raw(BLUE))
    assert one == two != three
    assert len(site.heads) == 1
    loads = client.role.statistics()["intake"]["image_loads"]
    assert loads == 2


async def test_the_item_that_fails_is_named_and_the_others_are_let_go(client: Client, web: Web) -> None:
    gone = asyncio.Event()

    async def hang(caller: Caller) -> None:
        await caller.gone()
        gone.set()

    await web.start(hang, names=("slow.example",))
    await web.start(answer(b"", 404), names=("none.example",), address="93.184.216.36")
    error = await client.refusal(by_url("http://slow.example/"), by_url("http://none.example/"))
    assert isinstance(error, MediaError)
    assert (error.index, error.stage) == (1, Stage.FETCH)
    assert "404" in error.reason
    await gone.wait()
    assert client.held() == [0] * 6


async def test_a_server_that_is_down_is_worth_a_retry(client: Client, web: Web) -> None:
    await web.start(answer(b"", 503))
    error = await client.refusal(by_url("http://a.example/"))
    assert type(error) is MediaUnavailable
    assert error.retryable


async def test_a_client_that_leaves_ends_the_fetch_at_once(client: Client, web: Web) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def hang(caller: Caller) -> None:
        asked.set()
        await caller.gone()
        gone.set()

    await web.start(hang)
    request = client.request(by_url("http://a.example/"), encode=isinstance(client, _Encoding))
    answer = await client.role.accept(request)
    await asked.wait()
    admission = client.role.statistics()["media_admission"]
    assert (admission["away"], admission["shares_in_use"]) == (1, 0)
    await answer.aclose()
    await gone.wait()
    async with asyncio.timeout(20):
        while any(client.held()):
            await asyncio.sleep(0.001)
    assert client.engine.submitted == []


@pytest.mark.parametrize("make", [fake_role, fake_encoder])
async def test_without_a_fetcher_urls_are_refused_before_acceptance(make: object) -> None:
    role = make(FakeEngine())  # type: ignore[operator]
    encode = EncodeOptions() if make is fake_encoder else None
    with pytest.raises(UnsupportedFeature, match="media item 1: fetch: this engine fetches no URLs"):
        await role.accept(
            GenerateRequest("r", "demo", PROMPT * 2, media=(raw(RED), by_url("http://a.example/")), encode=encode)
        )
    await role.drain(0)
