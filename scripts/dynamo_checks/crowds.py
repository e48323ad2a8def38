"""Many requests at once, and requests whose clients leave."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dynamo_checks.check import Check, expect, expect_equal
from dynamo_checks.client import CHAT, events

if TYPE_CHECKING:
    from dynamo_checks.stack import Stack

CROWD = 20
LENGTH = {"temperature": 0, "min_tokens": 80, "max_tokens": 80}
LASTING = {"temperature": 0, "min_tokens": 3900, "max_tokens": 3900}
"""Many seconds of work for the engine."""
LEAVERS = 4
LEFT_SECONDS = 5.0
"""By then the engine must have let go, of what would have lasted longer."""
LOOK_SECONDS = 0.01


async def together(stack: Stack) -> str:
    """Answers in a crowd equal those alone."""
    beginnings = ("what colour is shape", "Is there a circle at the", "describe", "hello")
    questions = [f"{beginnings[i % 4]} {'top left ' * i}{i}" for i in range(CROWD)]
    alone = [(await stack.client.chat(question, **LENGTH)).text for question in questions]
    expect(len(set(alone)) > CROWD // 2, "the questions are too much alike to tell answers apart")
    running: list[int] = []
    watch = asyncio.create_task(_watch(stack, running))
    try:
        crowd = await asyncio.gather(*(stack.client.chat_streamed(question, **LENGTH) for question in questions))
    finally:
        watch.cancel()
    for question, one, wanted in zip(questions, crowd, alone, strict=True):
        expect_equal(f"text for {question!r}", one.text, wanted)
    await stack.reference.until(running=0, seconds=LEFT_SECONDS)
    expect(max(running) > 1, "they never ran together")
    return f"{CROWD} streams, {max(running)} of them at once in the engine"


async def leaving(stack: Stack) -> str:
    """Clients leave in the middle of their streams: the engine is free at once, and nothing stays behind."""
    before = await stack.reference.load()
    async with asyncio.TaskGroup() as group:
        inside = [asyncio.Event() for _ in range(LEAVERS)]
        leave = asyncio.Event()
        for event in inside:
            group.create_task(_read_some(stack, event, leave))
        await asyncio.gather(*(event.wait() for event in inside))
        await stack.reference.until(running=LEAVERS, seconds=LEFT_SECONDS)
        leave.set()
    took = await stack.reference.until(running=0, seconds=LEFT_SECONDS)
    expect_equal("KV blocks in use", (await stack.reference.load()).blocks, before.blocks)
    return f"{LEAVERS} streams were gone after {1000 * took:.0f} ms"


async def leaving_early(stack: Stack) -> str:
    """A client that waits for a whole answer and leaves."""
    before = await stack.reference.load()
    asking = asyncio.create_task(stack.client.http.post(CHAT, json=stack.client.chat_body("hello", **LASTING)))
    await stack.reference.until(running=1, seconds=LEFT_SECONDS)
    asking.cancel()
    await asyncio.wait([asking])
    took = await stack.reference.until(running=0, seconds=LEFT_SECONDS)
    expect_equal("KV blocks in use", (await stack.reference.load()).blocks, before.blocks)
    await stack.client.chat("hello", max_tokens=1)
    return f"gone after {1000 * took:.0f} ms"


async def _watch(stack: Stack, running: list[int]) -> None:
    """Note how many requests run, until cancelled."""
    while True:
        running.append((await stack.reference.load()).running)
        await asyncio.sleep(LOOK_SECONDS)


async def _read_some(stack: Stack, inside: asyncio.Event, leave: asyncio.Event) -> None:
    """Read the beginning of a stream, then leave when told."""
    body = stack.client.chat_body("hello", stream=True, **LASTING)
    async with stack.client.http.stream("POST", CHAT, json=body) as response:
        expect_equal("status", response.status_code, 200)
        pieces = events(response)  # kept: its end would close the response
        await anext(pieces)
        inside.set()
        await leave.wait()


CHECKS = (
    Check("many at once", together),
    Check("clients leave mid-stream", leaving),
    Check("a client leaves, not streamed", leaving_early),
)
