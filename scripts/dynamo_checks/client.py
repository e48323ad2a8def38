"""Dynamo's HTTP API, as far as the checks use it: one question, whole or streamed, becomes one ``Answer``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from dynamo_checks.check import CheckFailed, expect, expect_equal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ANSWER_SECONDS = 60.0
REASON = {"nvext": {"extra_fields": ["stop_reason"]}}
"""Asks for ``Answer.stop_reason``."""


class Answer(NamedTuple):
    """What came back for one question."""

    text: str
    finish: str | None
    """stop or length."""
    usage: dict[str, Any]
    """Empty where a stream was not asked for it."""
    logprobs: list[dict[str, Any]]
    """For each token: token, logprob, and top as pairs of token and logprob. Empty where not asked for."""
    stop_reason: int | str | None
    pieces: int
    """Deltas with text; 1 where it came whole."""


class Client:
    """Asks one model."""

    def __init__(self, url: str, model: str) -> None:
        self.model = model
        # The machine's proxies are meant for other traffic.
        self.http = httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, trust_env=False)

    async def chat(self, text: object, **options: object) -> Answer:
        """One user turn, answered whole."""
        return read_whole(await self.post(CHAT, self.chat_body(text, **options)))

    async def complete(self, prompt: object, **options: object) -> Answer:
        """A bare prompt, answered whole."""
        return read_whole(await self.post(TEXT, {"model": self.model, "prompt": prompt, **options}))

    async def chat_streamed(self, text: object, **options: object) -> Answer:
        """One user turn, streamed with its usage."""
        return await self._streamed(CHAT, self.chat_body(text, **options))

    async def complete_streamed(self, prompt: object, **options: object) -> Answer:
        """A bare prompt, streamed with its usage."""
        return await self._streamed(TEXT, {"model": self.model, "prompt": prompt, **options})

    def chat_body(self, text: object, **options: object) -> dict[str, Any]:
        """The request of one user turn."""
        return {"model": self.model, "messages": [{"role": "user", "content": text}], **options}

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON of a success.

        Raises:
            CheckFailed: any other status.
        """
        response = await self.http.post(path, json=body)
        expect(response.status_code == 200, f"HTTP {response.status_code}: {response.text[:200]}")
        whole: dict[str, Any] = response.json()
        return whole

    async def status(self, path: str, body: dict[str, Any]) -> int:
        """The status alone."""
        return (await self.http.post(path, json=body)).status_code

    async def _streamed(self, path: str, body: dict[str, Any]) -> Answer:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self.http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise CheckFailed(f"HTTP {response.status_code}: {(await response.aread()).decode()[:200]}")
            chunks = [chunk async for chunk in events(response)]
        expect(bool(chunks) and chunks[-1] is None, "the stream does not end with [DONE]")
        return read_chunks([chunk for chunk in chunks if chunk is not None])


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any] | None]:
    """The chunks of a stream; None for its end mark.

    Raises:
        CheckFailed: an error came in the stream.
    """
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        chunk = None if data == "[DONE]" else json.loads(data)
        expect(chunk is None or "choices" in chunk, f"the stream breaks off with {data[:200]}")
        yield chunk


def read_whole(body: dict[str, Any]) -> Answer:
    """The only choice of a whole response."""
    expect_equal("choices", len(body["choices"]), 1)
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Answer(
        text=text or "",
        finish=choice["finish_reason"],
        usage=body["usage"],
        logprobs=_read_logprobs(choice.get("logprobs")),
        stop_reason=_stop_reason(body),
        pieces=1,
    )


def read_chunks(chunks: list[dict[str, Any]]) -> Answer:
    """The same from the chunks of a stream.

    Raises:
        CheckFailed: it has no end or several, or text after its end.
    """
    texts: list[str] = []
    logprobs: list[dict[str, Any]] = []
    finish, usage, stop_reason = None, {}, None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        said = _stop_reason(chunk)
        stop_reason = stop_reason if said is None else said
        for choice in chunk["choices"]:
            expect(finish is None, "a choice comes behind the finish reason")
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            if piece:
                texts.append(piece)
            logprobs += _read_logprobs(choice.get("logprobs"))
            finish = choice.get("finish_reason")
    expect(finish is not None, "the stream has no finish reason")
    return Answer("".join(texts), finish, usage, logprobs, stop_reason, len(texts))


def _stop_reason(body: dict[str, Any]) -> int | str | None:
    reason: int | str | None = (body.get("nvext") or {}).get("stop_reason")
    return reason


def _read_logprobs(found: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Chat's form, a list of tokens, and that of completions, a list of tokens, of numbers and of mappings."""
    if found is None:
        return []
    if "content" in found:
        return [
            {
                "token": entry["token"],
                "logprob": entry["logprob"],
                "top": [(top["token"], top["logprob"]) for top in entry["top_logprobs"]],
            }
            for entry in found["content"] or []
        ]
    tops = found.get("top_logprobs") or [{}] * len(found["tokens"])
    return [
        {"token": token, "logprob": logprob, "top": list(top.items())}
        for token, logprob, top in zip(found["tokens"], found["token_logprobs"], tops, strict=True)
    ]
