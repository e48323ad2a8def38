"""Prefill and decode in processes of their own, as their users and their clients meet them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest

from tests.drawings import shape_png
from tests.e2e.plain_client import client, idle
from tests.e2e.questions import SECONDS, ask, body, colour_of, processes_of
from tests.e2e.servers import engine_process, gateway, run, serving
from triptych.wire.gen import error_pb2, kv_pb2, lifecycle_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.servers import Served

COLOURS = ("red", "blue", "green")


@pytest.fixture(scope="module")
def kv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv") / "sessions"


@pytest.fixture(scope="module")
def served(kv: Path) -> Iterator[Served]:
    with serving("demo", "--topology", "p+d", "--kv-directory", str(kv)) as running:
        yield running


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def sessions_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.suffix != ".alive"]


def test_answers_are_those_of_one_engine(served: Served) -> None:
    red, blue = shape_png("circle", "red"), shape_png("square", "blue", 97)
    questions = [
        body("hello"),
        body("what colour is the circle?", red),
        body("what shape is in the second picture?", red, blue),
        body("how many squares are there?", blue, red, blue),
        body("what colour is the circle?", red, temperature=1, seed=5, max_tokens=12, ignore_eos=True),
        body("hello", temperature=1.5, seed=6, max_tokens=30, ignore_eos=True, stop=["zzz"]),
    ]
    with serving() as whole:
        for asked in questions:
            one, two = ask(whole.url, asked).json(), ask(served.url, asked).json()
            assert one["choices"] == two["choices"]
            assert one["usage"] == two["usage"]


def test_a_timeline_shows_both_engines(served: Served) -> None:
    answer = ask(served.url, body("what shape is this?", shape_png("square", "teal", 123))).json()  # not seen before
    names = processes_of(served.url, answer["id"])
    assert {("prefill", "encode"), ("prefill", "prefill"), ("decode", "decode"), ("gateway", "request")} <= names
    assert ("decode", "encode") not in names


def test_many_at_once_and_nothing_is_left(served: Served, kv: Path) -> None:
    async def all_of_them() -> list[tuple[str, str]]:
        async with httpx.AsyncClient(timeout=SECONDS) as client:

            async def one(index: int) -> tuple[str, str]:
                colour = COLOURS[index % len(COLOURS)]
                asked = body("what colour is the circle?", shape_png("circle", colour, 96 + index))
                response = await client.post(f"{served.url}/v1/chat/completions", json=asked)
                return colour, response.json()["choices"][0]["message"]["content"]

            return await asyncio.gather(*(one(index) for index in range(32)))

    answers = asyncio.run(all_of_them())
    assert [said for _, said in answers] == [colour for colour, _ in answers]
    deadline = time.monotonic() + 30
    while sessions_in(kv):
        assert time.monotonic() < deadline, sessions_in(kv)
        time.sleep(0.05)


def test_a_client_that_leaves_frees_both_engines(served: Served) -> None:
    asked = body("hello", stream=True, max_tokens=4000, ignore_eos=True)
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=asked) as response:
        assert response.status_code == 200
        next(response.iter_lines())
    engines = [engine["address"] for engine in httpx.get(f"{served.url}/health").json()["engines"]]
    for address in engines:
        asyncio.run(idle(address))


def test_a_bad_picture_is_named_by_its_place(served: Served) -> None:
    response = ask(served.url, body("what is it?", b"no picture"))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[0]"
    assert colour_of(served.url, "blue").json()["choices"][0]["message"]["content"] == "blue"


def test_nixl_moves_the_kv_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl_cu12")
    monkeypatch.setenv("TRIPTYCH_HANDOFF_SECRET", "s" * 32)
    with serving("demo", "--topology", "p+d", "--kv-transport", "nixl") as running:
        for colour in COLOURS * 3:
            assert colour_of(running.url, colour).json()["choices"][0]["message"]["content"] == colour
        for engine in httpx.get(f"{running.url}/health").json()["engines"]:
            asyncio.run(idle(engine["address"]))


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_an_engine_that_dies_ends_serve(tmp_path: Path, index: int) -> None:
    with serving("demo", "--topology", "p+d", "--kv-directory", str(tmp_path / "kv")) as running:
        children = sorted(running.children())
        assert len(children) == 2
        os.kill(children[index], signal.SIGKILL)
        assert running.process.wait(timeout=60) == 1
        assert not [child for child in children if alive(child)]


@pytest.mark.slow
def test_two_of_each_and_a_clean_end(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    with serving("demo", "--topology", "2p+2d", "--kv-directory", str(kv)) as running:
        children = running.children()
        assert len(children) == 4
        roles = [engine["role"] for engine in httpx.get(f"{running.url}/health").json()["engines"]]
        assert roles == ["prefill", "prefill", "decode", "decode"]
        for colour in COLOURS * 2:
            assert colour_of(running.url, colour).json()["choices"][0]["message"]["content"] == colour
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(timeout=60) == 0
        assert not [child for child in children if alive(child)]
    assert list(kv.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_kill_9_amid_requests_is_a_retry_or_an_error_and_never_a_wrong_answer(tmp_path: Path, victim: str) -> None:
    flags = ("--kv-directory", str(tmp_path / "kv"), "--session-ttl", "5")
    with ExitStack() as stack:
        engines = {
            (role, number): stack.enter_context(engine_process("demo", "--role", role, *flags))
            for role in ("prefill", "decode")
            for number in range(2)
        }
        front = stack.enter_context(gateway(*(engine.address for engine in engines.values())))
        usable(front, 4)

        async def under_fire() -> list[tuple[str, httpx.Response]]:
            async with httpx.AsyncClient(timeout=SECONDS) as client:

                async def one(index: int) -> tuple[str, httpx.Response]:
                    colour = COLOURS[index % len(COLOURS)]
                    asked = body("what colour is the circle?", shape_png("circle", colour, 96 + index))
                    return colour, await client.post(f"{front.url}/v1/chat/completions", json=asked)

                calls = [asyncio.create_task(one(index)) for index in range(40)]
                await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                engines[victim, 0].process.kill()
                return await asyncio.gather(*calls)

        for colour, response in asyncio.run(under_fire()):
            if response.status_code == 200:
                assert response.json()["choices"][0]["message"]["content"] == colour
            else:
                assert response.status_code in (500, 503), response.text
                assert response.json()["error"]["message"]
        usable(front, 3)
        for colour in COLOURS:
            assert colour_of(front.url, colour).json()["choices"][0]["message"]["content"] == colour
        for (role, number), engine in engines.items():
            if (role, number) != (victim, 0):
                asyncio.run(idle(engine.address))


def usable(front: Served, count: int) -> None:
    """Wait until the gateway knows so many engines to be ready."""
    deadline = time.monotonic() + 30
    while True:
        engines = httpx.get(f"{front.url}/health").json()["engines"]
        if sum(engine["state"] == "ready" for engine in engines) == count:
            return
        assert time.monotonic() < deadline, engines
        time.sleep(0.05)


@pytest.mark.parametrize("topology", ["p", "2d", "p+x", "0p+d", "p+d+", "100p+d", "40p+40d", ""])
def test_words_that_are_no_topology(topology: str) -> None:
    ended = run("serve", "demo", "--topology", topology)
    assert ended.returncode == 2
    assert "topology" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "environment", "word"),
    [
        (("--role", "prefill"), {"TRIPTYCH_HANDOFF_SECRET": "short"}, "secret"),
        (("--role", "decode", "--kv-transport", "nixl"), {}, "TRIPTYCH_HANDOFF_SECRET"),
        (("--role", "prefill", "--kv-directory", "/nowhere/at/all"), {}, "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_started_says_why(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], environment: dict[str, str], word: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ended = run("engine", "demo", "--grpc", "127.0.0.1:0", *flags)
    assert ended.returncode == 1
    assert word in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "short" not in ended.stderr.replace("too short", "")


# -- plain clients -------------------------------------------------------------------------------


def test_a_plain_client_hands_a_session_over_or_lets_it_go(tmp_path: Path) -> None:
    flags = ("--kv-directory", str(tmp_path / "kv"))
    with (
        engine_process("demo", "--role", "prefill", *flags) as p,
        engine_process("demo", "--role", "decode", *flags) as d,
    ):
        asyncio.run(over_or_go(p.address, d.address))
    assert list((tmp_path / "kv").iterdir()) == []


async def over_or_go(prefill: str, decode: str) -> None:
    async with client(prefill) as p, client(decode) as d:
        session = await p.prefill("one")
        assert [(e.host, e.port, e.protocol) for e in session.endpoints] == [
            ("127.0.0.1", int(prefill.rpartition(":")[2]), "grpc")
        ]
        assert (await p.load()).active_kv_sessions == 1
        assert await d.decode("one", session) == "red"
        await idle(prefill)
        assert await p.abort(session) == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
        assert await d.fails("again", session) == error_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND

        session = await p.prefill("two")
        assert await p.abort(session) == lifecycle_pb2.ABORT_STATUS_ABORTED
        await idle(prefill)
        assert await d.fails("two", session) == error_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND
        session.session_id = "another"
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await p.abort(session)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        await idle(decode)


def test_an_engine_with_another_secret_refuses(tmp_path: Path) -> None:
    flags = ("--kv-directory", str(tmp_path / "kv"))
    one, two = {"TRIPTYCH_HANDOFF_SECRET": "1" * 32}, {"TRIPTYCH_HANDOFF_SECRET": "2" * 32}
    with (
        engine_process("demo", "--role", "prefill", *flags, environment=one) as p,
        engine_process("demo", "--role", "decode", *flags, environment=one) as d,
        engine_process("demo", "--role", "decode", *flags, environment=two) as stranger,
    ):
        asyncio.run(signed(p.address, d.address, stranger.address))


async def signed(prefill: str, decode: str, other: str) -> None:
    async with client(prefill) as p, client(decode) as d, client(other) as stranger:
        session = await p.prefill("one")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stranger.decode("one", session)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        forged = kv_pb2.KvSessionRef()
        forged.CopyFrom(session)
        forged.endpoints[0].port += 1
        for attempt in (d.decode("one", forged), p.abort(forged)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await attempt
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await d.decode("one", session) == "red"  # nothing was consumed by those
        await idle(prefill)
