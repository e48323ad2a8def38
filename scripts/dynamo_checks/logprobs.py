"""Log probabilities: one for each token, the same whichever way they are asked for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dynamo_checks.check import Check, expect, expect_equal

if TYPE_CHECKING:
    from dynamo_checks.client import Answer
    from dynamo_checks.stack import Stack

QUESTION = "what can you do"
UNSURE = "who are you"
"""As a bare prompt it is not in the chat form, and the model is far from sure what comes next."""
TOP = 3
TOLERANCE = 1e-4


async def chat(stack: Stack) -> str:
    """Greedy chat: the chosen token is the most likely one."""
    asked = {"temperature": 0, "logprobs": True}
    answer = await stack.client.chat(QUESTION, **asked, top_logprobs=TOP)
    _sound(answer, TOP)
    for entry in answer.logprobs:
        expect_equal("chosen and most likely", (entry["token"], entry["logprob"]), entry["top"][0])
    expect_equal("tokens joined", "".join(entry["token"] for entry in answer.logprobs), answer.text)
    streamed = await stack.client.chat_streamed(QUESTION, **asked, top_logprobs=TOP)
    expect_equal("streamed", streamed.logprobs, answer.logprobs)
    alone = await stack.client.chat(QUESTION, **asked)
    _close("without candidates", alone.logprobs, answer.logprobs)
    least = min(entry["logprob"] for entry in answer.logprobs)
    return f"{len(answer.logprobs)} tokens, the least sure {least:.4f}"


async def completion(stack: Stack) -> str:
    """The same prompt as ids through completions has the numbers of chat."""
    prompt = list(stack.reference.prompt(QUESTION))
    answer = await stack.client.complete(prompt, temperature=0, logprobs=TOP)
    _sound(answer, TOP)
    asked = await stack.client.chat(QUESTION, temperature=0, logprobs=True, top_logprobs=TOP)
    _close("chat and completion", answer.logprobs, asked.logprobs)
    streamed = await stack.client.complete_streamed(prompt, temperature=0, logprobs=TOP)
    expect_equal("streamed", streamed.logprobs, answer.logprobs)
    return f"{len(answer.logprobs)} tokens, {TOP} candidates each"


async def sampled(stack: Stack) -> str:
    """Hot answers: the chosen token is among the candidates, or Dynamo puts it behind them, less likely than all."""
    options = {"temperature": 2, "seed": 11, "min_tokens": 64, "max_tokens": 64}
    answer = await stack.client.complete(UNSURE, **options, logprobs=TOP)
    _sound(answer, TOP)
    outside = 0
    for entry in answer.logprobs:
        named = [number for token, number in entry["top"] if token == entry["token"]]
        agrees = any(abs(number - entry["logprob"]) < TOLERANCE for number in named)
        expect(agrees, f"{entry['token']!r} has {entry['logprob']}, as a candidate {named}")
        if len(entry["top"]) > TOP:
            outside += 1
            least = entry["top"][TOP - 1][1]
            expect(entry["logprob"] < least + TOLERANCE, f"{entry['token']!r} is likelier than a candidate: {entry}")
    expect(outside > 0, f"every token is among the first {TOP}, so nothing was tried")
    plain = await stack.client.complete(UNSURE, **options)
    expect_equal("text with and without logprobs", answer.text, plain.text)
    return f"{outside} of {len(answer.logprobs)} tokens were not among the first {TOP}"


def _sound(answer: Answer, top: int) -> None:
    """One entry for each token; numbers that can be log probabilities, candidates in their order."""
    expect_equal("entries for tokens", len(answer.logprobs), answer.usage["completion_tokens"])
    for entry in answer.logprobs:
        numbers = [number for _, number in entry["top"][:top]]
        expect(len(numbers) == top, f"{len(numbers)} candidates instead of {top}")
        expect(
            all(-math.inf < number <= 0 for number in (entry["logprob"], *numbers)), f"not a log probability: {entry}"
        )
        expect(numbers == sorted(numbers, reverse=True), f"candidates out of order: {entry}")
        expect(sum(map(math.exp, numbers)) < 1 + TOLERANCE, f"probabilities above 1: {entry}")


def _close(what: str, some: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    expect_equal(f"{what}: tokens", [entry["token"] for entry in some], [entry["token"] for entry in others])
    for one, other in zip(some, others, strict=True):
        difference = abs(one["logprob"] - other["logprob"])
        expect(difference < TOLERANCE, f"{what}: {one['token']!r} has {one['logprob']} and {other['logprob']}")


CHECKS = (
    Check("logprobs, chat", chat),
    Check("logprobs, completion", completion),
    Check("logprobs, sampled", sampled),
)
