"""Prefill and decode engines behind a sidecar each: the picture of one engine, and the work of two."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from typing import TYPE_CHECKING

from dynamo_checks.check import Check, expect, expect_equal
from dynamo_checks.client import CHAT

if TYPE_CHECKING:
    from dynamo_checks.stack import Stack

REQUESTS = 12
KILL_SECONDS = 10.0
LEFT_SECONDS = 20.0
LOOK_SECONDS = 0.1


async def handed_over(stack: Stack) -> str:
    """Every prompt is computed by one engine and gone on from by the other, which tokenises nothing."""
    before = await _counts(stack)
    for index in range(REQUESTS):
        await stack.client.chat(f"{uuid.uuid4()} {'what colour ' * index}", temperature=0, max_tokens=8)
    exported, imported, tokenised = (b - a for a, b in zip(before, await _counts(stack), strict=True))
    expect_equal("sessions that left the prefill engine", exported, REQUESTS)
    expect_equal("sessions that the decode engine took", imported, REQUESTS)
    expect_equal("texts that the decode engine tokenised", tokenised, 0)
    await _nothing_left(stack)
    return f"{REQUESTS} sessions, and none is left"


async def prefill_killed(stack: Stack) -> str:
    """SIGKILL of the prefill engine: an answer in flight goes on; on the same port again, service resumes by itself."""
    wanted = (await stack.client.chat("hello", temperature=0)).text
    stream = asyncio.create_task(stack.client.chat_streamed("hello", temperature=0, min_tokens=1500, max_tokens=1500))
    await stack.reference.until(running=1, seconds=KILL_SECONDS)
    engine = stack.engines["prefill"]
    engine.signal(signal.SIGKILL)
    expect_equal("exit code", await asyncio.to_thread(engine.wait, KILL_SECONDS), -signal.SIGKILL)
    statuses = [await stack.client.status(CHAT, stack.client.chat_body(f"{uuid.uuid4()}")) for _ in range(3)]
    expect(all(500 <= status < 600 for status in statuses), f"statuses without a prefill engine: {statuses}")
    expect_equal("tokens of the answer in flight", (await stream).usage["completion_tokens"], 1500)
    stack.restart("prefill")
    took = await stack.ready()
    expect_equal("text afterwards", (await stack.client.chat("hello", temperature=0)).text, wanted)
    return f"the answer in flight was completed; then {statuses[0]}; served again {took:.1f} s after the restart"


async def left_nothing(stack: Stack) -> str:
    """After crowds, leavers and deaths no session is left, and no block is held for one."""
    await _nothing_left(stack)
    blocks = await stack.counter("prefill", "kv_blocks_held")
    expect_equal("KV blocks that the prefill engine holds", blocks, 0)
    return "no session, no block"


async def _counts(stack: Stack) -> tuple[float, float, float]:
    return (
        await stack.counter("prefill", "scheduler_exported_sessions"),
        await stack.counter("decode", "scheduler_imported_sessions"),
        await stack.counter("decode", "intake_tokenisations"),
    )


async def _nothing_left(stack: Stack) -> None:
    end = time.monotonic() + LEFT_SECONDS
    while left := (stack.sessions(), await stack.counter("prefill", "kv_sessions_waiting")):
        if left == ([], 0):
            return
        expect(time.monotonic() < end, f"sessions are left: {left}")
        await asyncio.sleep(LOOK_SECONDS)


CHECKS = (
    Check("prompts handed over", handed_over),
    Check("prefill killed and restarted", prefill_killed),
    Check("nothing is left", left_nothing),
)
