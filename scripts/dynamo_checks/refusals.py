"""What is refused, and that a refusal harms nobody else: the next request is served at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_checks.check import Check, expect_equal
from dynamo_checks.client import CHAT

if TYPE_CHECKING:
    from dynamo_checks.stack import Stack

PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="


async def too_long(stack: Stack) -> str:
    """A prompt beyond the window, and an answer that would not fit into what is left of it."""
    window = await stack.reference.window()
    for question in ("hello " * window, "hello " * 10 * window):
        await _refused(stack, question)
    tokens = len(stack.reference.prompt(""))
    answer = await stack.client.chat("hello " * (window - tokens - 10), temperature=0, ignore_eos=True, max_tokens=500)
    expect_equal("finish_reason of an answer that fills the window", answer.finish, "length")
    expect_equal("total_tokens", answer.usage["total_tokens"], window)
    return f"400 beyond {window} tokens, prompt and answer end at them"


async def guides(stack: Stack) -> str:
    """Guides that cannot be compiled."""
    broken = (
        {"guided_regex": "(["},
        {"guided_grammar": "root ::= nothing"},
        {"guided_json": {"type": "wrong"}},
        {"guided_json": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}},
    )
    for option in broken:
        await _refused(stack, "hello", **option)
    return f"{len(broken)} broken ones get 400"


async def others(stack: Stack) -> str:
    """What Dynamo itself refuses never reaches the engine."""
    body = stack.client.chat_body("hello")
    expect_equal("status of an unknown model", await stack.client.status(CHAT, {**body, "model": "unknown"}), 404)
    await _refused(stack, [{"type": "image_url", "image_url": {"url": PIXEL}}])
    await _refused(stack, "hello", n=2)
    await _refused(stack, "hello", temperature=-1)
    await _refused(stack, "hello", seed=-1)
    return "unknown model, picture, n, temperature, seed"


async def _refused(stack: Stack, content: object, **options: object) -> None:
    """HTTP 400, and then at once an answer."""
    named = " ".join(options) or str(content)[:20]
    status = await stack.client.status(CHAT, stack.client.chat_body(content, **options))
    expect_equal(f"status for {named!r}", status, 400)
    status = await stack.client.status(CHAT, stack.client.chat_body("hello", max_tokens=1))
    expect_equal(f"status of the request behind {named!r}", status, 200)


CHECKS = (
    Check("refused: too long", too_long),
    Check("refused: broken guides", guides),
    Check("refused by Dynamo", others),
)
