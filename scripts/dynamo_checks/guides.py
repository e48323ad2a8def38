"""Guided answers: whatever the model would say, the answer has the form that was asked for."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from dynamo_checks.check import Check, CheckFailed, expect, expect_equal
from dynamo_checks.client import CHAT

if TYPE_CHECKING:
    from dynamo_checks.client import Answer
    from dynamo_checks.stack import Stack

QUESTION = "hello"
SHAPES = ["circle", "square", "triangle"]
SCHEMA = {
    "type": "object",
    "properties": {
        "shape": {"enum": SHAPES},
        "count": {"type": "integer", "minimum": 0, "maximum": 20},
        "filled": {"type": "boolean"},
        "corners": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 2},
    },
    "required": ["shape", "count", "filled", "corners"],
    "additionalProperties": False,
}
"""Every answer of it has an end, so a model that knows no JSON comes to it."""
FORMAT = {"type": "json_schema", "json_schema": {"name": "picture", "schema": SCHEMA, "strict": True}}
LENGTH = {"max_tokens": 2000}
"""White space may be of any kind and much of it, and this model likes it."""
SEEDS = range(3)
OBJECTS = 10
CUT = {"max_tokens": 200}


async def schema(stack: Stack) -> str:
    """Greedy, sampled and streamed answers match the schema."""
    answers = [await stack.client.chat(QUESTION, temperature=0, response_format=FORMAT, **LENGTH)]
    answers.append(await stack.client.chat_streamed(QUESTION, temperature=0, response_format=FORMAT, **LENGTH))
    expect_equal("streamed text", answers[1].text, answers[0].text)
    for seed in SEEDS:
        options = {"temperature": 1.5, "seed": seed, "response_format": FORMAT, **LENGTH}
        answers.append(await stack.client.chat(QUESTION, **options))
    values = [_object(answer) for answer in answers]
    for value in values:
        _matches(value)
    return f"{len(answers)} answers, such as {json.dumps(values[-1])}"


async def any_object(stack: Stack) -> str:
    """json_object gives an object. A small model may not find its end: what was cut must still begin as one."""
    whole = []
    for seed in range(OBJECTS):
        options = {"temperature": 2, "seed": seed, "response_format": {"type": "json_object"}, **CUT}
        answer = await stack.client.chat(QUESTION, **options)
        if answer.finish == "stop":
            _object(answer)
            whole.append(answer.text)
        else:
            expect(answer.text.lstrip().startswith("{"), f"not the beginning of an object: {answer.text!r}")
    expect(bool(whole), "no answer came to its end")
    return f"{len(whole)} of {OBJECTS} came to their end, such as {min(whole, key=len)!r}"


async def pattern(stack: Stack) -> str:
    """A regular expression and a grammar."""
    texts = []
    for option, form in (
        ({"guided_regex": "(red|blue) [0-9]{3}"}, "(red|blue) [0-9]{3}"),
        ({"guided_grammar": 'root ::= ("yes" | "no") " " [a-c] [a-c] "!"'}, "(yes|no) [a-c]{2}!"),
    ):
        for seed in SEEDS:
            answer = await stack.client.chat(QUESTION, temperature=1, seed=seed, **option, **LENGTH)
            expect_equal("finish_reason", answer.finish, "stop")
            expect(re.fullmatch(form, answer.text) is not None, f"{answer.text!r} does not match {form}")
            texts.append(answer.text)
    return ", ".join(map(repr, texts))


async def forced_tool(stack: Stack) -> str:
    """A tool that must be called bounds the answer by the schema of its arguments."""
    tool = {"type": "function", "function": {"name": "describe", "parameters": SCHEMA}}
    choice = {"type": "function", "function": {"name": "describe"}}
    body = stack.client.chat_body(QUESTION, temperature=0, tools=[tool], tool_choice=choice, **LENGTH)
    message = (await stack.client.post(CHAT, body))["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    expect_equal("calls", [call["function"]["name"] for call in calls], ["describe"])
    arguments = json.loads(calls[0]["function"]["arguments"])
    _matches(arguments)
    return f"describe({json.dumps(arguments)})"


def _object(answer: Answer) -> Any:
    expect_equal("finish_reason", answer.finish, "stop")
    try:
        value = json.loads(answer.text)
    except ValueError:
        raise CheckFailed(f"not JSON: {answer.text!r}") from None
    expect(isinstance(value, dict), f"not an object: {answer.text!r}")
    return value


def _matches(value: Any) -> None:
    """By hand, so that the checker is not the library that made the bound."""
    sound = (
        list(value) == list(SCHEMA["properties"])
        and value["shape"] in SHAPES
        and type(value["count"]) is int
        and 0 <= value["count"] <= 20
        and isinstance(value["filled"], bool)
        and len(value["corners"]) == 2
        and set(value["corners"]) <= {"red", "green"}
    )
    expect(sound, f"{value} does not match the schema")


CHECKS = (
    Check("guided, JSON schema", schema),
    Check("guided, JSON object", any_object),
    Check("guided, regex and grammar", pattern),
    Check("guided, forced tool call", forced_tool),
)
