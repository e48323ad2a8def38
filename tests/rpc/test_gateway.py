"""The gateway's answers and refusals, over engines in memory."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.chat_files import write_chat_files
from tests.rpc.engine_twin import SPANS, EngineTwin, finished
from tests.rpc.gateway_harness import BODY, DATA, PICTURE, error_of, running, sent_events
from triptych.core.errors import (
    Draining,
    Internal,
    InvalidRequest,
    MediaError,
    Overloaded,
    UnsupportedFeature,
)
from triptych.core.events import Failed, FinishReason, Tokens
from triptych.core.media import DataUri, MediaItem, Modality, Stage
from triptych.core.request import Sampling, Stopping
from triptych.gateway.limits import GatewayLimits
from triptych.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import httpx


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_files(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.gateway.route.REFRESH_SECONDS", 0.01)


# -- answers ----------------------------------------------------------------------------------------


async def test_a_whole_answer(directory: Path) -> None:
    twin = EngineTwin(directory)
    async with running(twin) as run:
        response = await run.chat()
    assert response.status_code == 200
    body = response.json()
    assert response.headers["x-request-id"] == body["id"]
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "It is red", "refusal": None},
        "finish_reason": "stop",
        "logprobs": None,
    }
    assert body["choices"] == [choice]
    assert body["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 3,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    assert run.nothing_is_held()


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_streamed_answer(directory: Path, include_usage: bool) -> None:
    twin = EngineTwin(directory)
    twin.script = [
        Tokens("any", (1,), "It"),
        Tokens("any", (2,), ""),
        Tokens("any", (3,), " is"),
        finished(FinishReason.LENGTH),
    ]
    async with running(twin) as run:
        response = await run.chat(stream=True, stream_options={"include_usage": include_usage})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = sent_events(response.text)
    assert done == "[DONE]"
    usage = chunks.pop() if include_usage else None
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "It"},
        {"content": " is"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in chunks} == {response.headers["x-request-id"]}
    if usage:
        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    else:
        assert not any("usage" in chunk for chunk in chunks)
    assert run.nothing_is_held()


async def test_what_reaches_the_engine(directory: Path) -> None:
    twin = EngineTwin(directory)
    tokenizer = Tokenizer.load(directory)
    pad = twin.image_token_id = tokenizer.added_tokens["<|image_pad|>"]
    content = [{"type": "text", "text": "<|image_pad|> what?"}, PICTURE]
    async with running(twin) as run:
        messages = [{"role": "user", "content": content}]
        response = await run.chat(model="tiny-alias", messages=messages, temperature=0, stop="\n", max_tokens=5)
    request = twin.requests[0]
    assert request.request_id == response.json()["id"]
    assert request.model == "tiny"
    assert request.media == (MediaItem(Modality.IMAGE, DataUri(DATA)),)
    assert request.sampling == Sampling(temperature=0)
    assert request.stopping == Stopping(max_tokens=5, stop_strings=("\n",))
    assert request.detokenize
    assert request.prompt.count(pad) == 1  # the picture's own; what the user wrote is text
    text = b"".join(map(tokenizer.token_bytes, request.prompt)).decode()
    assert "user\n<|image_pad|> what?<|vision_start|><|image_pad|><|vision_end|><|im_end|>" in text


# -- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (InvalidRequest("bad"), 400, None),
        (MediaError(0, "no picture", Stage.DECODE), 400, "messages[0].content[1]"),
        (UnsupportedFeature("no"), 400, None),
        (Overloaded("full"), 429, None),
        (Draining("ending"), 503, None),
        (Internal("broken"), 500, None),
    ],
)
@pytest.mark.parametrize("in_band", [False, True])
async def test_a_failure_before_the_first_token_has_its_status(
    directory: Path, stream: bool, error: Any, status: int, param: str | None, in_band: bool
) -> None:
    twin = EngineTwin(directory)
    if in_band:
        twin.script = [Failed("any", error)]
    else:
        twin.refusal = error
    async with running(twin) as run:
        messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, PICTURE]}]
        response = await run.chat(messages=messages, stream=stream)
        assert response.status_code == status
        assert error_of(response)["param"] == param
        assert str(error) in error_of(response)["message"]
        assert run.nothing_is_held()


async def test_a_failure_after_the_first_token_ends_the_stream_with_an_error(directory: Path) -> None:
    twin = EngineTwin(directory)
    twin.script = [Tokens("any", (1,), "It"), Failed("any", Overloaded("the consumer did not read"))]
    async with running(twin) as run:
        response = await run.chat(stream=True)
        assert response.status_code == 200
        *chunks, last = sent_events(response.text)
        assert [c["choices"][0]["delta"].get("content") for c in chunks] == ["", "It"]
        assert last["error"]["code"] == "overloaded"
        assert (await run.chat()).status_code == 429


async def test_an_answer_that_the_engine_was_told_to_end_is_no_success(directory: Path) -> None:
    twin = EngineTwin(directory)
    twin.script = [Tokens("any", (1,), "It"), finished(FinishReason.CANCELLED)]
    async with running(twin) as run:
        assert (await run.chat()).status_code == 499
        assert sent_events((await run.chat(stream=True)).text)[-1]["error"]["code"] == "cancelled"


async def test_a_bug_is_a_500_that_tells_and_logs_nothing_of_the_prompt(directory: Path, caplog) -> None:
    twin = EngineTwin(directory)
    twin.refusal = ValueError("SECRET")  # type: ignore[assignment]
    async with running(twin) as run:
        response = await run.chat(messages=[{"role": "user", "content": "SECRET"}])
    assert response.status_code == 500
    assert "SECRET" not in response.text + caplog.text
    assert "ValueError" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"model": "other"}, 404, None),
        ({"messages": [{"role": "user", "content": "word " * 1000}]}, 400, "messages"),
        ({"tools": [1]}, 400, "tools"),
    ],
)
async def test_refusals_of_the_gateway(
    directory: Path, changes: dict[str, Any], status: int, param: str | None
) -> None:
    twin = EngineTwin(directory)
    async with running(twin) as run:
        response = await run.chat(**changes)
        assert response.status_code == status
        assert error_of(response)["param"] == param
        assert not twin.requests
        assert run.nothing_is_held()


async def test_a_text_model_reads_no_pictures(directory: Path) -> None:
    twin = EngineTwin(directory)
    twin.modalities = []
    async with running(twin) as run:
        response = await run.chat(messages=[{"role": "user", "content": [PICTURE]}])
    assert response.status_code == 400
    assert error_of(response)["message"] == "messages[0].content[0]: the model 'tiny' reads no images"


async def test_a_template_that_passes_over_pictures(tmp_path: Path) -> None:
    """Its answer would be about no picture at all."""
    source = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    twin = EngineTwin(write_chat_files(tmp_path, source))
    twin.image_token_id = Tokenizer.load(tmp_path).added_tokens["<|image_pad|>"]
    async with running(twin) as run:
        content = [{"type": "text", "text": "what?"}, PICTURE]
        response = await run.chat(messages=[{"role": "user", "content": content}])
    assert response.status_code == 400
    assert "1 image item(s) were sent but the prompt has 0" in error_of(response)["message"]


async def test_other_paths_and_methods(directory: Path) -> None:
    async with running(EngineTwin(directory)) as run:
        missing = await run.http.get("/v1/nothing")
        method = await run.http.get("/v1/chat/completions")
    assert (missing.status_code, method.status_code) == (404, 405)
    assert "/v1/nothing" in error_of(missing)["message"]
    assert error_of(method)["type"] == "invalid_request_error"
    assert method.headers["allow"] == "POST"


class TestLimits:
    async def test_a_body_too_large(self, directory: Path) -> None:
        async with running(EngineTwin(directory), limits=GatewayLimits(max_body_bytes=100)) as run:
            declared = await run.http.post("/v1/chat/completions", content=b" " * 101)

            async def undeclared() -> AsyncIterator[bytes]:
                for _ in range(101):
                    yield b" "

            chunked = await run.http.post("/v1/chat/completions", content=undeclared())
            for response in (declared, chunked):
                assert response.status_code == 413
                assert (
                    "at most 100" in error_of(response)["message"] or "more than 100" in error_of(response)["message"]
                )
            assert run.nothing_is_held()

    async def test_bodies_too_large_together(self, directory: Path) -> None:
        twin = EngineTwin(directory)
        twin.script = [gate := asyncio.Event(), finished()]
        size = len(json.dumps(BODY))
        async with running(twin, limits=GatewayLimits(max_held_bytes=size + 10)) as run:
            first = asyncio.create_task(run.chat())
            await twin.waiting.wait()
            assert (await run.chat()).status_code == 429
            gate.set()
            assert (await first).status_code == 200
            assert run.nothing_is_held()

    async def test_a_body_that_does_not_come(self, directory: Path) -> None:
        async def never() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.Event().wait()

        async with running(EngineTwin(directory), limits=GatewayLimits(body_seconds=0.01)) as run:
            response = await run.http.post("/v1/chat/completions", content=never())
            assert response.status_code == 400
            assert "did not arrive" in error_of(response)["message"]

    async def test_too_much_work(self, directory: Path) -> None:
        async with running(EngineTwin(directory)) as run:
            run.gateway.workers._max_pending = 0
            assert (await run.chat()).status_code == 429


# -- timelines --------------------------------------------------------------------------------------


async def test_a_timeline_tells_where_the_time_went(directory: Path) -> None:
    async with running(EngineTwin(directory)) as run:
        response = await run.chat(stream=True)
        found = (await run.http.get(f"/v1/timeline/{response.headers['x-request-id']}")).json()
        spans = {(span["process"], span["name"]): span for span in found["spans"]}
        assert {name for process, name in spans if process == "gateway"} == {
            "request",
            "parse",
            "tokenise",
            "first token",
        }
        assert {name for process, name in spans if process == "engine twin:1"} == {span.name for span in SPANS}
        whole = spans["gateway", "request"]
        for name in ("parse", "tokenise", "first token"):
            assert whole["start"] <= spans["gateway", name]["start"] <= spans["gateway", name]["end"] <= whole["end"]
        unknown = await run.http.get("/v1/timeline/nothing")
        assert unknown.status_code == 404
        assert error_of(unknown)["code"] == "request_not_found"


async def test_the_oldest_timelines_are_forgotten(directory: Path) -> None:
    async with running(EngineTwin(directory)) as run:
        run.gateway.timelines._limit = 2
        ids = [(await run.chat()).json()["id"] for _ in range(3)]
        statuses = [(await run.http.get(f"/v1/timeline/{i}")).status_code for i in ids]
    assert statuses == [404, 200, 200]


# -- anything at all --------------------------------------------------------------------------------


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.one_of(
        st.binary(max_size=40),
        st.dictionaries(st.sampled_from(["messages", "stop", "temperature", "max_tokens", "stream", "x"]), JSON)
        .map(lambda changes: BODY | changes)
        .map(json.dumps)
        .map(str.encode),
    )
)
def test_no_body_is_the_servers_fault(directory: Path, body: bytes) -> None:
    async def post() -> httpx.Response:
        async with running(EngineTwin(directory)) as run:
            return await run.http.post("/v1/chat/completions", content=body)

    response = asyncio.run(post())
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert error_of(response)["message"]
