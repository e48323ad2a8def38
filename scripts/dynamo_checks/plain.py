"""Text in, text out: every way to ask gives what the engine itself says."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from dynamo_checks.check import Check, expect, expect_equal
from dynamo_checks.client import CHAT, TEXT

if TYPE_CHECKING:
    from dynamo_checks.client import Answer
    from dynamo_checks.reference import Greedy
    from dynamo_checks.stack import Stack

QUESTIONS = ("hello", "who are you", "what can you do")
PROMPT = "Is the red circle above the blue square?"
BOUNDS = {"min_tokens": 12, "max_tokens": 24}
BLOCK = 16


async def listed(stack: Stack) -> str:
    """The model is there, with the window that the engine reports."""
    models = (await stack.client.http.get("/v1/models")).json()["data"]
    expect_equal("models", [model["id"] for model in models], [stack.client.model])
    window = await stack.reference.window()
    expect_equal("context_window", models[0]["context_window"], window)
    return f"a window of {window} tokens"


async def chat(stack: Stack) -> str:
    """Whole answers of chat."""
    texts = []
    for question in QUESTIONS:
        wanted = await stack.reference.answer(stack.reference.prompt(question))
        answer = await stack.client.chat(question, temperature=0)
        _same(answer, wanted, "stop")
        texts.append(answer.text)
    return repr(texts[-1])


async def chat_streamed(stack: Stack) -> str:
    """The same in pieces."""
    pieces = 0
    for question in QUESTIONS:
        answer = await stack.client.chat_streamed(question, temperature=0)
        _same(answer, await stack.reference.answer(stack.reference.prompt(question)), "stop")
        pieces += answer.pieces
    expect(pieces > len(QUESTIONS), "every answer came in one piece")
    return f"{pieces} pieces"


async def chat_parts(stack: Stack) -> str:
    """Content given as parts."""
    parts = [{"type": "text", "text": QUESTIONS[1]}]
    _same(
        await stack.client.chat(parts, temperature=0),
        await stack.reference.answer(stack.reference.prompt(QUESTIONS[1])),
        "stop",
    )
    return "as a string's"


async def conversation(stack: Stack) -> str:
    """The name of a conversation, which Dynamo hands on to the engine."""
    body = stack.client.chat_body(QUESTIONS[0], temperature=0)
    response = await stack.client.http.post(CHAT, json=body, headers={"x-dynamo-session-id": "one of many"})
    expect_equal("status", response.status_code, 200)
    return "taken"


async def completion(stack: Stack) -> str:
    """Whole answers of completions: text and token ids."""
    wanted = await stack.reference.answer(PROMPT, **BOUNDS)
    token_ids = stack.reference.tokenizer.encode(PROMPT)
    for prompt in (PROMPT, token_ids):
        answer = await stack.client.complete(prompt, temperature=0, **BOUNDS)
        _same(answer, wanted, answer.finish)
    return f"{len(wanted.token_ids)} tokens"


async def completion_streamed(stack: Stack) -> str:
    """The same in pieces."""
    answer = await stack.client.complete_streamed(PROMPT, temperature=0, **BOUNDS)
    _same(answer, await stack.reference.answer(PROMPT, **BOUNDS), answer.finish)
    expect(answer.pieces > 1, "the answer came in one piece")
    return f"{answer.pieces} pieces"


async def several_prompts(stack: Stack) -> str:
    """A list of prompts gets a choice for each."""
    prompts = [PROMPT, "a red"]
    body = {"model": stack.client.model, "prompt": prompts, "temperature": 0, **BOUNDS}
    choices = (await stack.client.post(TEXT, body))["choices"]
    texts = [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])]
    expect_equal("texts", texts, [(await stack.reference.answer(prompt, **BOUNDS)).text for prompt in prompts])
    return f"{len(texts)} choices"


async def usage(stack: Stack) -> str:
    """Counts, and the reused part of a prompt that was seen before."""
    question = f"{uuid.uuid4()} {'what colour is it? ' * 20}"
    first = (await stack.client.chat(question, max_tokens=4)).usage
    second = (await stack.client.chat_streamed(question, max_tokens=4)).usage
    tokens = len(stack.reference.prompt(question))
    for counts in (first, second):
        expect_equal("prompt_tokens", counts["prompt_tokens"], tokens)
        expect_equal("total_tokens", counts["total_tokens"], tokens + counts["completion_tokens"])
    cached = [counts["prompt_tokens_details"]["cached_tokens"] for counts in (first, second)]
    expect_equal("cached_tokens", cached, [0, (tokens - 1) // BLOCK * BLOCK])
    return f"{tokens} prompt tokens, {cached[1]} of them reused the second time"


def _same(answer: Answer, wanted: Greedy, finish: str | None) -> None:
    expect_equal("text", answer.text, wanted.text)
    expect_equal("finish_reason", answer.finish, finish)
    expect_equal("prompt_tokens", answer.usage["prompt_tokens"], wanted.prompt_tokens)
    # Dynamo counts what it was sent; the engine's own count has the end of sequence too.
    expect_equal("completion_tokens", answer.usage["completion_tokens"], len(wanted.token_ids))


CHECKS = (
    Check("model listed", listed),
    Check("chat", chat),
    Check("chat, streamed", chat_streamed),
    Check("chat, content in parts", chat_parts),
    Check("chat, named conversation", conversation),
    Check("completion, text and ids", completion),
    Check("completion, streamed", completion_streamed),
    Check("completion, several prompts", several_prompts),
    Check("usage and prefix reuse", usage),
)
