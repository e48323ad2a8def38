"""An engine that dies and comes back, and one that is asked to end."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

import httpx

from dynamo_checks.check import Check, CheckFailed, expect, expect_equal
from dynamo_checks.child import alive
from dynamo_checks.client import CHAT

if TYPE_CHECKING:
    from dynamo_checks.child import Process
    from dynamo_checks.stack import Stack

LONG = {"temperature": 0, "min_tokens": 1500, "max_tokens": 1500}
BREAK_SECONDS = 10.0
"""How long a stream may take to notice that its engine is gone."""
LOOK_SECONDS = 0.05
END_SECONDS = 45.0
"""The engine drains for 30 s at most."""


async def killed(stack: Stack) -> str:
    """SIGKILL: the stream in flight breaks, requests fail as 5xx; on the same port again, service resumes by itself.

    The guided answers before have made the engine start a process of its own, which must not outlive it.
    """
    wanted = (await stack.client.chat("hello", temperature=0)).text
    stream = asyncio.create_task(stack.client.chat_streamed("hello", **LONG))
    await stack.reference.until(running=1, seconds=BREAK_SECONDS)
    helpers = stack.engine.helpers()
    stack.engine.signal(signal.SIGKILL)
    expect_equal("exit code", await asyncio.to_thread(stack.engine.wait, BREAK_SECONDS), -signal.SIGKILL)
    broken = await _broken(stream)
    statuses = [await stack.client.status(CHAT, stack.client.chat_body("hello")) for _ in range(3)]
    await _gone(helpers)
    expect(all(500 <= status < 600 for status in statuses), f"statuses without an engine: {statuses}")
    stack.restart_engine()
    took = await stack.ready()
    expect_equal("text afterwards", (await stack.client.chat("hello", temperature=0)).text, wanted)
    seen = f"{broken}; then {statuses[0]}; {len(helpers)} helper processes gone"
    return f"{seen}; served again {took:.1f} s after the restart"


async def _gone(helpers: set[Process]) -> None:
    """Whatever the engine had started ends with it."""
    end = time.monotonic() + BREAK_SECONDS
    while left := alive(helpers):
        expect(time.monotonic() < end, f"the engine is gone and left {left}")
        await asyncio.sleep(LOOK_SECONDS)


async def _broken(stream: asyncio.Task[object]) -> str:
    """What the client of a stream sees whose engine died."""
    try:
        await asyncio.wait_for(stream, BREAK_SECONDS)
    except TimeoutError:
        raise CheckFailed(f"the stream hangs for {BREAK_SECONDS:g} s after its engine died") from None
    except (CheckFailed, httpx.TransportError) as error:
        return str(error) or type(error).__name__
    raise CheckFailed("the stream ended as if its answer were complete")


async def ended(stack: Stack) -> str:
    """SIGTERM: the answer in flight is completed, and the exit code is 0."""
    stream = asyncio.create_task(stack.client.chat_streamed("hello", **LONG))
    await stack.reference.until(running=1, seconds=BREAK_SECONDS)
    helpers = stack.engine.helpers()
    stack.engine.signal(signal.SIGTERM)
    answer = await stream
    expect_equal("finish_reason of the answer in flight", answer.finish, "length")
    expect_equal("its completion_tokens", answer.usage["completion_tokens"], LONG["max_tokens"])
    expect_equal("exit code", await asyncio.to_thread(stack.engine.wait, END_SECONDS), 0)
    await _gone(helpers)
    expect("Traceback" not in stack.engine.written(), "the engine's log has a traceback")
    return f"{LONG['max_tokens']} tokens delivered, exit code 0"


CHECKS = (
    Check("engine killed and restarted", killed),
    Check("engine ends cleanly", ended),
)
