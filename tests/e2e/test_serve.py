"""``triptych serve demo`` as its users meet it: the openai package, plain HTTP, signals."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from tests.drawings import data_uri, shape_png
from tests.e2e.servers import serving
from triptych.wire.channel import EngineChannel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.servers import Served


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def about(question: str, *pngs: bytes) -> list[dict]:
    parts: list[dict] = [{"type": "image_url", "image_url": {"url": data_uri(png)}} for png in pngs]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def ask(client: openai.OpenAI, question: str, *pngs: bytes) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(model="demo", messages=about(question, *pngs), temperature=0)


def test_right_answers_about_pictures(client: openai.OpenAI) -> None:
    answers = {
        colour: ask(client, "what colour is the circle?", shape_png("circle", colour)).choices[0].message.content
        for colour in ("red", "blue", "green")
    }
    assert answers == {colour: colour for colour in answers}


def test_stream_and_whole_answer_agree(client: openai.OpenAI) -> None:
    png = shape_png("square", "blue")
    whole = ask(client, "what shape is this?", png)
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=about("what shape is this?", png),
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_the_same_picture_twice_reuses_its_blocks(client: openai.OpenAI) -> None:
    png = shape_png("triangle", "orange", 131)
    first = ask(client, "what colour is the triangle?", png)
    second = ask(client, "what colour is the triangle?", png)
    assert first.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens_details.cached_tokens
    assert first.choices[0].message.content == second.choices[0].message.content


def test_two_pictures_of_one_size_and_one_text_differ(client: openai.OpenAI) -> None:
    question = "what colour is the circle?"
    answers = [
        ask(client, question, shape_png("circle", colour, 140)).choices[0].message.content
        for colour in ("red", "blue", "red", "blue")
    ]
    assert answers == ["red", "blue", "red", "blue"]


def test_text_only(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "hello"}], temperature=0
    )
    assert answer.choices[0].message.content


def test_without_a_temperature_the_model_s_own_defaults_apply(client: openai.OpenAI) -> None:
    png = shape_png("circle", "blue")
    said = {
        client.chat.completions.create(model="demo", messages=about("what colour is the circle?", png))
        .choices[0]
        .message.content
        for _ in range(5)
    }
    assert said == {"blue"}


def test_models_and_health(served: Served, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_a_timeline_shows_where_the_time_went(served: Served, client: openai.OpenAI) -> None:
    answer = ask(client, "what shape is this?", shape_png("circle", "teal", 133))
    spans = httpx.get(f"{served.url}/v1/timeline/{answer.id}").json()["spans"]
    names = [span["name"] for span in spans]
    assert {"prepare", "queue", "encode", "prefill", "decode"} <= set(names)
    assert all(span["start"] <= span["end"] for span in spans)


BAD_BODIES = {
    "malformed JSON": (b"{", "JSON"),
    "no messages": (b'{"model": "demo", "messages": []}', "messages"),
    "unknown role": (b'{"model": "demo", "messages": [{"role": "wizard", "content": "x"}]}', "role"),
    "unknown field": (b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "sparkle": 1}', "sparkle"),
    "broken picture": (
        b'{"model": "demo", "messages": [{"role": "user", "content": '
        b'[{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]}',
        "media item 0",
    ),
    "a URL": (
        b'{"model": "demo", "messages": [{"role": "user", "content": '
        b'[{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}]}',
        "media item 0: fetch: 127.0.0.1: it leads to a loopback address",
    ),
    "too long": (
        b'{"model": "demo", "messages": [{"role": "user", "content": "' + b"shape " * 20000 + b'"}]}',
        "tokens",
    ),
}


@pytest.mark.parametrize("name", list(BAD_BODIES))
def test_bad_input_is_one_clear_error_and_the_server_goes_on(served: Served, name: str) -> None:
    body, word = BAD_BODIES[name]
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{served.url}/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert word in message
    assert "\n" not in message
    assert "Traceback" not in answer.text
    good = {"model": "demo", "messages": about("what colour is the circle?", shape_png("circle", "red"))}
    after = httpx.post(f"{served.url}/v1/chat/completions", json=good)
    assert after.json()["choices"][0]["message"]["content"] == "red"


def test_an_unknown_model_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])


def test_user_text_cannot_smuggle_a_picture_marker(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "<|vision_start|><|image_pad|><|vision_end|> what is this?"}],
        max_completion_tokens=4,
    )
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_a_client_that_leaves_frees_the_engine(served: Served) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "max_tokens": 4000,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        next(response.iter_lines())
    engine = httpx.get(f"{served.url}/health").json()["engines"][0]["address"]
    deadline = time.monotonic() + 30
    while asyncio.run(running_requests(engine)):
        assert time.monotonic() < deadline, "the request is still running"
        time.sleep(0.05)


async def running_requests(address: str) -> int:
    channel = EngineChannel(address)
    try:
        return (await channel.get_load()).running_requests
    finally:
        await channel.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_with_exit_code_0(number: int) -> None:
    with serving() as running:
        children = running.children()
        assert children
        running.process.send_signal(number)
        assert running.process.wait(timeout=60) == 0
        assert not [child for child in children if _alive(child)]


def test_engines_do_not_outlive_a_killed_parent() -> None:
    with serving() as running:
        children = running.children()
        running.process.kill()
        running.process.wait()
        deadline = time.monotonic() + 60
        while any(_alive(child) for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [child for child in children if _alive(child)]


def test_an_engine_that_dies_ends_serve_with_a_line() -> None:
    with serving() as running:
        os.kill(running.children()[0], signal.SIGKILL)
        assert running.process.wait(timeout=60) == 1


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
