"""Real HTTP, real gRPC: the openai package against the gateway, which drives a scripted engine over the network."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from tests.chat_files import write_chat_files
from tests.rpc.gateway_harness import BODY, DATA, until
from tests.rpc.scripted_role import ScriptedRole, Step
from triptych.core.errors import Overloaded, PromptTooLong, StartupError
from triptych.core.events import EosToken, Finished, FinishReason, Tokens, Usage
from triptych.gateway.app import Gateway
from triptych.gateway.server import serve as serve_http
from triptych.wire.channel import EngineChannel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.rpc.conftest import Serve
    from triptych.core.request import GenerateRequest
    from triptych.roles.contract import ModelDescription


def red(request: GenerateRequest) -> list[Step]:
    usage = Usage(prompt_tokens=len(request.prompt), completion_tokens=3, cached_prompt_tokens=4)
    end = Finished(request.request_id, FinishReason.STOP, usage, EosToken(1))
    return [Tokens(request.request_id, (7,), "It is"), Tokens(request.request_id, (8,), " red"), end]


@dataclass
class Seeing(ScriptedRole):
    """A scripted role whose tokenizer is there."""

    directory: Path = Path()

    @property
    def model(self) -> ModelDescription:
        return replace(super().model, tokenizer_source=str(self.directory), served_name="tiny", image_token_id=None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_files(tmp_path_factory.mktemp("model"))


@dataclass
class Serving:
    role: Seeing
    gateway: Gateway
    url: str
    client: openai.AsyncOpenAI


@pytest.fixture
async def serving(serve: Serve, directory: Path) -> AsyncIterator[Serving]:
    role = Seeing(script=red, directory=directory)
    engine = await serve(role)
    async with (
        Gateway([EngineChannel(engine.address)]) as gateway,
        serve_http(gateway.app, "127.0.0.1", 0) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        await gateway.router.wait_ready()
        yield Serving(role, gateway, url, client)


def question(text: str = "what colour?") -> Any:
    image = {"type": "image_url", "image_url": {"url": DATA}}
    return [{"role": "user", "content": [image, {"type": "text", "text": text}]}]


async def test_an_answer_to_the_openai_package(serving: Serving) -> None:
    answer = await serving.client.chat.completions.create(model="tiny", messages=question(), temperature=0)
    assert answer.choices[0].message.content == "It is red"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage
    assert answer.usage.prompt_tokens == len(serving.role.requests[0].prompt)
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.id == answer._request_id == serving.role.requests[0].request_id
    # Its message can be sent back as it came.
    messages = [*question(), answer.choices[0].message, {"role": "user", "content": "sure?"}]
    again = await serving.client.chat.completions.create(model="tiny", messages=messages)
    assert again.choices[0].message.content == "It is red"


async def test_a_stream_to_the_openai_package(serving: Serving) -> None:
    stream = await serving.client.chat.completions.create(
        model="tiny", messages=question(), stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "It is red"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage
    assert last.usage.completion_tokens == 3


async def test_errors_of_the_openai_package(serving: Serving) -> None:
    create = serving.client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="top_p must be in") as bad:
        await create(model="tiny", messages=question(), top_p=2)
    assert bad.value.param == "top_p"
    with pytest.raises(openai.BadRequestError, match="n is not supported") as bad:
        await create(model="tiny", messages=question(), n=2)
    assert bad.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="other", messages=question())
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="must not be empty"):
        await create(model="tiny", messages=[])
    assert [model.id async for model in serving.client.models.list()] == ["tiny"]
    assert (await serving.client.models.retrieve("tiny")).owned_by == "triptych"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_closed_connection_reaches_the_engine(serving: Serving, stream: bool) -> None:
    serving.role.script = lambda request: [*red(request)[:1], asyncio.Event()]
    async with httpx.AsyncClient(base_url=serving.url) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=BODY | {"stream": stream}))
        await until(lambda: bool(serving.role.answers))
        await serving.role.answers[0].waiting.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await serving.role.answers[0].closed.wait()
    await until(lambda: serving.gateway.router.engines[0].in_flight == 0)


async def test_a_large_picture_arrives_whole(serving: Serving) -> None:
    url = "data:image/png;base64," + "A" * 8_000_000
    image = {"type": "image_url", "image_url": {"url": url}}
    await serving.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [image]}])
    assert serving.role.requests[0].media[0].source.uri == url  # type: ignore[union-attr]


async def test_a_prompt_that_its_pictures_make_too_long(serving: Serving) -> None:
    serving.role.script = lambda request: [PromptTooLong("the prompt has 5000 tokens; the context window has 4096")]
    with pytest.raises(openai.BadRequestError, match="has 5000 tokens") as caught:
        await serving.client.chat.completions.create(model="tiny", messages=question())
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


async def test_the_other_engine_answers_where_one_accepts_and_cannot(serve: Serve, directory: Path) -> None:
    roles = [Seeing(script=lambda request: [Overloaded("full")], directory=directory) for _ in range(2)]
    channels = [EngineChannel((await serve(role)).address) for role in roles]
    async with (
        Gateway(channels) as gateway,
        serve_http(gateway.app, "127.0.0.1", 0) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        await until(lambda: all(engine.state.usable for engine in gateway.router.engines))
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="tiny", messages=question())
        assert [len(role.requests) for role in roles] == [1, 1]
        roles[1].script = red
        answer = await client.chat.completions.create(model="tiny", messages=question())
        assert answer.choices[0].message.content == "It is red"
        assert [len(role.requests) for role in roles] == [2, 2]  # the full one was longer unused, so asked first


async def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            async with serve_http(Gateway([]).app, "127.0.0.1", port):
                pass


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("192.0.2.1", 0), ("127.0.0.1", 70_000)])
async def test_an_address_of_another_machine_is_one_line(host: str, port: int) -> None:
    with pytest.raises(StartupError, match=f"cannot listen on {host}:{port}: ") as caught:
        async with serve_http(Gateway([]).app, host, port):
            pass
    assert "\n" not in str(caught.value)


async def test_the_port_is_free_when_the_server_has_ended() -> None:
    async with serve_http(Gateway([]).app, "127.0.0.1", 0) as url:
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{url}/health")).status_code == 503
        port = int(url.rsplit(":", 1)[1])
    async with serve_http(Gateway([]).app, "127.0.0.1", port) as again:
        assert again == url


@pytest.mark.parametrize("stream", [False, True])
async def test_a_running_answer_is_cut_off_at_the_end_of_the_grace(serving: Serving, stream: bool, caplog) -> None:
    serving.role.script = lambda request: [*red(request)[:1], asyncio.Event()]
    async with httpx.AsyncClient() as http:
        async with serve_http(serving.gateway.app, "127.0.0.1", 0, grace=0) as url:
            asking = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=BODY | {"stream": stream}))
            await until(lambda: bool(serving.role.answers))
            await serving.role.answers[0].waiting.wait()
        response = await asking
    assert response.status_code == (200 if stream else 503)
    assert "the gateway is shutting down" in response.text
    assert serving.gateway.router.engines[0].in_flight == 0
    await serving.role.answers[0].closed.wait()
    assert "Traceback" not in caplog.text


HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"
UNREAD = b"POST /nope HTTP/1.1\r\nHost: x\r\ncontent-length: 1000\r\n\r\nx"


@pytest.mark.parametrize(
    ("sent", "answered"),
    [(b"", b""), (HEAD, b""), (HEAD + b"\r\nGET", b"HTTP/1.1 200"), (UNREAD, b"HTTP/1.1 404")],
    ids=["silent", "half a head", "half a second head", "a body that nobody reads"],
)
async def test_a_connection_that_brings_no_request_is_closed(
    sent: bytes, answered: bytes, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.gateway.server.REQUEST_SECONDS", 0.05)
    host, port = serving.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    async with asyncio.timeout(20):
        answer = await reader.read()  # returns when the connection ends
    assert answer[:12] == answered
    writer.close()


async def test_a_slow_answer_is_not_taken_for_a_silent_connection(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.gateway.server.REQUEST_SECONDS", 0.02)
    go_on = asyncio.Event()
    serving.role.script = lambda request: [*red(request)[:1], go_on, *red(request)[1:]]
    async with httpx.AsyncClient() as client:
        asking = asyncio.create_task(client.post(f"{serving.url}/v1/chat/completions", json=BODY))
        await until(lambda: bool(serving.role.answers))
        await serving.role.answers[0].waiting.wait()
        await asyncio.sleep(0.2)  # ten times the limit
        go_on.set()
        assert (await asking).status_code == 200
