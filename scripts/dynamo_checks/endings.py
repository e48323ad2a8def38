"""How an answer ends: by itself, at a stop string or id, at its length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_checks.check import Check, expect, expect_equal
from dynamo_checks.client import REASON

if TYPE_CHECKING:
    from dynamo_checks.stack import Stack

QUESTION = "what can you do"


async def end_of_sequence(stack: Stack) -> str:
    """The model's own end is the reason, and its id is said."""
    answer = await stack.client.chat(QUESTION, temperature=0, **REASON)
    expect_equal("finish_reason", answer.finish, "stop")
    eos = stack.reference.tokenizer.eos_token_ids
    expect(answer.stop_reason in eos, f"stop_reason is {answer.stop_reason!r}, not one of {sorted(eos)}")
    return f"id {answer.stop_reason}"


async def stop_strings(stack: Stack) -> str:
    """A stop string ends the answer and never shows, also inside a token, across two, and in a stream."""
    whole = (await stack.client.chat(QUESTION, temperature=0)).text
    stops = (whole[8:14], whole[11:13], whole.split()[3])
    for stop in stops:
        wanted = whole[: whole.index(stop)]
        options = {"temperature": 0, "stop": [stop, "never said"], **REASON}
        for answer in (
            await stack.client.chat(QUESTION, **options),
            await stack.client.chat_streamed(QUESTION, **options),
        ):
            expect_equal(f"text before {stop!r}", answer.text, wanted)
            expect_equal("finish_reason", answer.finish, "stop")
            expect_equal("stop_reason", answer.stop_reason, stop)
    return ", ".join(map(repr, stops))


async def stop_ids(stack: Stack) -> str:
    """A stop id ends the answer."""
    direct = await stack.reference.answer(stack.reference.prompt(QUESTION))
    stop = direct.token_ids[4]
    answer = await stack.client.chat(QUESTION, temperature=0, stop_token_ids=[stop], **REASON)
    expect_equal("finish_reason", answer.finish, "stop")
    expect_equal("stop_reason", answer.stop_reason, stop)
    expect(len(answer.text) < len(direct.text), "the answer is not shorter")
    expect_equal("its beginning", answer.text, direct.text[: len(answer.text)])
    return f"id {stop} behind {answer.text!r}"


async def lengths(stack: Stack) -> str:
    """max_tokens, by both its names, cuts; ignore_eos and min_tokens go on."""
    for option in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
        answer = await stack.client.chat(QUESTION, temperature=0, **option)
        expect_equal("finish_reason", answer.finish, "length")
        expect_equal("completion_tokens", answer.usage["completion_tokens"], 3)
    for option in ({"ignore_eos": True}, {"min_tokens": 50}):
        answer = await stack.client.chat(QUESTION, temperature=0, max_tokens=50, **option)
        expect_equal(f"finish_reason with {option}", answer.finish, "length")
        expect_equal(f"completion_tokens with {option}", answer.usage["completion_tokens"], 50)
    return "3 and 50 tokens"


CHECKS = (
    Check("end of sequence", end_of_sequence),
    Check("stop strings", stop_strings),
    Check("stop ids", stop_ids),
    Check("max_tokens, min_tokens", lengths),
)
