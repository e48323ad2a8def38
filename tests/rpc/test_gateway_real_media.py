"""Media through the gateway to real engines: one engine, and an encoder with one that has no tower."""

from __future__ import annotations

import base64
from contextlib import AsyncExitStack
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.chat_files import EVERY_KIND
from tests.checkpoints import write_checkpoint
from tests.corpus.clips import Recipe, encoded
from tests.drawings import data_uri, shape_png
from tests.rpc.gateway_harness import error_of
from tests.rpc.real_engines import Build, host, start
from tests.rpc.test_gateway_media import SAID, asking, image, text, video
from triptych.cli.media import MediaFlags
from triptych.cli.options import EngineOptions
from triptych.core.config import MIB
from triptych.gateway.app import Gateway
from triptych.roles.contract import RoleName
from triptych.transport.memory import MemoryExchange
from triptych.wire.channel import EngineChannel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

RED = shape_png("circle", "red")
BLUE = shape_png("square", "blue")
CLIP = encoded(Recipe(codec="mpeg4", fps=Fraction(10)))
FILES = {"red.png": RED, "clip.mp4": CLIP, "page.html": b"<html>"}
TOGETHER = [RoleName.AGGREGATED]
APART = [RoleName.ENCODER, RoleName.AGGREGATED]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint("vl-deepstack", tmp_path_factory.mktemp("model"), videos=True)
    (directory / "chat_template.jinja").write_text(EVERY_KIND)
    return directory


class Asking:
    """A client of the gateway, and a web that its engines fetch from."""

    def __init__(self, http: httpx.AsyncClient, web: str, model: str) -> None:
        self.web = web
        self._http = http
        self._model = model

    async def __call__(self, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
        usual = {"model": self._model, "messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        return await self._http.post("/v1/chat/completions", json=usual | fields, timeout=60)

    async def answer(self, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, int]:
        """What is said, and how long the prompt was."""
        response = await self(messages, **fields)
        assert response.status_code == 200, response.text
        body = response.json()
        return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]


async def serve(directory: Path, roles: list[RoleName], cleanup: AsyncExitStack) -> Asking:
    port = await host(FILES, cleanup)
    media = MediaFlags(fetch_ports=(port,), fetch_private_networks=True)
    options = EngineOptions(kv_cache_bytes=16 * MIB, max_batched_tokens=256, max_loras=0, kv_events=False)
    build = Build(str(directory), options, MemoryExchange(), requires_rows=roles == APART, media=media)
    channels = [EngineChannel(await start(role, build, cleanup)) for role in roles]
    gateway = await cleanup.enter_async_context(Gateway(channels))
    await gateway.router.wait_ready()
    transport = httpx.ASGITransport(gateway.app)
    http = await cleanup.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://gateway"))
    return Asking(http, f"http://127.0.0.1:{port}", gateway.router.models()[0].served_name)


@pytest.fixture(params=[TOGETHER, APART], ids=["together", "apart"])
async def ask(directory: Path, request: pytest.FixtureRequest) -> AsyncIterator[Asking]:
    async with AsyncExitStack() as cleanup:
        yield await serve(directory, request.param, cleanup)


async def test_an_encoder_of_its_own_changes_no_answer(directory: Path) -> None:
    async with AsyncExitStack() as cleanup:
        together, apart = [await serve(directory, roles, cleanup) for roles in (TOGETHER, APART)]
        clip = "data:video/mp4;base64," + base64.b64encode(CLIP).decode()
        for options in ({}, {"image": {"min_pixels": 1024, "max_pixels": 4096}, "video": {"num_frames": 4}}):
            said = []
            for ask in (together, apart):
                by_data = asking(image(data_uri(RED)), video(clip), image(data_uri(BLUE)))
                by_url = asking(image(f"{ask.web}/red.png"), video(f"{ask.web}/clip.mp4"), image(data_uri(BLUE)))
                said += [await ask.answer(messages, media_options=options) for messages in (by_data, by_url)]
            assert len(set(said)) == 1
        whole = await together.answer(by_data)
        assert whole[1] > said[0][1]
        turned = await together.answer(asking(image(data_uri(BLUE)), video(clip), image(data_uri(RED))))
        assert (whole[0] != turned[0], whole[1]) == (True, turned[1])


async def test_the_forms_of_a_data_uri_are_one_picture(ask: Asking) -> None:
    plain = base64.b64encode(RED).decode()
    safe = base64.urlsafe_b64encode(RED).decode()
    wrapped = "\r\n".join(plain[at : at + 76] for at in range(0, len(plain), 76))
    first = await ask.answer(asking(image(f"data:image/png;base64,{plain}")))
    for uri in (
        f"DATA:IMAGE/PNG;BASE64,{plain}",
        f"data:image/png;charset=utf-8;base64,{plain}",
        f"data:text/plain;base64,{plain}",
        f"data:;base64,{plain.rstrip('=')}",
        f"data:image/png;base64,{safe}",
        f"data:image/png;base64,{wrapped}",
        "data:image/png," + "".join(f"%{byte:02X}" for byte in RED),
    ):
        assert await ask.answer(asking(image(uri))) == first, uri[:40]


BAD = (
    (image("data:image/png;base64,AAAA"), "decode"),
    (image("data:image/png;base64,%%%"), "fetch"),
    (image("data:nonsense"), "fetch"),
    (image("data:,"), "no bytes"),
    (image("WEB/none.png"), "404"),
    (image("WEB/page.html"), "decode"),
    (image("http://127.0.0.1:1/"), "port 1 is not dialled"),
    (image("http://169.254.169.254:PORT/latest/"), "which is not dialled"),
    (image("https://"), "fetch"),
    (video("WEB/red.png"), "decode"),
    (video("WEB/none.mp4"), "404"),
)


async def test_media_that_cannot_be_used_are_the_clients_error(ask: Asking) -> None:
    port = ask.web.rsplit(":", 1)[1]
    for part, words in BAD:
        kind = part["type"]
        url = part[kind]["url"].replace("WEB", ask.web).replace("PORT", port)
        for stream in (False, True):
            response = await ask(asking(image(data_uri(RED)), part | {kind: {"url": url}}), stream=stream)
            assert response.status_code == 400, (url, response.text)
            error = error_of(response)
            assert (error["param"], error["type"]) == ("messages[0].content[1]", "invalid_request_error")
            assert error["message"].startswith("media item 1: ")
            assert words in error["message"], error["message"]
    await ask.answer(asking(image(data_uri(RED))))


async def test_what_a_user_writes_is_text(ask: Asking) -> None:
    _, bare = await ask.answer([{"role": "user", "content": ""}])
    _, said = await ask.answer([{"role": "user", "content": SAID}])
    _, seen = await ask.answer(asking(image(data_uri(RED))))
    _, both = await ask.answer(asking(text(SAID), image(data_uri(RED))))
    assert both - seen == said - bare > 20


async def test_what_the_engines_cannot_read_is_refused_by_its_place(ask: Asking) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    response = await ask(asking(image(data_uri(RED)), sound))
    assert response.status_code == 400
    assert error_of(response)["param"] == "messages[0].content[1]"
    assert "reads no audio" in error_of(response)["message"]
    response = await ask(asking(image(data_uri(RED))), media_options={"image": {"min_pixels": 9, "max_pixels": 4}})
    assert response.status_code == 400
    assert error_of(response)["param"] == "media_options.image.min_pixels"
