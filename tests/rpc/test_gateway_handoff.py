"""Requests that two engines answer together: one computes the prompt, another goes on from it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.chat_files import write_chat_files
from tests.rpc.engine_twin import USAGE, EngineTwin, finished
from tests.rpc.gateway_harness import WITH_PICTURE, Caller, error_of, running, until
from tests.rpc.gateway_parts import Decode, Prefill
from triptych.core.errors import (
    Draining,
    DuplicateRequest,
    InvalidRequest,
    KvSessionNotFound,
    KvTransferFailed,
    MediaError,
    Overloaded,
    SessionMismatch,
)
from triptych.core.events import Failed, Finished, FinishReason, Tokens
from triptych.core.media import Stage
from triptych.core.session import SealedSession
from triptych.wire.gen import lifecycle_pb2, server_pb2

if TYPE_CHECKING:
    from pathlib import Path

    from triptych.core.errors import TriptychError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_files(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.gateway.route.REFRESH_SECONDS", 0.01)


@pytest.mark.parametrize("messages", [WITH_PICTURE, [{"role": "user", "content": "hello"}]])
async def test_one_answer_by_two_engines(directory: Path, messages: list) -> None:
    prefill, decode = Prefill(directory), Decode(directory)
    async with running(prefill, decode) as run:
        response = await run.chat(messages=messages)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == "It is red"
        assert response.json()["usage"]["prompt_tokens"] == USAGE.prompt_tokens
        (first,), (second,) = prefill.requests, decode.requests
        assert (first.handoff, first.session) == (True, None)
        assert (second.handoff, second.media) == (False, ())
        assert second.session == SealedSession("p:1/0", b"p:1/0")
        assert (first.request_id, first.prompt, first.sampling) == (second.request_id, second.prompt, second.sampling)
        assert len(first.media) == (messages is WITH_PICTURE)
        spans = (await run.http.get(f"/v1/timeline/{response.json()['id']}")).json()["spans"]
        assert {span["process"] for span in spans} == {"gateway", "prefill p:1", "decode d:1"}
        assert prefill.aborted == []
        assert run.nothing_is_held()


@pytest.mark.parametrize(("kind", "missing"), [(Prefill, "decode"), (Decode, "prefill")])
async def test_half_a_topology_answers_nothing_and_says_what_is_missing(
    directory: Path, kind: type[EngineTwin], missing: str
) -> None:
    from triptych.gateway.app import Gateway

    twin = kind(directory)
    async with Gateway([twin]) as gateway:
        await until(lambda: gateway.router.engines[0].state.value == "ready")
        assert gateway.router.models() == []
        with pytest.raises(Draining, match=f"no {missing} engine is ready"):
            gateway.router.find("tiny")


async def test_health_follows_the_part_that_is_missing(directory: Path) -> None:
    prefill, decode = Prefill(directory), Decode(directory)
    async with running(prefill, decode) as run:
        await run.all_ready()
        health = await run.http.get("/health")
        assert health.status_code == 200
        assert [engine["role"] for engine in health.json()["engines"]] == ["prefill", "decode"]
        decode.state = lifecycle_pb2.HEALTH_STATE_NOT_READY
        await run.state(1, "not ready")
        health = await run.http.get("/health")
        assert health.status_code == 503
        assert "no decode engine is ready" in health.json()["detail"]
        response = await run.chat()
        assert response.status_code == 503
        assert "no decode engine is ready" in error_of(response)["message"]
        assert prefill.requests == []


async def test_an_aggregated_engine_needs_no_pair(directory: Path) -> None:
    prefill, whole = Prefill(directory), EngineTwin(directory, "whole:1")
    async with running(prefill, whole) as run:
        await run.all_ready()
        assert (await run.chat()).status_code == 200
        assert (len(prefill.requests), len(whole.requests)) == (0, 1)


@pytest.mark.parametrize("error", [Overloaded("full"), Draining("ending"), DuplicateRequest("in use")])
async def test_a_prefill_that_is_refused_goes_elsewhere(directory: Path, error: TriptychError) -> None:
    one, two, decode = Prefill(directory), Prefill(directory, "p:2"), Decode(directory)
    one.failures = [error]
    async with running(one, two, decode) as run:
        await run.all_ready()
        assert (await run.chat()).status_code == 200
        assert decode.sessions == ["p:2/0"]
        assert run.nothing_is_held()


async def test_what_is_wrong_with_the_request_is_said_by_the_prefill_engine(directory: Path) -> None:
    one, two, decode = Prefill(directory), Prefill(directory, "p:2"), Decode(directory)
    one.failures = two.failures = [MediaError(0, "cannot be decoded", Stage.DECODE)]
    async with running(one, two, decode) as run:
        await run.all_ready()
        response = await run.chat(messages=WITH_PICTURE)
        assert response.status_code == 400
        assert error_of(response)["param"] == "messages[0].content[0]"
        assert len(one.requests) + len(two.requests) == 1
        assert decode.requests == []


@pytest.mark.parametrize("error", [KvSessionNotFound("expired"), KvTransferFailed("lost")])
async def test_a_session_that_is_gone_is_computed_again(directory: Path, error: TriptychError) -> None:
    prefill, decode = Prefill(directory), Decode(directory)
    decode.failures = [error]
    async with running(prefill, decode) as run:
        assert (await run.chat()).status_code == 200
        assert decode.sessions == ["p:1/0", "p:1/1"]
        await until(run.nothing_is_held)
        assert prefill.aborted == ["p:1/0"]


async def test_sessions_that_go_on_getting_lost_are_an_error(directory: Path) -> None:
    prefill, decode = Prefill(directory), Decode(directory)
    decode.failures = [KvTransferFailed("lost")] * 10
    async with running(prefill, decode) as run:
        response = await run.chat()
        assert response.status_code == 503
        assert len(decode.requests) == 2
        await until(run.nothing_is_held)
        assert prefill.aborted == ["p:1/0", "p:1/1"]


async def test_for_want_of_room_the_same_session_goes_to_another_decode_engine(directory: Path) -> None:
    prefill, one, two = Prefill(directory), Decode(directory), Decode(directory, "d:2")
    one.failures = two.failures = [Overloaded("full")]
    async with running(prefill, one, two) as run:
        await run.all_ready()
        assert (await run.chat()).status_code == 200
        assert one.sessions == two.sessions == ["p:1/0"]
        assert len(prefill.requests) == 1
        assert prefill.aborted == []


async def test_a_decode_engine_that_is_gone_costs_a_new_prefill(directory: Path) -> None:
    prefill, one, two = Prefill(directory), Decode(directory), Decode(directory, "d:2")
    one.failures = two.failures = [Draining("connection lost")]
    async with running(prefill, one, two) as run:
        await run.all_ready()
        assert (await run.chat()).status_code == 200
        assert sorted(one.sessions + two.sessions) == ["p:1/0", "p:1/1"]
        await until(run.nothing_is_held)
        assert prefill.aborted == ["p:1/0"]


@pytest.mark.parametrize("error", [SessionMismatch("another model"), InvalidRequest("never")])
async def test_what_would_fail_again_lets_the_session_go(directory: Path, error: TriptychError) -> None:
    prefill, decode = Prefill(directory), Decode(directory)
    decode.failures = [error]
    async with running(prefill, decode) as run:
        assert (await run.chat()).status_code in (400, 500)
        assert len(decode.requests) == 1
        await until(run.nothing_is_held)
        assert prefill.aborted == ["p:1/0"]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ([Tokens("any", (1,), "It"), finished()], 500),
        ([Finished("any", FinishReason.CANCELLED, USAGE)], 499),
        ([Tokens("any", (1,), "It"), Failed("any", InvalidRequest("broken"))], 400),
    ],
)
async def test_a_prefill_engine_without_a_session(directory: Path, script: list, status: int) -> None:
    prefill, decode = EngineTwin(directory, "p:1"), Decode(directory)
    prefill.role, prefill.script = server_pb2.ENGINE_ROLE_PREFILL, script
    async with running(prefill, decode) as run:
        assert (await run.chat()).status_code == status
        assert prefill.ended.is_set()
        assert decode.requests == []
        assert run.nothing_is_held()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_the_prefill(directory: Path, stream: bool) -> None:
    prefill, decode = Prefill(directory), Decode(directory)
    prefill.before = [asyncio.Event()]
    async with running(prefill, decode) as run:
        caller = Caller(run, stream=stream)
        await prefill.waiting.wait()
        caller.gone.set()
        await caller.task
        assert prefill.ended.is_set()
        assert decode.requests == []
        await until(run.nothing_is_held)
        assert prefill.aborted == [prefill.requests[0].request_id]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_the_session_is_taken(directory: Path, stream: bool) -> None:
    prefill, decode = Prefill(directory), Decode(directory)
    decode.script = [asyncio.Event(), finished()]
    async with running(prefill, decode) as run:
        caller = Caller(run, stream=stream)
        await decode.waiting.wait()
        caller.gone.set()
        await caller.task
        assert decode.ended.is_set()
        await until(run.nothing_is_held)
        assert prefill.aborted == ["p:1/0"]


async def test_a_client_that_leaves_amid_the_answer(directory: Path) -> None:
    prefill, decode = Prefill(directory), Decode(directory)
    decode.script = [Tokens("any", (1,), "It"), asyncio.Event(), finished()]
    async with running(prefill, decode) as run:
        caller = Caller(run, stream=True)
        await decode.waiting.wait()
        caller.gone.set()
        await caller.task
        assert decode.ended.is_set()
        assert run.nothing_is_held()
