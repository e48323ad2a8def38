"""Encoders in processes of their own, as their users and their clients meet them."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from tests.drawings import shape_png
from tests.e2e.plain_client import PICTURE, Client, client, idle, picture
from tests.e2e.questions import SECONDS, ask, body, colour_of, processes_of
from tests.e2e.servers import engine_process, run, serving
from triptych.wire.gen import encoder_pb2, error_pb2, generation_pb2, lifecycle_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.servers import Served

COLOURS = ("red", "blue", "green")
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
QUESTION = "what colour is the circle?"


@pytest.fixture(scope="module")
def whole() -> Iterator[Served]:
    """One engine that does everything."""
    with serving() as running:
        yield running


@pytest.fixture(scope="module", params=["e+pd", "e+p+d"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("demo", "--topology", request.param, *directories(tmp_path_factory.mktemp(request.param))) as running:
        yield running


def directories(base: Path) -> tuple[str, ...]:
    return ("--kv-directory", str(base / "kv"), "--encoder-directory", str(base / "rows"))


def roles_of(served: Served) -> list[str]:
    return [engine["role"] for engine in httpx.get(f"{served.url}/health").json()["engines"]]


def test_answers_are_those_of_one_engine(served: Served, whole: Served) -> None:
    red, blue, green = (shape_png("circle", colour) for colour in COLOURS)
    square = shape_png("square", "blue", 97)
    questions = [
        body("hello"),
        body(QUESTION, red),
        body(QUESTION, blue),  # another picture of the same size, the same text
        body("what shape is in the second picture?", red, square),
        body("how many squares are there?", square, red, green),
        body("what shape is in the second picture?", square, square),
        body("what colour is the circle?", red, temperature=1, seed=5, max_tokens=12, ignore_eos=True),
        body("what shape is in the first picture?", square, red, temperature=1.5, seed=6, max_tokens=9),
    ]
    for asked in [*questions, *questions]:  # the second time all is known everywhere
        one, other = ask(whole.url, asked).json(), ask(served.url, asked).json()
        assert one["choices"] == other["choices"]
        assert {name: one["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
            name: other["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        }
    assert [colour_of(served.url, colour).json()["choices"][0]["message"]["content"] for colour in COLOURS] == [
        *COLOURS
    ]


def test_a_timeline_shows_who_did_what(served: Served) -> None:
    answer = ask(served.url, body("what shape is this?", shape_png("square", "teal", 123))).json()  # not seen before
    stages = processes_of(served.url, answer["id"])
    prompts, answers = ("prefill", "decode") if "decode" in roles_of(served) else ("engine", "engine")
    assert {("encoder", "encode"), (prompts, "rows"), (prompts, "prefill"), (answers, "decode")} <= stages
    assert ("gateway", "request") in stages
    assert {role for role, stage in stages if stage == "encode"} == {"encoder"}


def test_text_knows_nothing_of_encoders(served: Served) -> None:
    stages = processes_of(served.url, ask(served.url, body("hello")).json()["id"])
    assert "encoder" not in {role for role, _ in stages}


def test_a_bad_picture_is_named_by_its_place(served: Served) -> None:
    response = ask(served.url, body("what is it?", shape_png("circle", "red"), b"no picture"))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[1]"
    assert colour_of(served.url, "blue").json()["choices"][0]["message"]["content"] == "blue"


def test_an_engine_that_needs_another_one_says_so(served: Served) -> None:
    addresses = {engine["role"]: engine["address"] for engine in httpx.get(f"{served.url}/health").json()["engines"]}
    encoder, prompts = addresses["encoder"], addresses.get("prefill") or addresses["aggregated"]

    async def refusals() -> None:
        async with client(encoder) as e, client(prompts) as p:
            assert "encodes media for others" in await refused(e, prompt="hello")
            assert "encodes media for others" in await refused(e, prompt=f"{PICTURE}{QUESTION}", media=[picture()])
            said = await refused(p, prompt=f"{PICTURE}{QUESTION}", media=[picture()])
            assert "1 media item(s) without encoder_cache" in said
            assert "to an encoder engine first" in said

    asyncio.run(refusals())


async def refused(one: Client, **fields: Any) -> str:
    """Why a request is not accepted."""
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await one.generate(request_id="r", **fields)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refusal.value
    return str(refusal.value.details())


# -- plain clients -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shared-dir", "nixl"])
def test_a_plain_client_uses_a_reference_once_or_lets_it_go(tmp_path: Path, kind: str) -> None:
    if kind == "nixl":
        pytest.importorskip("nixl_cu12")
    flags = ("--encoder-transport", kind, "--encoder-directory", str(tmp_path / "rows"))
    secret = {"TRIPTYCH_HANDOFF_SECRET": "s" * 32}
    with (
        engine_process("demo", "--role", "encoder", *flags, environment=secret) as e,
        engine_process("demo", "--requires-handoff", *flags, environment=secret) as pd,
    ):
        asyncio.run(once_or_never(e.address, pd.address))
    assert kind == "nixl" or list((tmp_path / "rows").iterdir()) == []


async def once_or_never(encoder: str, consumer: str) -> None:
    async with client(encoder) as e, client(consumer) as pd:
        first, second, third = [await encoded(e, str(index)) for index in range(3)]
        assert await outcome(e, first) == encoder_pb2.TRANSFER_OUTCOME_NOT_STARTED
        assert (await answered(pd, "one", first)) == "red"
        (again,) = await consume(pd, "again", first)
        assert again.error.code == error_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND
        assert "media item 0" in again.error.message
        assert (await answered(pd, "two", second)) == "red"
        assert await let_go(e, third) == lifecycle_pb2.ABORT_STATUS_ABORTED
        assert await let_go(e, third) == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
        async with asyncio.timeout(SECONDS):
            while await outcome(e, first) != encoder_pb2.TRANSFER_OUTCOME_FINISHED:  # its producer looks now and then
                await asyncio.sleep(0.05)
        assert await let_go(e, first) == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
        (late,) = await consume(pd, "late", third)
        assert late.error.code == error_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND
        assert (await answered(pd, "last", await encoded(e, "last"))) == "red"
    await idle(encoder)
    await idle(consumer)


async def encoded(one: Client, request_id: str) -> encoder_pb2.EncoderCacheRef:
    """The reference of a picture."""
    asked = {"prompt": f"{PICTURE}{QUESTION}", "media": [picture()], "encoder": encoder_pb2.EncoderOptions()}
    (ready,) = await one.generate(request_id=request_id, **asked)
    assert ready.WhichOneof("event") == "encoder_ready", ready
    assert not ready.HasField("usage")
    (reference,) = ready.encoder_ready.encoder_cache
    return reference


async def consume(
    one: Client, request_id: str, reference: encoder_pb2.EncoderCacheRef
) -> list[generation_pb2.GenerateResponse]:
    """Ask about the picture that was encoded."""
    return await one.generate(request_id=request_id, prompt=f"{PICTURE}{QUESTION}", encoder_cache=[reference])


async def answered(one: Client, request_id: str, reference: encoder_pb2.EncoderCacheRef) -> str:
    events = await consume(one, request_id, reference)
    assert events[-1].WhichOneof("event") == "finished", events[-1]
    return "".join(event.token.text for event in events if event.WhichOneof("event") == "token")


async def outcome(one: Client, reference: encoder_pb2.EncoderCacheRef) -> int:
    asked = encoder_pb2.TransferEncoderCacheRequest(encoder_cache=reference, transfer_id="t", consumer_instance_id="c")
    return int((await one.control.TransferEncoderCache(asked)).outcome)


async def let_go(one: Client, reference: encoder_pb2.EncoderCacheRef) -> int:
    return int((await one.control.Abort(lifecycle_pb2.AbortRequest(encoder_cache=reference))).status)


# -- what cannot be started ----------------------------------------------------------------------


def complains(*flags: str, says: str) -> None:
    """One line, whatever the role."""
    ended = run("engine", "demo", "--grpc", "127.0.0.1:0", *flags)
    assert ended.returncode == 1
    assert says in ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr


def test_a_directory_that_is_not_private_is_refused(tmp_path: Path) -> None:
    private, link, shared = tmp_path / "private", tmp_path / "link", tmp_path / "shared"
    private.mkdir(mode=0o700)
    link.symlink_to(private)
    shared.mkdir(mode=0o750)
    encoder, consumer = ("--role", "encoder"), ("--encoder-transport", "shared-dir", "--requires-handoff")
    complains(*encoder, "--encoder-directory", str(link), says=f"{link} is no directory of its own")
    complains(*encoder, "--encoder-directory", str(shared), says="is open to others (mode 0750)")
    complains(*consumer, "--encoder-directory", str(shared), says="is open to others (mode 0750)")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--requires-handoff",), "--requires-handoff needs --encoder-transport"),
        (("--role", "encoder", "--encoder-transport", "nixl"), "--encoder-transport nixl needs a hand-off secret"),
        (("--role", "encoder", "--encoder-quota", "1KiB"), "--encoder-quota 1024 holds no rows"),
        (("--role", "encoder", "--encoder-quota", "900000GiB"), "MiB are available"),
    ],
)
def test_flags_that_cannot_be_met(flags: tuple[str, ...], says: str) -> None:
    complains(*flags, says=says)


def test_a_text_model_has_nothing_to_encode(tmp_path: Path) -> None:
    from tests.checkpoints import write_checkpoint

    model = str(write_checkpoint("qwen3", tmp_path / "model"))
    for flags, says in (
        (("--role", "encoder"), "an encoder engine needs a model with a vision tower"),
        (("--encoder-transport", "shared-dir"), "--encoder-transport: model reads text only"),
    ):
        ended = run("engine", model, "--grpc", "127.0.0.1:0", "--encoder-directory", str(tmp_path / "rows"), *flags)
        assert ended.returncode == 1
        assert says in ended.stderr
        assert ended.stderr.count("\n") == 1, ended.stderr


# -- several of each -----------------------------------------------------------------------------


@pytest.mark.slow
def test_several_of_each_and_a_clean_end(tmp_path: Path) -> None:
    with serving("demo", "--topology", "2e+1p+2d", *directories(tmp_path)) as running:
        assert roles_of(running) == ["encoder", "encoder", "prefill", "decode", "decode"]

        async def all_of_them() -> list[str]:
            async with httpx.AsyncClient(timeout=60) as http:
                asked = [body(QUESTION, shape_png("circle", COLOURS[n % 3], 96 + n)) for n in range(24)]
                answers = await asyncio.gather(
                    *(http.post(f"{running.url}/v1/chat/completions", json=one) for one in asked)
                )
                return [answer.json()["choices"][0]["message"]["content"] for answer in answers]

        assert asyncio.run(all_of_them()) == [COLOURS[n % 3] for n in range(24)]
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(timeout=60) == 0
    assert [path.name for name in ("kv", "rows") for path in (tmp_path / name).iterdir()] == []


@pytest.mark.slow
def test_nixl_moves_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl_cu12")
    monkeypatch.setenv("TRIPTYCH_HANDOFF_SECRET", "s" * 32)
    with serving("demo", "--topology", "e+p+d", "--kv-transport", "nixl", "--encoder-transport", "nixl") as running:
        for colour in COLOURS * 3:
            assert colour_of(running.url, colour).json()["choices"][0]["message"]["content"] == colour


@pytest.mark.slow
def test_one_engine_with_every_transport_does_all_it_can(tmp_path: Path) -> None:
    """Beside an encoder and a decode engine: prompts for others, whole requests, with and without references."""
    with ExitStack() as stack:
        flags = directories(tmp_path)
        moves = ("--kv-transport", "shared-dir")
        e = stack.enter_context(engine_process("demo", "--role", "encoder", *flags))
        pd = stack.enter_context(engine_process("demo", *moves, "--encoder-transport", "shared-dir", *flags))
        d = stack.enter_context(engine_process("demo", "--role", "decode", *flags))

        async def everything() -> None:
            async with client(e.address) as encoder, client(pd.address) as both, client(d.address) as decode:
                assert await answered(both, "references", await encoded(encoder, "e")) == "red"
                events = await both.generate(request_id="media", prompt=f"{PICTURE}{QUESTION}", media=[picture()])
                assert "red" in "".join(event.token.text for event in events)
                assert await decode.decode("d", await both.prefill("p")) == "red"

        asyncio.run(everything())
