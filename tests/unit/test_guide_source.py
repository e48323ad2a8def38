"""What the compiler is given: its own rules put right, texts that are no syntax, tags without unknown fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triptych.core.guide import GuideKind
from triptych.engine.guide_error import GuideError
from triptych.engine.guide_source import MAX_WHITE_SPACE, literal, write

LOOSE = r"""basic_escape ::= (([\"\\/bfnrt]) | ("u" [A-Fa-f0-9]))
basic_integer ::= (("0") | (basic_integer_1 [1-9] [0-9]*))
root ::= (("\"" root_characters{2, 5} "\"") | ("gr\xf6\xdfe\u2028") | ("\\xdf"))
root_characters ::= (([^\"\\\r\n]))
keys ::= Regex("[^\"\\\r\n]", json_string=true)
"""


def convert(schema: str, white_space: int) -> str:
    """Stands for the library: repeats the schema as a remark."""
    assert white_space == MAX_WHITE_SPACE
    return f"{LOOSE}# {schema}"


def written(kind: GuideKind, text: str = "", *choices: str) -> str:
    source = write(kind, text, choices, convert)
    assert source.is_tag == (kind is GuideKind.STRUCTURAL_TAG)
    return source.text


def test_the_rules_of_json_are_put_right() -> None:
    lines = written(GuideKind.JSON_SCHEMA, "{}").splitlines()
    assert lines[0] == r"basic_escape ::= [\"\\bfnrt]"
    assert lines[1] == 'basic_integer ::= "-"? ("0" | [1-9] [0-9]{0,17})'
    assert lines[2] == (
        r'root ::= (("\"" root_characters{2, 5} "\"") | ("gr\U000000f6\U000000dfe\U00002028") | ("\\xdf"))'
    )
    assert lines[3] == r"root_characters ::= (([^\0-\x1f\"\\]))"
    assert lines[4] == r'keys ::= Regex("[^\"\\\r\n]", json_string=true)'


def test_an_object_of_json_is_the_schema_of_one() -> None:
    assert written(GuideKind.JSON_OBJECT).splitlines()[-1] == '# {"type": "object"}'


def test_a_pattern_comes_back_as_a_rule() -> None:
    def with_names(schema: str, white_space: int) -> str:
        name = json.loads(schema)["const"]
        return rf'root ::= (("\"{name}\""))'

    text = write(GuideKind.JSON_SCHEMA, '{"type": "string", "pattern": "a\\"b"}', (), with_names).text
    assert text == (
        "root ::= ((pattern_0))\n"
        r'pattern_0 ::= "\"" pattern_0_inside "\""' + "\n"
        r'pattern_0_inside ::= Regex("a\U00000022b", json_string=true)' + "\n"
    )


def test_names_of_patterns_cannot_be_known() -> None:
    names: list[str] = []

    def note(schema: str, white_space: int) -> str:
        names.append(json.loads(schema)["const"])
        return ""

    for _ in range(2):
        write(GuideKind.JSON_SCHEMA, '{"type": "string", "pattern": "a"}', (), note)
    assert names[0] != names[1]
    assert min(map(len, names)) > 32


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("abc d", '"abc d"'),
        ('"', r'"\U00000022"'),
        ("\\n", r'"\U0000005cn"'),
        ("\n\0", r'"\U0000000a\U00000000"'),
        ("é\U0001f600", r'"\U000000e9\U0001f600"'),
    ],
)
def test_a_literal_is_no_syntax(text: str, spelled: str) -> None:
    assert literal(text) == spelled


def test_grammars_and_patterns_and_choices() -> None:
    assert written(GuideKind.EBNF_GRAMMAR, "root ::= x") == "root ::= x"
    assert written(GuideKind.REGEX, "a|b") == 'root ::= Regex("a|b")\n'
    assert written(GuideKind.CHOICE, "", "a", '"') == r'root ::= "a" | "\U00000022"' + "\n"


def tag(format: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": format})


def test_schemas_and_patterns_in_a_tag_become_grammars() -> None:
    inner = {
        "type": "sequence",
        "elements": [{"type": "regex", "pattern": "a"}, {"type": "json_schema", "json_schema": {}}],
    }
    rules = {"type": "dispatch", "rules": [["<", {"type": "star", "content": inner}]], "loop": False}
    out = json.loads(
        written(GuideKind.STRUCTURAL_TAG, tag({"type": "tag", "begin": "x", "content": rules, "end": "y"}))
    )
    (pattern, star), *_ = out["format"]["content"]["rules"]
    first, second = star["content"]["elements"]
    assert pattern == "<"
    assert first == {"type": "grammar", "grammar": 'root ::= Regex("a")\n'}
    assert second["type"] == "grammar"
    assert second["grammar"].endswith("# {}\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "nothing else"),
        ('{"type": "structural_tag", "format": {}, "triggers": []}', "nothing else"),
        (tag([]), "format must be an object whose type is one of"),
        (tag({"value": "x"}), "format must be an object whose type is one of"),
        (tag({"type": ["or"]}), "format must be an object whose type is one of"),
        (tag({"type": "regex", "pattern": 1}), "format: 'pattern' must be a string"),
        (tag({"type": "any_text", "max": 1}), "format: any_text has no field 'max' here"),
        (tag({"type": "json_schema", "json_schema": {}, "any_order": True}), "json_schema has no field 'any_order'"),
        (tag({"type": "json_schema", "json_schema": {"not": {}}, "style": "glm_xml"}), "'not' cannot be enforced"),
        (tag({"type": "or", "elements": [{"type": "x"}]}), "format.elements must be an object"),
        (tag({"type": "dispatch", "rules": ["<"]}), "format.rules must be pairs"),
        (tag({"type": "tag", "begin": {"type": "tokens"}}), "format.begin must be an object"),
    ],
    ids=lambda value: value[:60],
)
def test_what_a_tag_would_lose_is_refused(text: str, reason: str) -> None:
    with pytest.raises(GuideError, match=reason):
        written(GuideKind.STRUCTURAL_TAG, text)
