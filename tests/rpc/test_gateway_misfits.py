"""Engines of one model that do not fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.chat_files import write_chat_files
from tests.rpc.gateway_harness import TEXT, asking, error_of, running, until
from tests.rpc.gateway_parts import Decode, Encoder, Prefill, Reader, Shelf
from triptych.core.errors import Overloaded
from triptych.core.request import EncodeOptions
from triptych.gateway.pool import misfits
from triptych.wire.gen import generation_pb2

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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fingerprint": "g"}, "their fingerprints differ"),
        ({"transfer_backends": ["nixl"]}, "encoder rows move by shared-dir here and by nixl there"),
        ({"transfer_backends": []}, "encoder rows move by shared-dir here and by nothing there"),
    ],
)
async def test_engines_that_do_not_fit_are_not_paired(
    directory: Path, shelf: Shelf, change: dict[str, Any], words: str
) -> None:
    encoder, fit, other = Encoder(directory, shelf), Reader(directory, "pd:1", shelf), Reader(directory, "pd:2", shelf)
    for name, value in change.items():
        other.capabilities.ClearField(name)
        other.capabilities.MergeFrom(type(other.capabilities)(**{name: value}))
    async with running(encoder, fit, other) as run:
        await run.all_ready()
        for _ in range(4):
            assert (await run.chat(messages=asking(1))).status_code == 200
            assert (await run.chat(messages=TEXT)).status_code == 200
        assert all(not request.references for request in other.requests)
        assert other.requests
        (line,) = (await run.http.get("/health")).json()["misfits"]
        assert line.startswith("e:1 and pd:2 do not fit together: ")
        assert words in line
        fit.kill()
        await run.state(1, "unreachable")
        response = await run.chat(messages=asking(1))
        assert response.status_code == 503
        assert line in error_of(response)["message"]
        assert (await run.http.get("/health")).json()["status"] == "degraded"


async def test_two_kinds_of_encoders_for_two_kinds_of_readers(directory: Path, shelf: Shelf) -> None:
    encoders = Encoder(directory, shelf), Encoder(directory, shelf, "e:2")
    readers = Reader(directory, "pd:1", shelf), Reader(directory, "pd:2", shelf)
    encoders[1].capabilities.fingerprint = readers[1].capabilities.fingerprint = "g"
    async with running(*encoders, *readers) as run:
        await run.all_ready()
        for number in range(8):
            assert (await run.chat(messages=asking(number, number + 1))).status_code == 200
        readers[0].failures = readers[1].failures = [Overloaded("full")]
        assert (await run.chat(messages=asking(1, 2))).status_code == 200
        for encoder, reader in zip(encoders, readers, strict=True):
            assert reader.requests
            assert all(name.startswith(encoder.address) for names in reader.offered for name in names)
        await until(run.nothing_is_held)
        assert shelf.each("used", "released")
        assert len([name for name, fate in shelf.fates.items() if fate == ["released"]]) == 2


async def test_the_transport_is_one_that_both_have(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    encoder.capabilities.transfer_backends[:] = ["memory", "nixl", "shared-dir"]
    reader.capabilities.transfer_backends[:] = ["shared-dir", "nixl"]
    async with running(encoder, reader) as run:
        await run.all_ready()
        assert (await run.chat(messages=asking(1))).status_code == 200
        assert encoder.requests[0].encode == EncodeOptions("nixl")


async def test_an_encoder_is_asked_for_pictures_only(directory: Path, shelf: Shelf) -> None:
    """It names the marker of no other kind."""
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    both = [generation_pb2.MODALITY_IMAGE, generation_pb2.MODALITY_VIDEO]
    encoder.capabilities.modalities[:] = reader.capabilities.modalities[:] = both
    async with running(encoder, reader, whole=False) as run:
        await run.all_ready()
        assert (await run.http.get("/health")).json()["status"] == "degraded"
        assert (await run.chat(messages=asking(1))).status_code == 200


@pytest.mark.parametrize(("attribute", "value"), [("producer", False), ("image_token_id", None)])
async def test_encoders_that_say_too_little(directory: Path, shelf: Shelf, attribute: str, value: Any) -> None:
    encoder = Encoder(directory, shelf)
    setattr(encoder.capabilities if attribute == "producer" else encoder, attribute, value)
    async with running(encoder, whole=False) as run:
        await run.state(0, "unusable")
        assert "an encoder engine that" in run.gateway.router.engines[0].detail


async def test_kv_that_moves_by_different_ways(directory: Path) -> None:
    prefills = Prefill(directory, "p:1"), Prefill(directory, "p:2")
    decodes = Decode(directory, "d:1"), Decode(directory, "d:2")
    for number, backend in enumerate(("nixl", "shared-dir")):
        prefills[number].kv_backend = decodes[number].kv_backend = backend
    async with running(*prefills, *decodes) as run:
        await run.all_ready()
        for _ in range(6):
            assert (await run.chat()).status_code == 200
        for prefill, decode in zip(prefills, decodes, strict=True):
            assert decode.sessions == [f"{prefill.address}/{n}" for n in range(3)]
        assert (await run.http.get("/health")).json()["misfits"] == [
            "p:1 and d:2 do not fit together: KV moves by nixl here and by shared-dir there",
            "p:2 and d:1 do not fit together: KV moves by shared-dir here and by nixl there",
        ]
        decodes[0].failures = [Overloaded("full")]
        assert (await run.chat()).status_code == 200
        assert decodes[0].sessions[3:] == ["p:1/3"]
        assert decodes[1].sessions[3:] == ["p:2/3"]  # computed again where there is room for its session
        await until(run.nothing_is_held)
        assert prefills[0].aborted == ["p:1/3"]


async def test_a_prefill_and_a_decode_engine_that_do_not_fit_answer_nothing(directory: Path) -> None:
    prefill, decode = Prefill(directory), Decode(directory)
    prefill.kv_backend, decode.kv_backend = "nixl", "shared-dir"
    async with running(prefill, decode, whole=False) as run:
        await run.all_ready()
        assert (await run.http.get("/v1/models")).json()["data"] == []
        response = await run.chat()
        assert response.status_code == 503
        assert error_of(response)["message"].startswith("no fitting decode engine is ready")
        assert "p:1 and d:1 do not fit together: KV moves by nixl here" in error_of(response)["message"]
        assert (await run.http.get("/health")).status_code == 503
        assert prefill.requests == []


@pytest.mark.parametrize(("ours", "theirs"), [("nixl", ""), ("", "nixl"), ("", "")])
async def test_engines_that_do_not_say_how_kv_moves_are_believed(directory: Path, ours: str, theirs: str) -> None:
    prefill, decode = Prefill(directory), Decode(directory)
    prefill.kv_backend, decode.kv_backend = ours, theirs
    async with running(prefill, decode) as run:
        assert (await run.chat()).status_code == 200
        assert (await run.http.get("/health")).json()["misfits"] == []


async def test_an_engine_that_is_started_anew_with_other_settings(directory: Path, shelf: Shelf) -> None:
    encoder, reader = Encoder(directory, shelf), Reader(directory, shelf=shelf)
    async with running(encoder, reader) as run:
        assert (await run.chat(messages=asking(1))).status_code == 200
        encoder.capabilities.fingerprint, encoder.instance_id = "g", "two"
        await until(lambda: any("e:1 and pd:1" in line for line in misfits(run.gateway.router.engines)))
        assert (await run.chat(messages=asking(1))).status_code == 503
        assert len(encoder.requests) == 1
