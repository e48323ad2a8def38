"""A gateway in front of two engines that read pictures and videos: one dials the Internet only, one this machine too.

Both read the same random checkpoint. Where an item may come from is all that tells them apart.
"""

from __future__ import annotations

import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import openai
import pytest
import tokenizers

from tests.chat_files import EVERY_KIND
from tests.checkpoints import write_checkpoint
from tests.drawings import data_uri, shape_png
from tests.e2e.holdings import metrics
from tests.e2e.hostile_urls import SECRET
from tests.e2e.servers import Engine, engine_process, gateway
from tests.e2e.site import Site, site
from triptych.core.events import Finished, Tokens
from triptych.core.request import GenerateRequest, Sampling, Stopping
from triptych.wire.channel import EngineChannel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from triptych.core.media import MediaItem

CLOSED, OPEN = "closed", "open"
"""Names under which the two are served."""
SECONDS = 60.0
MAX_TOKENS = 8
HEAD = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
TAIL = "<|im_end|>\n<|im_start|>assistant\n"
"""What the checkpoint's template writes around one turn of a user's."""
RED = shape_png("circle", "red")
FETCHING = "media_fetching_"


class Front(NamedTuple):
    """Running processes."""

    url: str
    """Of the gateway."""
    closed: Engine
    open: Engine
    site: Site
    """Which the second engine may fetch from, and the first may not."""
    words: Words


class Said(NamedTuple):
    """An answer."""

    text: str
    prompt_tokens: int


class Words:
    """The checkpoint's tokenizer twice: as it is, and as one that never heard of an added token."""

    def __init__(self, directory: Path) -> None:
        tree = json.loads((directory / "tokenizer.json").read_text())
        self._whole = tokenizers.Tokenizer.from_str(json.dumps(tree))
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(tree | {"added_tokens": []}))

    def whole(self, text: str) -> tuple[int, ...]:
        """Ids of a text that the template wrote."""
        return tuple(self._whole.encode(text, add_special_tokens=False).ids)

    def plain(self, text: str) -> tuple[int, ...]:
        """Ids of a text that a user wrote."""
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)


@contextmanager
def media_front(directory: Path) -> Iterator[Front]:
    """Both engines and the gateway, ready to answer."""
    write_checkpoint("vl-plain", directory, videos=True)
    (directory / "chat_template.jinja").write_text(EVERY_KIND)
    with ExitStack() as cleanup:
        page = cleanup.enter_context(site())
        usual = ("--max-loras", "0", "--no-kv-events", "--kv-cache-bytes", "16MiB", "--decode-workers", "1")
        ports = ("--fetch-ports", "80", "--fetch-ports", "443", "--fetch-ports", f"{page.port}")
        reach = {CLOSED: (), OPEN: ("--fetch-private-networks", "--fetch-retries", "0")}
        # Whatever the environment says about proxies is not to be used.
        proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), page.url("/"))

        def start(name: str) -> Engine:
            flags = (*usual, *ports, *reach[name], "--served-name", name, "--metrics", "127.0.0.1:0")
            return cleanup.enter_context(engine_process(f"{directory}", *flags, environment=proxies))

        with ThreadPoolExecutor() as starting:
            closed, opened = starting.map(start, reach)
        front = cleanup.enter_context(gateway(closed.address, opened.address))
        deadline = time.monotonic() + SECONDS
        while len(httpx.get(f"{front.url}/v1/models").json().get("data", ())) < len(reach):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield Front(front.url, closed, opened, page, Words(directory))


async def told(engine: Engine, model: str, prompt: str | tuple[int, ...], media: Sequence[MediaItem]) -> Said:
    """What an engine answers that is asked by itself, greedily, over gRPC."""
    channel = EngineChannel(engine.address)
    request = GenerateRequest(
        "by itself",
        model,
        prompt,
        media=tuple(media),
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=MAX_TOKENS, ignore_eos=True),
    )
    try:
        events = [event async for event in await channel.generate(request)]
    finally:
        await channel.close()
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.usage is not None
    return Said("".join(event.text for event in events if isinstance(event, Tokens)), last.usage.prompt_tokens)


# -- parts of messages -------------------------------------------------------------------------------


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def video(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def uri(data: bytes) -> str:
    """A data: URI that does not say what it is."""
    return f"data:;base64,{base64.b64encode(data).decode()}"


PARTS = {"image": image, "video": video}
"""By URL."""


# -- a client ----------------------------------------------------------------------------------------


class Asking:
    """The openai package before the gateway."""

    def __init__(self, front: Front, client: openai.AsyncOpenAI) -> None:
        self.front = front
        self._client = client

    async def complete(self, model: str, messages: list[Any], **fields: Any) -> Any:
        """What the package makes of the answer, which is greedy."""
        return await self._client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=MAX_TOKENS,
            extra_body={"ignore_eos": True},
            **fields,
        )

    async def __call__(self, model: str, *parts: dict[str, Any]) -> Said:
        answered = await self.complete(model, [{"role": "user", "content": [*parts]}])
        (choice,) = answered.choices
        assert choice.finish_reason == "length"
        return Said(choice.message.content, answered.usage.prompt_tokens)

    async def error(self, model: str, messages: list[Any], **fields: Any) -> openai.APIStatusError:
        """What comes in place of an answer: one line, in OpenAI's shape, without what nobody may read."""
        with pytest.raises(openai.APIStatusError) as caught:
            await self.complete(model, messages, **fields)
        error = caught.value
        said = message_of(error)
        assert said.splitlines() == [said]
        assert "Traceback" not in said
        assert error.response.headers["content-type"] == "application/json"
        assert set(error.response.json()) == {"error"}
        assert set(error.response.json()["error"]) == {"message", "type", "param", "code"}
        assert SECRET not in error.response.text
        assert SECRET not in str(error.response.headers)
        return error

    async def refusal(self, model: str, part: dict[str, Any], **fields: Any) -> openai.APIStatusError:
        """Of the item that comes after a good picture."""
        content = [image(data_uri(RED)), part, text("what?")]
        return await self.error(model, [{"role": "user", "content": content}], **fields)

    async def refused(self, model: str, part: dict[str, Any], stage: str = "fetch") -> str:
        """The reason, where a retry cannot help."""
        error = await self.refusal(model, part)
        said = message_of(error)
        assert (error.status_code, error.type, error.code) == (400, "invalid_request_error", None), said
        assert error.param == "messages[0].content[1]"
        assert said.startswith(f"media item 1: {stage}: "), said
        return said.removeprefix(f"media item 1: {stage}: ")

    async def numbers(self, name: str, *marks: str) -> dict[str, float]:
        """An engine's metrics whose names begin with one of these."""
        engine = self.front.closed if name == CLOSED else self.front.open
        return {key: number for key, number in (await metrics(engine)).items() if key.startswith(marks)}

    async def fetched(self, name: str) -> dict[str, float]:
        """What an engine's fetcher has counted."""
        return await self.numbers(name, FETCHING)


def changes(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Of a fetcher's counts, those that are not what they were."""
    return {name.removeprefix(FETCHING): after[name] - before[name] for name in after if after[name] != before[name]}


def message_of(error: openai.APIStatusError) -> str:
    """What it says for people."""
    said: str = error.response.json()["error"]["message"]
    return said
