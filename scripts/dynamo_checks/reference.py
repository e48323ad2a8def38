"""The same engine asked with nothing in between: what Dynamo's answers have to equal."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple

from dynamo_checks.check import CheckFailed
from triptych.core.events import Failed, Finished, Tokens
from triptych.core.request import GenerateRequest, Sampling, Stopping
from triptych.text.chat import ChatMessage, ChatTemplate
from triptych.text.tokenizer import Tokenizer
from triptych.wire.channel import EngineChannel

if TYPE_CHECKING:
    from pathlib import Path

LOOK_SECONDS = 0.02


class Load(NamedTuple):
    """How busy the engine is."""

    running: int
    queued: int
    blocks: int


class Greedy(NamedTuple):
    """A greedy answer."""

    token_ids: tuple[int, ...]
    """Those that were sent: no end of sequence."""
    text: str
    prompt_tokens: int


class Reference:
    """Belongs to one event loop."""

    def __init__(self, address: str, directory: Path) -> None:
        self.tokenizer = Tokenizer.load(directory)
        self._template = ChatTemplate.load(directory, self.tokenizer)
        self._model = str(directory)
        self._channel = EngineChannel(address)

    def prompt(self, text: str) -> tuple[int, ...]:
        """Token ids of one user turn."""
        return self._template.render([ChatMessage("user", text)], max_tokens=2**20).token_ids

    async def answer(self, prompt: str | tuple[int, ...], max_tokens: int = 100, min_tokens: int = 0) -> Greedy:
        """What the engine itself says.

        Raises:
            CheckFailed: it fails.
        """
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            model=self._model,
            prompt=prompt,
            sampling=Sampling(temperature=0),
            stopping=Stopping(max_tokens=max_tokens, min_tokens=min_tokens),
        )
        token_ids: list[int] = []
        text = ""
        async for event in await self._channel.generate(request):
            match event:
                case Tokens():
                    token_ids += event.token_ids
                    text += event.text
                case Finished(usage=usage) if usage is not None:
                    return Greedy(tuple(token_ids), text, usage.prompt_tokens)
                case Failed(error=error):
                    raise CheckFailed(f"asked directly, the engine fails: {error}")
        raise CheckFailed("asked directly, the engine sends no end")

    async def window(self) -> int:
        """Tokens of prompt and answer together."""
        return (await self._channel.get_model_info(self._model)).max_context_length

    async def load(self) -> Load:
        """Now."""
        load = await self._channel.get_load()
        return Load(load.running_requests, load.queued_requests, load.used_kv_blocks)

    async def until(self, running: int, seconds: float) -> float:
        """Wait until that many requests run and none is queued; returns how long that took.

        Raises:
            CheckFailed: not in time.
        """
        begin = time.monotonic()
        while (load := await self.load())[:2] != (running, 0):
            if time.monotonic() - begin > seconds:
                raise CheckFailed(f"after {seconds:g} s the engine has {load}, not {running} running")
            await asyncio.sleep(LOOK_SECONDS)
        return time.monotonic() - begin

    async def close(self) -> None:
        """Disconnect."""
        await self._channel.close()
