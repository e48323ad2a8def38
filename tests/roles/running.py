"""The aggregated role over the shipped demo model, in this process."""

from __future__ import annotations

import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from triptych.cli.assemble import LoadedModel, aggregated, load
from triptych.cli.flags import DEMO
from triptych.cli.options import EngineOptions
from triptych.core.config import MIB
from triptych.core.events import Failed, Finished, Tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from triptych.core.request import GenerateRequest
    from triptych.roles.aggregated import Aggregated


def options(**changes: int) -> EngineOptions:
    """An engine's options with small defaults."""
    small = {"kv_cache_bytes": 8 * MIB, "max_batched_tokens": 256, "max_running_requests": 32}
    return EngineOptions(**(small | changes))


def load_model(chosen: EngineOptions) -> LoadedModel:
    """The demo model's weights, once."""
    return load(DEMO, chosen, lambda done, total: None)


@asynccontextmanager
async def running(loaded: LoadedModel) -> AsyncIterator[Aggregated]:
    """A role that is drained in the end."""
    role = aggregated(loaded, uuid.uuid4().hex, check=True)
    try:
        yield role
    finally:
        await role.drain(0)


class Answered(NamedTuple):
    """One whole answer."""

    token_ids: tuple[int, ...]
    text: str
    end: Finished | Failed


async def ask(role: Aggregated, request: GenerateRequest) -> Answered:
    """Run one request to its end."""
    answer = await role.accept(request)
    try:
        token_ids: list[int] = []
        text = ""
        end: Finished | Failed | None = None
        async for event in answer:
            if isinstance(event, Tokens):
                token_ids += event.token_ids
                text += event.text
            else:
                assert end is None
                end = event
        assert end is not None
        return Answered(tuple(token_ids), text, end)
    finally:
        await answer.aclose()
