"""Requests to an encoder engine, and how their answers are read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.drawings import shape_png
from triptych.core.events import EncoderReady, is_terminal
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import EncodeOptions, GenerateRequest

if TYPE_CHECKING:
    from tests.roles.fake_engine import FakeEngine
    from triptych.core.events import Event
    from triptych.roles.contract import Answer
    from triptych.roles.desk import Desk

PICTURES = tuple(
    MediaItem(Modality.IMAGE, RawBytes(shape_png(shape, colour)))
    for shape, colour in (("circle", "red"), ("square", "blue"), ("triangle", "green"))
)
MARKER = "<|vision_start|><|image_pad|><|vision_end|>"
STATES = ("waiting", "granted", "taken", "expired", "withdrawn")


def ask(count: int = 1, **changes: Any) -> GenerateRequest:
    """The first ``count`` pictures, to be encoded."""
    plain = {
        "request_id": "r",
        "model": "demo",
        "prompt": MARKER * count,
        "media": PICTURES[:count],
        "encode": EncodeOptions(),
    }
    return GenerateRequest(**(plain | changes))


def outputs(role: Desk) -> tuple[float, ...]:
    """Encoder outputs: waiting, granted, taken, expired, withdrawn."""
    statistics = role.statistics()["encoder_outputs"]
    return tuple(statistics[name] for name in STATES)


async def turns(count: int = 5) -> None:
    """Let everything happen that can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def submitted(engine: FakeEngine, groups: int = 1) -> None:
    """Wait until the engine has had so many groups."""
    async with asyncio.timeout(20):
        while len(engine.submitted) < groups:
            await asyncio.sleep(0.001)


async def rest(answer: Answer) -> list[Event]:
    """All that is still to come; only the last is terminal."""
    events = [event async for event in answer]
    assert [is_terminal(event) for event in events] == [False] * (len(events) - 1) + [True] * bool(events)
    return events


async def ready_of(answer: Answer) -> EncoderReady:
    """The one event of an answer that goes well."""
    (ready,) = await rest(answer)
    assert isinstance(ready, EncoderReady), ready
    return ready
