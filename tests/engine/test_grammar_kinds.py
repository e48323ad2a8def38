"""What every kind of guide allows, and why guides are refused: the real library, compiled and followed."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.guides import TOKENS, answer, guide, new_compiler, spell
from triptych.core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from triptych.core.guide import Guide
    from triptych.engine.grammar import GrammarCompiler


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    made = new_compiler()
    yield made
    await made.close()


def tag(format: dict[str, Any]) -> Guide:
    return guide("structural_tag", json.dumps({"type": "structural_tag", "format": format}))


PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "required": ["a"]}
ALLOWED: list[tuple[Guide, list[str], list[str]]] = [
    (
        guide("json_object"),
        ["{}", '{"a": [1, {"b": null}]}', '{\n    "a": "x"\n}'],
        ["[]", "1", "{} ", '{"a": \t' + " " * 40],
    ),
    (guide("json_schema", '{"type":"object"}'), ["{}", '{"x": {"y": true}}'], ["[]"]),
    (guide("json_schema", "true"), ["1", "null", '"x"', "[]"], ["x"]),
    (
        guide("json_schema", json.dumps(PAIR)),
        ['{"a": 1}', '{"a":1,"b":null}'],
        ["{}", '{"b":null}', '{"a":1,"c":2}', '{"a":1.5}'],
    ),
    (
        guide("json_schema", json.dumps(PAIR | {"additionalProperties": True})),
        ['{"a":1,"c":2}'],
        ['{"a":1,"a":2}', '{"\\u0061":1}'],
    ),
    (
        guide("json_schema", '{"$ref":"#/$defs/t","$defs":{"t":{"type":"array","items":{"$ref":"#/$defs/t"}}}}'),
        ["[[],[[]]]"],
        ["[1]"],
    ),
    (
        guide("json_schema", '{"type":"string","pattern":"^[a-z]{2}.$"}'),
        ['"abc"', '"abé"'],
        ['"ab"', '"abcd"', '"ab""', '"ab\\"'],
    ),
    (guide("json_schema", '{"type":["string","null"],"pattern":"x"}'), ['"x"', "null"], ['"y"', "1"]),
    (
        guide("json_schema", '{"type":"string","minLength":1,"maxLength":2}'),
        ['"a"', '"éé"'],
        ['""', '"abc"', '"\t"', '"\\n"', '"\n"'],
    ),
    (
        guide("json_schema", '{"type":"string"}'),
        ['"a\\n\\"b"', '"\U0001f600"'],
        ['"\\u0041"', '"\\ud800"', '"\t"', '"\n"'],
    ),
    (guide("json_schema", '{"type":"number"}'), ["-0.5e-10", "1", "12.25"], ["1e100", "01", ".5", "NaN"]),
    (guide("json_schema", '{"type":"integer"}'), ["-7", "0", "123456789012345678"], ["1.0", "1234567890123456789"]),
    (guide("json_schema", '{"type":"integer","minimum":7}'), ["7", str(2**63 - 1)], ["6", str(2**63)]),
    (
        guide("json_schema", '{"oneOf":[{"type":"object"},{"type":"array"},{"type":"null"}]}'),
        ["{}", "[]", "null"],
        ["1"],
    ),
    (
        guide("json_schema", '{"enum":[1, "a\\"b", {"k": [true]}, 0.1]}'),
        ["1", '"a\\"b"', '{"k":[true]}', "0.1"],
        ['{"k": [true]}', "2"],
    ),
    (guide("regex", "[ab]+c?"), ["a", "abc"], ["c", "abcc"]),
    (guide("regex", "(a|b)*"), ["", "ab"], ["abc"]),
    (guide("regex", "^é{2}$"), ["éé"], ["é", "ééé"]),
    (guide("regex", "(?i)ab"), ["ab", "AB"], ["ac"]),
    (guide("ebnf_grammar", 'root ::= "(" root? ")"'), ["()", "((()))"], ["(()", "a"]),
    (guide("ebnf_grammar", 'root ::= root "a" | "b"  # left recursion\n'), ["b", "baaa"], ["ab"]),
    (guide("choice", "", "yes", "no"), ["yes", "no"], ["y", "maybe", "yesno"]),
    (guide("choice", "", "a", "ab"), ["a", "ab"], ["b", "aba"]),
    (
        tag({"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "x+"}, "end": "</a>"}),
        ["<a>xx</a>"],
        ["<a></a>"],
    ),
    (
        tag({"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": PAIR}, "end": ""}),
        ['<f>{"a": 2}'],
        ['<f>{"a": "2"}'],
    ),
    (
        tag(
            {
                "type": "triggered_tags",
                "triggers": ["<f"],
                "tags": [
                    {
                        "type": "tag",
                        "begin": "<f>",
                        "content": {"type": "json_schema", "json_schema": True},
                        "end": ";",
                    },
                ],
            }
        ),
        ["no call", "a call: <f>[1]; and <f>2;."],
        ["<f>x;"],
    ),
]


@pytest.mark.parametrize(
    ("asked", "whole", "wrong"), ALLOWED, ids=lambda value: str(getattr(value, "text", ""))[:40] or None
)
async def test_a_guide_allows_what_it_says(
    compiler: GrammarCompiler, asked: Guide, whole: list[str], wrong: list[str]
) -> None:
    grammar = await compiler.compile(asked)
    assert [text for text in whole if spell(grammar, text) != "whole"] == []
    assert [text for text in wrong if spell(grammar, text) == "whole"] == []


async def test_choices_are_no_syntax(compiler: GrammarCompiler) -> None:
    choices = [
        '"',
        "\\",
        '" | "x',
        "a\nb",
        "\0",
        "[a-z]",
        "root ::= ",
        "#",
        "é\u2028\U0001f600",
        "(",
        "\\x41",
        "'",
        "{2}",
        " ",
    ]
    grammar = await compiler.compile(guide("choice", "", *choices))
    assert [text for text in choices if spell(grammar, text) != "whole"] == []
    assert {answer(grammar, seed).data.decode() for seed in range(100)} <= set(choices)
    assert spell(grammar, "x") == "no"


async def test_after_the_whole_answer_only_the_ends_are_allowed(compiler: GrammarCompiler) -> None:
    matcher = (await compiler.compile(guide("choice", "", "a"))).matcher()
    matcher.accept(TOKENS.vocabulary.index(b"a"))
    assert set(matcher.allowed().nonzero()[0]) == TOKENS.ends
    matcher.accept(min(TOKENS.ends))
    assert set(matcher.allowed().nonzero()[0]) == TOKENS.ends


async def test_an_answer_is_utf8_whatever_the_grammar_says(compiler: GrammarCompiler) -> None:
    # the library's classes let surrogates and overlong spellings through
    grammar = await compiler.compile(guide("regex", "[^a-zA-Z0-9 ]{40}"))
    for seed in range(20):
        assert len(answer(grammar, seed).data.decode()) == 40
    assert spell(grammar, b"\xed\xa0\x80") == "no"


async def test_matchers_of_one_grammar_do_not_know_each_other(compiler: GrammarCompiler) -> None:
    grammar = await compiler.compile(guide("regex", "(ab)*"))
    one, other = grammar.matcher(), grammar.matcher()
    a, b = TOKENS.vocabulary.index(b"a"), TOKENS.vocabulary.index(b"b")
    one.accept(a)
    assert one.allowed()[b]
    assert other.allowed()[a]
    other.accept(a)
    one.accept(b)
    assert one.allowed()[a]
    assert not other.allowed()[a]


async def test_no_text_can_be_followed_that_the_tokens_cannot_spell(compiler: GrammarCompiler) -> None:
    letters = [bytes([byte]) if byte in b"ab" else b"" for byte in range(256)] + [b""]
    few = type(compiler)(letters, frozenset({256}))
    try:
        with pytest.raises(InvalidRequest, match="nothing matches it"):
            await few.compile(guide("choice", "", "c"))
        matcher = (await few.compile(guide("choice", "", "ac"))).matcher()
        matcher.accept(ord("a"))
        with pytest.raises(InvalidRequest, match=r"guided\.choice: the answer came to where .* no token"):
            matcher.allowed()
    finally:
        await few.close()


REFUSED: list[tuple[Guide, str]] = [
    (guide("json_schema", "{"), "it is not JSON: Expecting property name"),
    (guide("json_schema", "[]"), "# must be an object or a boolean"),
    (guide("json_schema", '{"const": NaN}'), "NaN is not JSON"),
    (guide("json_schema", '{"const": 1e999}'), "the number 1e999 is out of range"),
    (guide("json_schema", '{"enum": ["\\ud800"]}'), "half a surrogate pair"),
    (guide("json_schema", "false"), "cannot accept any value"),
    (guide("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}'), "minimum greater than maximum"),
    (guide("json_schema", '{"type": "array", "items": {"not": {}}}'), "#/items: 'not' cannot be enforced"),
    (guide("json_schema", '{"$ref": "#"}'), "Circular"),
    (guide("json_schema", '{"allOf": [{"$ref": "#"}]}'), "nothing matches it"),
    (guide("json_schema", '{"type": "string", "pattern": "(a"}'), "parenthesis is not closed"),
    (guide("json_schema", '{"type": "string", "pattern": "(?=a)b"}'), "would be ignored: Lookahead"),
    (guide("regex", "(a"), "parenthesis is not closed"),
    (guide("regex", "a^b"), "would be ignored: Anchor"),
    (guide("regex", r"(a)\1"), "Backreference"),
    (guide("regex", r"\bfoo"), "Word boundary"),
    (guide("regex", "a{1000000000}"), "repetition count"),
    (guide("regex", "[]"), "Empty character class"),
    (guide("regex", "a\ud800"), "is not Unicode"),
    (guide("ebnf_grammar", 'start ::= "a"'), 'root rule with name "root" is not found'),
    (guide("ebnf_grammar", "root ::= foo"), 'Rule "foo" is not defined'),
    (guide("ebnf_grammar", 'root ::= "a'), "line 1, column 12"),
    (guide("ebnf_grammar", "root ::= root"), "nothing matches it"),
    (guide("ebnf_grammar", "root ::= é"), "for a reason that it cannot spell"),
    (guide("choice", "", "a", "\udfff"), "is not Unicode"),
    (guide("structural_tag", "x"), "it is not JSON"),
    (guide("structural_tag", '{"type": "structural_tag"}'), '"format": ...} and nothing else'),
    (tag({"type": "nope"}), "format must be an object whose type is one of any_text,"),
    (tag({"type": "const_string", "value": "x", "foo": 1}), "const_string has no field 'foo'"),
    (tag({"type": "const_string"}), "must have a value field"),
    (tag({"type": "sequence", "elements": [{"type": "regex", "pattern": "(a"}]}), "parenthesis is not closed"),
    (tag({"type": "token", "token": 99_999_999}), "out of the vocabulary range"),
    (tag({"type": "json_schema", "json_schema": {"not": {}}}), "#: 'not' cannot be enforced"),
]


@pytest.mark.parametrize(
    ("asked", "reason"), REFUSED, ids=lambda value: None if isinstance(value, str) else value.kind.value
)
async def test_a_refusal_says_why_on_one_line(compiler: GrammarCompiler, asked: Guide, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as refusal:
        await compiler.compile(asked)
    message = str(refusal.value)
    assert message.startswith(f"guided.{asked.kind.value}")
    assert "\n" not in message
    assert "/cpp/" not in message
    assert len(message) < 400
    with pytest.raises(InvalidRequest):
        await compiler.compile(asked)  # a failure is not kept: it fails again
    assert compiler.statistics()["failed"] == 2
    assert compiler.statistics()["starts"] <= 1  # the process survives them all
