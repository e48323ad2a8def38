"""Guides that would keep a compiler or a matcher busy, eat its memory or crash it: each comes back as an error."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.guides import answer, guide, new_compiler, spell
from triptych.core.errors import InvalidRequest

if TYPE_CHECKING:
    from triptych.core.guide import Guide

KEPT = "the grammar takes too long|too much memory"
TOO_LARGE = r"compiling it takes more than 256 MiB|took longer than|could not cope"


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def rules(count: int, rule: str, last: str) -> str:
    return "\n".join(["root ::= r0", *(rule.format(n, n + 1) for n in range(count)), f"r{count} ::= {last}"])


def tag(format: dict[str, Any]) -> Guide:
    return guide("structural_tag", json.dumps({"type": "structural_tag", "format": format}))


COMPILED = {
    "schema nested too deep to parse": (guide("json_schema", nested(20_000)), "nested too deep"),
    "schema nested deep": (guide("json_schema", nested(300)), "nested more than 64 deep"),
    "values nested deep": (guide("json_schema", '{"const":' + "[" * 100_000 + "]" * 100_000 + "}"), "nested too deep"),
    "brackets": (guide("json_schema", "[" * 250_000), "nested too deep"),
    "tag nested deep": (
        guide(
            "structural_tag",
            '{"type":"structural_tag","format":' + '{"type":"star","content":' * 200 + "{}" + "}" * 201,
        ),
        "nested more than 64 deep",
    ),
    "groups nested deep": (guide("regex", "(" * 50_000 + "a" + ")" * 50_000), "could not cope"),
    "grammar nested deep": (guide("ebnf_grammar", "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000), "Nest layer"),
    "repetitions of repetitions": (
        guide("regex", "(((((a{0,99}){0,99}){0,99}){0,99}){0,99})"),
        "too large|could not cope",
    ),
    "a count without measure": (guide("regex", "a{99999999999999999999}"), "repetition count"),
    "a long way of rules": (guide("ebnf_grammar", rules(8000, 'r{0} ::= r{1} | "x"', '"y"')), TOO_LARGE),
    "doubled empty rules": (
        guide("ebnf_grammar", rules(60, 'r{0} ::= r{1} r{1} | ""', "[a-z ]*")),
        f"{TOO_LARGE}|{KEPT}",
    ),
    "a rule that is itself": (guide("ebnf_grammar", "root ::= a\na ::= b\nb ::= a"), "nothing matches it"),
    "references in a circle": (
        guide("json_schema", '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}'),
        "Circular",
    ),
    "a reference to elsewhere": (guide("json_schema", '{"$ref":"http://127.0.0.1/x"}'), "not the place of a schema"),
    "a reference to a file": (guide("json_schema", '{"$ref":"file:///etc/passwd"}'), "not the place of a schema"),
}
FOLLOWED = {
    "ambiguous": guide("ebnf_grammar", 'root ::= x "!"\nx ::= x x | x x x | [a-z]'),
    "nested counts": guide("regex", "(([a-z ]{1,1000}){1,1000}){1,1000}!"),
    "nested empty repetitions": guide(
        "ebnf_grammar", 'root ::= a{1,500} "!"\na ::= b{0,500}\nb ::= c{0,500}\nc ::= [a-z ]{0,500}'
    ),
    "many ways": guide(
        "ebnf_grammar",
        "root ::= x x* \"!\"\nx ::= "
        + " | ".join(f"y{n}" for n in range(300))
        + "\n"
        + "\n".join(f"y{n} ::= [a-z ] y{(n + 1) % 300} | [a-z ]" for n in range(300)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
async def test_a_guide_that_cannot_be_compiled_is_an_error_and_no_more(name: str) -> None:
    asked, reason = COMPILED[name]
    compiler = new_compiler(seconds=3.0, memory_bytes=256 << 20)
    try:
        with pytest.raises(InvalidRequest, match=rf"guided\.{asked.kind.value}: .*({reason})") as refusal:
            answer(await compiler.compile(asked), seed=1)
        assert len(str(refusal.value)) < 400
        assert spell(await compiler.compile(guide("regex", "a")), "a") == "whole"
        assert compiler.statistics()["starts"] == 1
    finally:
        await compiler.close()


@pytest.mark.parametrize("name", FOLLOWED)
async def test_a_guide_that_cannot_be_followed_is_an_error_and_no_more(name: str) -> None:
    compiler = new_compiler(seconds=20.0)
    try:
        grammar = await compiler.compile(FOLLOWED[name])
        with pytest.raises(InvalidRequest, match=re.escape(f"guided.{FOLLOWED[name].kind.value}: ") + f".*({KEPT})"):
            answer(grammar, seed=1, steps=5000)
        assert spell(grammar, "a") == "part"  # another answer is not touched
        assert spell(await compiler.compile(guide("regex", "a")), "a") == "whole"
    finally:
        await compiler.close()


async def test_the_deadline_and_the_memory_are_named() -> None:
    asked = guide("ebnf_grammar", rules(4000, 'r{0} ::= r{1} | "x"', '"y"'))
    for limits, reason in (({"seconds": 0.05}, "longer than 0.05 s"), ({"memory_bytes": 16 << 20}, "more than 16 MiB")):
        compiler = new_compiler(**limits)
        try:
            with pytest.raises(InvalidRequest, match=reason):
                await compiler.compile(asked)
        finally:
            await compiler.close()


async def test_a_guide_does_not_write_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    compiler = new_compiler()
    try:
        with pytest.raises(InvalidRequest, match="would be ignored"):
            await compiler.compile(guide("regex", "a^b"))
        counted = {"type": "tag", "begin": "a", "content": {"type": "any_text", "max_tokens": 1}, "end": "zzz"}
        answer(await compiler.compile(tag(counted)), seed=1, steps=50)
    finally:
        await compiler.close()
    sys.stderr.flush()
    assert capfd.readouterr() == ("", "")
