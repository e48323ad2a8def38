"""The gateway before encoder, prefill and decode engines that are scripted, each behind a real server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.chat_files import write_chat_files
from tests.references import reference
from tests.rpc.gateway_harness import TEXT, Caller, Running, asking, error_of, until, uri
from tests.rpc.scripted_role import ScriptedRole, Step, answer
from tests.sessions import picture, session
from triptych.core.encoded import EncoderReference
from triptych.core.errors import InvalidRequest, MediaError, Overloaded, ReferenceNotFound, RowTransferFailed
from triptych.core.events import EncoderReady, Failed, PrefillReady, Span, Usage
from triptych.core.media import DataUri, Stage
from triptych.gateway.app import Gateway
from triptych.roles.contract import RoleName, TransferOutcome
from triptych.rpc.server import serve_role
from triptych.text.tokenizer import Tokenizer
from triptych.wire.channel import EngineChannel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.rpc.conftest import Serve
    from triptych.core.errors import TriptychError
    from triptych.core.request import GenerateRequest
    from triptych.roles.contract import AbortOutcome, ModelDescription

    Front = Callable[..., Awaitable[Running]]

ROWS: dict[str, Any] = {"row_backend": "memory", "fingerprint": bytes(range(32))}
KV: dict[str, Any] = {"kv_backend": "memory"}
NONE = {"guided": False, "max_loras": 0, "kv_event_buffer": 0}


@dataclass
class Seeing(ScriptedRole):
    """A scripted role whose tokenizer is there."""

    directory: Path = Path()

    @property
    def model(self) -> ModelDescription:
        marker = Tokenizer.load(self.directory).added_tokens["<|image_pad|>"]
        return replace(super().model, tokenizer_source=str(self.directory), served_name="tiny", image_token_id=marker)


@dataclass
class Encoder(Seeing):
    """Encodes what it is sent, under new names."""

    before: list[Step] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    _names: Any = field(default_factory=count)

    def __post_init__(self) -> None:
        self.description = {"role": RoleName.ENCODER, "encodes": True} | ROWS | NONE
        self.script = self.encode

    def encode(self, request: GenerateRequest) -> list[Step]:
        made = tuple(
            reference(picture(0, 1, 1, key=index + 1), name=f"{id(self)}-{next(self._names)}")
            for index in range(len(request.media))
        )
        self.outputs.update((one.item.handle.session_id, TransferOutcome.NOT_STARTED) for one in made)
        return [*self.before, EncoderReady(request.request_id, made, (Span("encode", 1.5e9, 1.5e9 + 1),))]

    async def abort_rows(self, cache_id: str) -> AbortOutcome:
        self.released.append(cache_id)
        return await super().abort_rows(cache_id)

    @property
    def items(self) -> list[str]:
        sources = [item.source for request in self.requests for item in request.media]
        return [source.uri for source in sources if isinstance(source, DataUri)]


@dataclass
class Reader(Seeing):
    """Takes outputs of the encoders, and fails first, if the test says so."""

    encoders: tuple[Encoder, ...] = ()
    failures: list[TriptychError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.description = {"takes_rows": True, "requires_rows": True} | ROWS
        self.script = self.read

    def read(self, request: GenerateRequest) -> list[Step]:
        if self.failures:
            return [Failed(request.request_id, self.failures.pop(0))]
        for index, name in enumerate(names_in(request)):
            (outputs,) = (encoder.outputs for encoder in self.encoders if name in encoder.outputs)
            if outputs[name] is not TransferOutcome.NOT_STARTED:
                return [Failed(request.request_id, ReferenceNotFound(f"media item {index}: spent"))]
            outputs[name] = TransferOutcome.FINISHED
        if request.handoff:
            return [PrefillReady(request.request_id, session(), Usage(5, 1, 0), (Span("prefill", 1.5e9, 1.5e9 + 1),))]
        return answer(request)


def names_in(request: GenerateRequest) -> list[str]:
    return [one.item.handle.session_id for one in request.references if isinstance(one, EncoderReference)]


def outcomes(*encoders: Encoder) -> set[TransferOutcome]:
    return {outcome for encoder in encoders for outcome in encoder.outputs.values()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_files(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.gateway.route.REFRESH_SECONDS", 0.05)


@pytest.fixture
async def front(serve: Serve) -> AsyncIterator[Front]:
    """Opens a gateway before some roles, or the addresses of some."""
    opened: list[Any] = []

    async def open_gateway(*roles: ScriptedRole | str) -> Running:
        addresses = [role if isinstance(role, str) else (await serve(role)).address for role in roles]
        channels = [EngineChannel(address) for address in addresses]
        gateway = Gateway(channels)
        opened.append(await gateway.__aenter__())
        await gateway.router.wait_ready()
        http = httpx.AsyncClient(transport=httpx.ASGITransport(gateway.app), base_url="http://gateway")
        opened.append(http)
        run = Running(gateway, http)
        await run.all_ready()
        return run

    yield open_gateway
    for one in reversed(opened):
        await one.__aexit__(None, None, None)


def whole(directory: Path, *encoders: Encoder) -> Reader:
    return Reader(directory=directory, encoders=encoders)


def prefill(directory: Path, *encoders: Encoder) -> Reader:
    reader = whole(directory, *encoders)
    reader.description |= {"role": RoleName.PREFILL, "hands_over": True} | KV
    return reader


def decode(directory: Path) -> Seeing:
    role = Seeing(directory=directory)
    role.description = {"role": RoleName.DECODE, "takes_over": True} | KV
    return role


async def test_three_engines(front: Front, directory: Path) -> None:
    encoder = Encoder(directory=directory)
    reads, goes_on = prefill(directory, encoder), decode(directory)
    run = await front(encoder, reads, goes_on)
    response = await run.chat(messages=asking(2, 1))
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "hello"
    assert encoder.items == [uri(2), uri(1)]
    assert names_in(reads.requests[0]) == list(encoder.outputs)
    assert (reads.requests[0].media, reads.requests[0].handoff) == ((), True)
    assert (goes_on.requests[0].media, goes_on.requests[0].references) == ((), ())
    spans = (await run.http.get(f"/v1/timeline/{response.json()['id']}")).json()["spans"]
    processes = {span["process"].split()[0]: span["name"] for span in spans}
    assert processes.keys() == {"gateway", "encoder", "prefill", "decode"}
    assert processes["encoder"] == "encode"
    await until(run.nothing_is_held)
    assert outcomes(encoder) == {TransferOutcome.FINISHED}
    assert encoder.released == []
    assert (await run.chat(messages=TEXT)).status_code == 200
    assert len(encoder.requests) == 1
    health = (await run.http.get("/health")).json()
    assert [engine["role"] for engine in health["engines"]] == ["encoder", "prefill", "decode"]
    assert (health["status"], health["misfits"]) == ("ok", [])


async def test_two_encoders(front: Front, directory: Path) -> None:
    encoders = Encoder(directory=directory), Encoder(directory=directory)
    reader = whole(directory, *encoders)
    run = await front(*encoders, reader)
    assert (await run.chat(messages=asking(*range(12)))).status_code == 200
    assert all(encoder.items for encoder in encoders)
    assert sorted(encoders[0].items + encoders[1].items) == sorted(map(uri, range(12)))
    assert len(names_in(reader.requests[0])) == 12
    encoders[0].refusal = Overloaded("full")
    assert (await run.chat(messages=asking(*range(12)))).status_code == 200
    await until(run.nothing_is_held)
    assert outcomes(*encoders) == {TransferOutcome.FINISHED}


@pytest.mark.parametrize(
    "error", [MediaError(0, "cannot be decoded", Stage.DECODE), InvalidRequest("media item 0: too large")]
)
@pytest.mark.parametrize("in_band", [False, True])
async def test_an_item_that_is_wrong_is_named(
    front: Front, directory: Path, error: TriptychError, in_band: bool
) -> None:
    encoders = Encoder(directory=directory), Encoder(directory=directory)
    if in_band:
        encoders[0].script = lambda request: [Failed(request.request_id, error)]
    else:
        encoders[0].refusal = error
    encoders[1].before = [asyncio.Event()]
    run = await front(*encoders, whole(directory, *encoders))
    response = await run.chat(messages=asking(*range(12)))
    assert response.status_code == 400
    (item,) = (n for n in range(12) if uri(n) == encoders[0].items[0])
    assert error_of(response)["param"] == f"messages[0].content[{item}]"
    await until(run.nothing_is_held)
    for other in encoders[1].answers:  # none where the first was refused before
        await other.closed.wait()


@pytest.mark.parametrize("error", [ReferenceNotFound("media item 0: spent"), RowTransferFailed("media item 1: lost")])
async def test_rows_that_are_gone_are_made_again(front: Front, directory: Path, error: TriptychError) -> None:
    encoder = Encoder(directory=directory)
    reader = whole(directory, encoder)
    reader.failures = [error]
    run = await front(encoder, reader)
    assert (await run.chat(messages=asking(1, 2))).status_code == 200
    first, second, *rest = encoder.outputs
    await until(run.nothing_is_held)
    assert sorted(encoder.released) == sorted((first, second))
    assert [encoder.outputs[name] for name in rest] == [TransferOutcome.FINISHED] * 2
    reader.failures = [error, error, error]
    response = await run.chat(messages=asking(1, 2))
    assert response.status_code == 503
    assert error_of(response)["param"] in ("messages[0].content[0]", "messages[0].content[1]")
    assert len(reader.failures) == 1
    await until(run.nothing_is_held)
    assert TransferOutcome.NOT_STARTED not in outcomes(encoder)


async def test_a_client_that_leaves_while_its_picture_is_encoded(front: Front, directory: Path) -> None:
    encoder = Encoder(directory=directory)
    encoder.before = [asyncio.Event()]
    run = await front(encoder, whole(directory, encoder))
    caller = Caller(run, messages=asking(1))
    await until(lambda: bool(encoder.answers))
    await encoder.answers[0].waiting.wait()
    caller.gone.set()
    await caller.task
    await encoder.answers[0].closed.wait()
    await until(run.nothing_is_held)


async def test_a_client_that_leaves_while_rows_are_taken(front: Front, directory: Path) -> None:
    encoder = Encoder(directory=directory)
    reader = whole(directory, encoder)
    reader.script = lambda request: [asyncio.Event()]
    run = await front(encoder, reader)
    caller = Caller(run, messages=asking(1, 2))
    await until(lambda: bool(reader.answers))
    caller.gone.set()
    await caller.task
    await reader.answers[0].closed.wait()
    await until(run.nothing_is_held)
    assert sorted(encoder.released) == sorted(encoder.outputs)
    assert outcomes(encoder) == {TransferOutcome.FAILED}


async def test_an_encoder_that_dies_while_it_encodes(front: Front, directory: Path) -> None:
    encoders = Encoder(directory=directory), Encoder(directory=directory)
    encoders[0].before = [asyncio.Event()]
    server = await serve_role(encoders[0], "127.0.0.1", 0)
    reader = whole(directory, *encoders)
    run = await front(server.address, encoders[1], reader)
    asked = asyncio.create_task(run.chat(messages=asking(*range(12))))
    await until(lambda: bool(encoders[0].answers))
    await encoders[0].answers[0].waiting.wait()
    await server.stop(0)
    assert (await asked).status_code == 200
    assert sorted(encoders[1].items) == sorted(map(uri, range(12)))
    assert set(names_in(reader.requests[0])) == set(encoders[1].outputs)
    await until(run.nothing_is_held)
    assert outcomes(encoders[1]) == {TransferOutcome.FINISHED}
