"""The aggregated role over the shipped demo model, in this process."""

from __future__ import annotations

import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from triptych.cli.assemble import aggregated
from triptych.cli.flags import DEMO
from triptych.cli.loaded import LoadedModel, load
from triptych.cli.options import EngineOptions
from triptych.core.config import MIB
from triptych.core.events import Failed, Finished, Prompt, Tokens, is_terminal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from triptych.core.logprobs import TokenLogprob
    from triptych.core.request import GenerateRequest
    from triptych.roles.desk import Desk


def options(**changes: Any) -> EngineOptions:
    """An engine's options with small defaults."""
    small = {"kv_cache_bytes": 8 * MIB, "max_batched_tokens": 256, "max_running_requests": 32}
    return EngineOptions(**(small | changes))


def load_model(chosen: EngineOptions) -> LoadedModel:
    """The demo model's weights, once."""
    return load(DEMO, chosen, lambda done, total: None)


@asynccontextmanager
async def running(loaded: LoadedModel) -> AsyncIterator[Desk]:
    """A role that is drained in the end."""
    role = aggregated(loaded, uuid.uuid4().hex, check=True)
    try:
        yield role
    finally:
        await role.drain(0)


class Answered(NamedTuple):
    """One whole answer; of several outputs, one of them."""

    token_ids: tuple[int, ...]
    text: str
    end: Finished | Failed
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt: Prompt | None = None


async def ask(role: Desk, request: GenerateRequest) -> Answered:
    """Run one request with one output to its end."""
    (answered,) = await ask_all(role, request)
    return answered


async def ask_all(role: Desk, request: GenerateRequest) -> list[Answered]:
    """Run one request to its end; its outputs in order. The last event holds for all that had not ended before."""
    answer = await role.accept(request)
    token_ids: list[list[int]] = [[] for _ in range(request.num_sequences)]
    logprobs: list[list[TokenLogprob]] = [[] for _ in token_ids]
    texts = [""] * len(token_ids)
    ends: list[Finished | Failed | None] = [None] * len(token_ids)
    prompt: Prompt | None = None
    try:
        terminal = False
        async for event in answer:
            assert not terminal
            terminal = is_terminal(event)
            match event:
                case Prompt():
                    assert prompt is None
                    assert not any(token_ids)
                    prompt = event
                case Tokens(output_index=index):
                    assert ends[index] is None
                    token_ids[index] += event.token_ids
                    logprobs[index] += event.logprobs
                    texts[index] += event.text
                case Finished(output_index=index):
                    assert ends[index] is None
                    ends[index] = event
                case Failed():
                    ends = [end or event for end in ends]
        assert terminal
        return [
            Answered(tuple(ids), text, end, tuple(numbers), prompt)
            for ids, text, end, numbers in zip(token_ids, texts, ends, logprobs, strict=True)
            if end is not None
        ]
    finally:
        await answer.aclose()
