"""When branches plainly exclude each other: never where a value could be valid by two of them."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.engine.one_of import MAX_BRANCHES, disjoint

DEFINITIONS: dict[str, Any] = {
    "cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
    "dog": {"type": "object", "properties": {"kind": {"enum": ["dog", "hound"]}}, "required": ["kind"]},
    "word": {"type": "string"},
    "loop": {"$ref": "#/$defs/loop"},
    "a/b": {"type": "null"},
}
ROOT = {"$defs": DEFINITIONS}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def optional(kind: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": kind}}}


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "string"}],
        [{"type": "string"}, {"type": "null"}, {"type": ["object", "array"]}],
        [{"type": "integer"}, {"type": "string"}],
        [{"const": 1}, {"const": 2}, {"enum": ["1", True, None]}],
        [ref("cat"), ref("dog"), ref("word"), ref("a~1b")],
        [{"allOf": [ref("cat")]}, ref("dog")],
        [{"anyOf": [{"type": "null"}, ref("word")]}, {"type": "boolean"}],
        [{"enum": ["a"]}, {"type": "integer"}],
    ],
    ids=str,
)
def test_branches_that_exclude_each_other(branches: list[Any]) -> None:
    assert disjoint(branches, ROOT)


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{}, {"type": "null"}],
        [True, {"type": "null"}],
        [{"const": 1}, {"const": 1.0}],
        [{"const": [1, {"a": 2.0}]}, {"const": [1.0, {"a": 2}]}],
        [ref("cat"), ref("cat")],
        [optional("a"), optional("b")],  # both hold for {}
        [ref("loop"), {"type": "null"}],
        [{"type": "string"}, {"type": "string", "maxLength": 1}],
        [{"type": ["null", "string"]}, {"type": ["string", "boolean"]}],
        [{"const": index} for index in range(MAX_BRANCHES + 1)],
    ],
    ids=lambda value: str(value)[:60],
)
def test_branches_that_may_not(branches: list[Any]) -> None:
    assert not disjoint(branches, ROOT)


VALUES: list[Any] = [None, True, False, 0, 1, 1.0, 1.5, "", "a", [], [1], {}, {"k": 1}, {"k": "a"}, {"k": None, "l": 1}]
BRANCHES = st.one_of(
    st.sampled_from(VALUES).map(lambda value: {"const": value}),
    st.lists(st.sampled_from(VALUES), min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"]).map(lambda t: {"type": t}),
    st.tuples(st.sampled_from(VALUES), st.lists(st.sampled_from(["k", "l"]), unique=True)).map(
        lambda drawn: {
            "type": "object",
            "properties": {name: {"const": drawn[0]} for name in ("k", "l")},
            "required": drawn[1],
        }
    ),
    st.just({}),
)
SHALLOW = st.recursive(BRANCHES, lambda inner: st.lists(inner, min_size=1, max_size=2).map(lambda b: {"anyOf": b}))


@given(SHALLOW, SHALLOW)
def test_no_value_is_valid_by_two(one: Any, other: Any) -> None:
    if disjoint([one, other], {}):
        both = [jsonschema.Draft202012Validator(branch) for branch in (one, other)]
        assert [value for value in VALUES if all(each.is_valid(value) for each in both)] == []
