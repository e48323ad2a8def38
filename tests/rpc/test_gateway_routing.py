"""Engines that come, go and are busy; clients that go away."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.chat_files import write_chat_files
from tests.rpc.engine_twin import EngineTwin, finished
from tests.rpc.gateway_harness import Caller, error_of, running, until
from triptych.core.errors import (
    Draining,
    DuplicateRequest,
    Internal,
    InvalidRequest,
    MediaUnavailable,
    Overloaded,
    TriptychError,
)
from triptych.core.events import Failed, Tokens
from triptych.core.media import Stage
from triptych.gateway.app import Gateway
from triptych.gateway.limits import GatewayLimits
from triptych.wire.gen import lifecycle_pb2
from triptych.wire.status import TransientFailure

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_files(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.gateway.route.REFRESH_SECONDS", 0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_before_the_first_token_cancels_the_engine(directory: Path, stream: bool) -> None:
    twin = EngineTwin(directory)
    twin.script = [asyncio.Event(), finished()]
    async with running(twin) as run:
        caller = Caller(run, stream=stream)
        await twin.waiting.wait()
        caller.gone.set()
        await caller.task
        assert twin.ended.is_set()
        assert caller.received == []
        assert run.nothing_is_held()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_amid_the_answer_cancels_the_engine(directory: Path, stream: bool) -> None:
    twin = EngineTwin(directory)
    twin.script = [Tokens("any", (1,), "It"), asyncio.Event(), finished()]
    async with running(twin) as run:
        caller = Caller(run, stream=stream)
        await twin.waiting.wait()
        caller.gone.set()
        await caller.task
        assert twin.ended.is_set()
        assert run.nothing_is_held()


async def test_a_client_that_reads_no_more_is_given_up(directory: Path) -> None:
    twin = EngineTwin(directory)
    async with running(twin, limits=GatewayLimits(stall_seconds=0.01)) as run:
        caller = Caller(run, stream=True)
        caller.blocked = asyncio.Event()
        await caller.task
        assert twin.ended.is_set()
        assert run.nothing_is_held()


async def test_a_dead_engine_is_passed_over_and_used_again_when_it_is_back(directory: Path) -> None:
    one, two = EngineTwin(directory, "twin:1"), EngineTwin(directory, "twin:2")
    async with running(one, two) as run:
        await run.state(0, "ready")
        await run.state(1, "ready")
        one.kill()
        for _ in range(3):
            assert (await run.chat()).status_code == 200
        assert (len(one.requests), len(two.requests)) == (0, 3)
        one.down = None
        await run.state(0, "ready")
        await run.chat()
        assert len(one.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error",
    [Overloaded("the media queue is full"), Draining("ending"), TransientFailure("lost"), DuplicateRequest("in use")],
)
async def test_an_engine_that_fails_before_its_first_delta_is_passed_over(
    directory: Path, stream: bool, error: TriptychError
) -> None:
    one, two = EngineTwin(directory, "twin:1"), EngineTwin(directory, "twin:2")
    one.script = [Failed("any", error)]
    async with running(one, two) as run:
        await run.state(0, "ready")
        await run.state(1, "ready")
        response = await run.chat(stream=stream)
        assert response.status_code == 200
        assert (len(one.requests), len(two.requests)) == (1, 1)
        assert one.requests == two.requests
        assert "It is" in response.text
        assert str(error) not in response.text
        assert run.nothing_is_held()


async def test_an_answer_that_has_begun_is_not_begun_elsewhere(directory: Path) -> None:
    one, two = EngineTwin(directory, "twin:1"), EngineTwin(directory, "twin:2")
    one.script = [Tokens("any", (1,), "It"), Failed("any", Overloaded("the consumer did not read"))]
    async with running(one, two) as run:
        await run.state(0, "ready")
        await run.state(1, "ready")
        assert (await run.chat()).status_code == 429
        assert two.requests == []


async def test_an_overloaded_engine_is_passed_over_for_this_request(directory: Path) -> None:
    one, two = EngineTwin(directory, "twin:1"), EngineTwin(directory, "twin:2")
    one.refusal = Overloaded("full")
    async with running(one, two) as run:
        await run.state(1, "ready")
        assert (await run.chat()).status_code == 200
        assert run.gateway.router.engines[0].state.value == "ready"
        two.refusal = Overloaded("full too")
        assert (await run.chat()).status_code == 429


@pytest.mark.parametrize("in_band", [False, True])
@pytest.mark.parametrize(
    "error", [InvalidRequest("never"), MediaUnavailable(0, "timed out", Stage.FETCH), Internal("broken")]
)
async def test_what_would_fail_again_is_not_tried_elsewhere(
    directory: Path, error: TriptychError, in_band: bool
) -> None:
    one, two = EngineTwin(directory, "twin:1"), EngineTwin(directory, "twin:2")
    if in_band:
        one.script = two.script = [Failed("any", error)]
    else:
        one.refusal = two.refusal = error
    async with running(one, two) as run:
        await run.state(0, "ready")
        await run.state(1, "ready")
        assert (await run.chat()).status_code in (400, 500)
        assert len(one.requests) + len(two.requests) == 1


async def test_an_engine_that_does_not_answer_is_passed_over_until_a_look_finds_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.gateway.route.REFRESH_SECONDS", 3600)
    one, two = EngineTwin(directory, "twin:1"), EngineTwin(directory, "twin:2")
    async with running(one, two) as run:
        await run.state(0, "ready")
        await run.state(1, "ready")
        one.down = Draining("connection refused")
        for _ in range(3):
            assert (await run.chat()).status_code == 200
        assert (len(one.requests), len(two.requests)) == (0, 3)
        await run.state(0, "unreachable")


async def test_one_broken_call_has_the_engine_looked_at_again_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.gateway.route.REFRESH_SECONDS", 3600)
    one, two = EngineTwin(directory, "twin:1"), EngineTwin(directory, "twin:2")
    async with running(one, two) as run:
        await run.state(0, "ready")
        await run.state(1, "ready")
        one.refusal = Draining("the connection broke")
        assert (await run.chat()).status_code == 200
        assert (len(one.requests), len(two.requests)) == (1, 1)
        one.refusal = None
        await run.state(0, "ready")
        two.down = Draining("connection refused")
        assert (await run.chat()).status_code == 200
        assert len(one.requests) == 2


async def test_the_least_busy_engine_is_chosen(directory: Path) -> None:
    one, two = EngineTwin(directory, "twin:1"), EngineTwin(directory, "twin:2")
    gate = asyncio.Event()
    one.script = two.script = [gate, finished()]
    async with running(one, two) as run:
        await run.state(0, "ready")
        await run.state(1, "ready")
        tasks = [asyncio.create_task(run.chat()) for _ in range(6)]
        await until(lambda: len(one.requests) + len(two.requests) == 6)
        assert (len(one.requests), len(two.requests)) == (3, 3)
        gate.set()
        assert {response.status_code for response in await asyncio.gather(*tasks)} == {200}
        assert run.nothing_is_held()


async def test_models_are_told_apart_by_name(directory: Path) -> None:
    one, two = EngineTwin(directory, "twin:1", "red"), EngineTwin(directory, "twin:2", "blue")
    async with running(one, two) as run:
        await run.state(0, "ready")
        await run.state(1, "ready")
        assert (await run.chat(model="models/blue")).json()["model"] == "blue"
        assert (len(one.requests), len(two.requests)) == (0, 1)
        unknown = await run.chat(model="green")
        assert unknown.status_code == 404
        assert error_of(unknown)["code"] == "model_not_found"
        assert "'red', 'blue'" in error_of(unknown)["message"]
        listed = (await run.http.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["red", "blue"]
        assert (await run.http.get("/v1/models/models/blue")).json()["id"] == "blue"
        assert (await run.http.get("/v1/models/green")).status_code == 404


async def test_no_engine_was_ever_reached(directory: Path) -> None:
    twin = EngineTwin(directory)
    twin.kill()
    async with running(twin) as run:
        await run.state(0, "unreachable")
        response = await run.chat()
        assert response.status_code == 503
        assert "twin:1 is unreachable" in error_of(response)["message"]
        health = await run.http.get("/health")
        assert health.status_code == 503
        assert health.json()["engines"][0]["state"] == "unreachable"


async def test_the_only_engine_dies(directory: Path) -> None:
    twin = EngineTwin(directory)
    async with running(twin) as run:
        assert (await run.http.get("/health")).json()["status"] == "ok"
        twin.kill()
        assert (await run.chat()).status_code == 503
        await run.state(0, "unreachable")
        assert (await run.chat()).status_code == 503
        assert (await run.http.get("/health")).status_code == 503


async def test_an_engine_that_starts_is_waited_for(directory: Path) -> None:
    twin = EngineTwin(directory)
    twin.state = lifecycle_pb2.HEALTH_STATE_STARTING
    async with Gateway([twin]) as gateway:
        waiting = asyncio.create_task(gateway.router.wait_ready())
        await until(lambda: gateway.router.engines[0].state.value == "starting")
        assert not waiting.done()
        twin.state = lifecycle_pb2.HEALTH_STATE_READY
        await waiting


async def test_an_engine_that_is_started_anew_is_learnt_anew(directory: Path) -> None:
    twin = EngineTwin(directory)
    async with running(twin) as run:
        twin.name, twin.instance_id = "other", "two"
        await until(lambda: run.gateway.router.models()[0].served_name == "other")
        assert (await run.chat()).status_code == 404
        assert (await run.chat(model="other")).status_code == 200


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"role": 9}, "role 9"),
        ({"name": ""}, "names no model"),
        ({"max_context": 0}, "context length"),
        ({"directory": "/nowhere"}, "No such file or directory"),
        ({"down": ValueError("a bug")}, "its log has details"),
    ],
)
async def test_engines_that_cannot_be_used_say_why(directory: Path, change: dict[str, Any], words: str) -> None:
    twin = EngineTwin(directory)
    for name, value in change.items():
        setattr(twin, name, value)
    async with Gateway([twin]) as gateway:
        await until(lambda: gateway.router.engines[0].state.value == "unusable")
        assert words in gateway.router.engines[0].detail
