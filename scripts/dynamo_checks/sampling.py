"""Sampling options: each is taken, and each does what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_checks.check import Check, expect, expect_equal

if TYPE_CHECKING:
    from dynamo_checks.stack import Stack

PROMPT = "who are you"
"""Not in the chat form, so the model is far from sure what comes next."""
LENGTH = {"min_tokens": 24, "max_tokens": 24}
HOT = {"temperature": 2, "seed": 3}
SEEDS = range(5)


async def greedy(stack: Stack) -> str:
    """Temperature 0 gives the same text twice."""
    first = (await stack.client.complete(PROMPT, temperature=0, **LENGTH)).text
    expect_equal("text", (await stack.client.complete(PROMPT, temperature=0, **LENGTH)).text, first)
    return repr(first[:40])


async def filters(stack: Stack) -> str:
    """A filter that leaves one token makes a hot answer the greedy one."""
    wanted = (await stack.client.complete(PROMPT, temperature=0, **LENGTH)).text
    hot = (await stack.client.complete(PROMPT, **HOT, **LENGTH)).text
    expect(hot != wanted, "temperature 2 gives the greedy text")
    for option in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}):
        expect_equal(
            f"text with {option}", (await stack.client.complete(PROMPT, **HOT, **option, **LENGTH)).text, wanted
        )
        if "top_p" not in option:
            continue
        chat = await stack.client.chat("hello", **HOT, **option)
        expect_equal(f"chat with {option}", chat.text, (await stack.client.chat("hello", temperature=0)).text)
    return "top_k, top_p and min_p"


async def penalties(stack: Stack) -> str:
    """Each penalty changes an answer that repeats itself."""
    plain = (await stack.client.chat("hello", temperature=0, min_tokens=40, max_tokens=40)).text
    for option in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 1.9}):
        answer = await stack.client.chat("hello", temperature=0, min_tokens=40, max_tokens=40, **option)
        expect(answer.text != plain, f"{option} changes nothing")
    return "frequency, presence and repetition"


async def seeds(stack: Stack) -> str:
    """The same seed gives the same text, whole and streamed; other seeds give others."""
    texts = []
    for seed in SEEDS:
        options = {"temperature": 1.5, "seed": seed, **LENGTH}
        texts.append((await stack.client.complete(PROMPT, **options)).text)
        expect_equal(f"text of seed {seed}", (await stack.client.complete(PROMPT, **options)).text, texts[-1])
        streamed = await stack.client.complete_streamed(PROMPT, **options)
        expect_equal(f"streamed text of seed {seed}", streamed.text, texts[-1])
    expect_equal("different texts", len(set(texts)), len(SEEDS))
    return f"{len(SEEDS)} seeds, {len(set(texts))} texts"


CHECKS = (
    Check("temperature 0", greedy),
    Check("top_k, top_p, min_p", filters),
    Check("penalties", penalties),
    Check("seed", seeds),
)
