"""What of a JSON schema is refused, and how the rest is narrowed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from triptych.engine.guide_error import GuideError
from triptych.engine.json_schema import LARGEST_INTEGER, LARGEST_NUMBER, MAX_DEPTH, parse, prepare


def prepared(schema: Any) -> Any:
    return prepare(schema, prefix="p").schema


TEXT = {"type": "string"}
OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": TEXT}}

REFUSED: list[tuple[Any, str]] = [
    (1, "# must be an object or a boolean"),
    ({"items": 3}, "#/items must be an object or a boolean"),
    ({"properties": []}, "#: 'properties' must be an object"),
    ({"type": "frob"}, "#: 'frob' is not a type"),
    ({"type": []}, "#: 'type' must be a string or a list"),
    ({"type": 5}, "#: 'type' must be a string or a list"),
    ({"type": [["string"]]}, "#: ['string'] is not a type"),
    *(
        ({word: value}, f"#: {word!r} cannot be enforced")
        for word, value in {
            "not": {},
            "if": {},
            "then": {},
            "else": {},
            "dependentRequired": {},
            "dependentSchemas": {},
            "dependencies": {},
            "unevaluatedProperties": False,
            "unevaluatedItems": False,
            "uniqueItems": True,
            "contains": {},
            "minContains": 1,
            "maxContains": 1,
            "additionalItems": False,
            "contentEncoding": "base64",
            "nullable": True,
            "$anchor": "x",
            "$dynamicRef": "#x",
            "maxlength": 3,
        }.items()
    ),
    ({"properties": {"a": {"$id": "http://x/"}}}, "#/properties/a: '$id' cannot be enforced"),
    ({"type": "integer", "anyOf": [TEXT]}, "#: 'type' beside 'anyOf' cannot be enforced"),
    ({"allOf": [TEXT], "maxLength": 3}, "#: 'maxLength' beside 'allOf' cannot be enforced"),
    ({"$ref": "#", "minimum": 1}, "#: 'minimum' beside '$ref' cannot be enforced"),
    ({"enum": [1], "minimum": 1}, "#: 'minimum' beside 'enum' cannot be enforced"),
    ({"anyOf": [TEXT], "oneOf": [TEXT]}, "#: 'oneOf' beside 'anyOf' cannot be enforced"),
    ({"allOf": [TEXT, TEXT]}, "#: 'allOf' of more than one schema"),
    ({"anyOf": []}, "#: 'anyOf' must be a list that is not empty"),
    ({"anyOf": {}}, "#: 'anyOf' must be a list that is not empty"),
    ({"prefixItems": [], "type": "array"}, "#: 'prefixItems' must be a list that is not empty"),
    ({"items": [TEXT]}, "#/items must be an object or a boolean"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#: the branches of 'oneOf' do not plainly exclude"),
    ({"enum": []}, "#: 'enum' must be a list that is not empty"),
    ({"enum": ["a", 1], "type": "string"}, "#: 1 is not of the type that stands beside it"),
    ({"const": 1.5, "type": "integer"}, "#: 1.5 is not of the type"),
    ({"$ref": 1}, "#: '$ref' must be a string"),
    ({"$ref": "#/$defs/x"}, "#: $ref '#/$defs/x' is not the place of a schema"),
    ({"$ref": "#/const", "$defs": {}}, "is not the place of a schema"),
    ({"$ref": "other.json"}, "is not the place of a schema"),
    ({"type": "string", "minLength": -1}, "#: 'minLength' must be an integer of at least 0"),
    ({"type": "string", "maxLength": 2.5}, "#: 'maxLength' must be an integer of at least 0"),
    ({"type": "array", "minItems": True}, "#: 'minItems' must be an integer of at least 0"),
    ({"type": "string", "pattern": 1}, "#: 'pattern' must be a string"),
    ({"type": "string", "pattern": "a", "maxLength": 1}, "#: 'maxLength' beside 'pattern' cannot be enforced"),
    ({"type": "string", "format": "date", "maxLength": 1}, "#: 'maxLength' beside 'format' cannot be enforced"),
    ({"type": "string", "format": "frob"}, "#: the format 'frob' is not one of date, date-time,"),
    ({"type": "number", "multipleOf": 0.5}, "#: 'multipleOf' can be enforced for integers without bounds only"),
    ({"type": "integer", "multipleOf": 2, "minimum": 0}, "#: 'multipleOf' can be enforced"),
    ({"type": "number", "minimum": "1"}, "#: 'minimum' must be a number"),
    ({"type": "number", "minimum": 1e-7, "maximum": 2e-7}, "#: no number of 6 decimals lies between its bounds"),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, "#: no number of 6 decimals"),
    ({"type": "object", "required": ["a"]}, "#: 'required' names 'a', which is not among the properties"),
    (OBJECT | {"required": ["b"]}, "#: 'required' names 'b'"),
    (OBJECT | {"required": "a"}, "#: 'required' must be a list of strings"),
    (OBJECT | {"required": [1]}, "#: 'required' must be a list of strings"),
    ({"type": "object", "minProperties": 2}, "#: 'minProperties' above 1 needs \"additionalProperties\": false"),
    ({"properties": {"é": TEXT}, "additionalProperties": True}, "#: the property 'é' needs"),
    ({"properties": {'"': TEXT}, "additionalProperties": TEXT}, 'needs "additionalProperties": false'),
    (OBJECT | {"patternProperties": {"^x": TEXT}}, "#: only one of properties, patternProperties and propertyNames"),
    ({"patternProperties": {"x": TEXT}, "propertyNames": TEXT}, "#: only one of properties"),
    ({"patternProperties": {"x": TEXT, "y": TEXT}}, "#: 'patternProperties' needs one pattern"),
    ({"patternProperties": {"x": TEXT}, "additionalProperties": True}, "#: 'patternProperties' needs one pattern"),
    ({"properties": {"a/b~c": {"not": {}}}}, "#/properties/a~1b~0c: 'not' cannot be enforced"),
    ({"$defs": {"x": {"not": {}}}}, "#/$defs/x: 'not' cannot be enforced"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_would_not_hold_is_refused_by_name(schema: Any, reason: str) -> None:
    with pytest.raises(GuideError, match=re.escape(reason)):
        prepared(schema)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_depth_is_bounded() -> None:
    prepared(nested(MAX_DEPTH))
    with pytest.raises(GuideError, match="nested more than"):
        prepared(nested(MAX_DEPTH + 1))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "it is not JSON: Expecting"),
        ("", "it is not JSON"),
        ("[" * 100_000, "nested too deep"),
        ("NaN", "NaN is not JSON"),
        ("-Infinity", "-Infinity is not JSON"),
        ("1e999", "the number 1e999 is out of range"),
        (str(2**63), "is out of range"),
        ("9" * 10_000, "is out of range"),
    ],
    ids=lambda value: value[:20],
)
def test_what_cannot_be_written_again_is_not_read(text: str, reason: str) -> None:
    with pytest.raises(GuideError, match=reason) as refusal:
        parse(text)
    assert len(str(refusal.value)) < 200


def test_the_largest_numbers_are_read() -> None:
    assert parse(f"[{LARGEST_INTEGER}, {-LARGEST_INTEGER}, 1e308]") == [LARGEST_INTEGER, -LARGEST_INTEGER, 1e308]


@pytest.mark.parametrize(
    ("schema", "out"),
    [
        ({}, {}),
        (True, True),
        ({"title": "t", "default": 1, "x-order": 3, "$schema": "s", "$id": "http://x/", "examples": [1]}, {}),
        ({"minimum": 1, "maximum": 2}, {"type": "number", "minimum": 1, "maximum": 2}),
        (
            {"maxLength": 1, "maxItems": 2},
            {"type": ["array", "string"], "maxLength": 1, "maxItems": 2},
        ),
        ({"type": "string", "minimum": 3}, {"type": "string"}),
        ({"type": "integer", "minimum": 3}, {"type": "integer", "minimum": 3, "maximum": LARGEST_INTEGER}),
        ({"type": "integer", "maximum": 3}, {"type": "integer", "maximum": 3, "minimum": -LARGEST_INTEGER}),
        (
            {"type": "number", "exclusiveMinimum": 3},
            {"type": "number", "exclusiveMinimum": 3, "maximum": LARGEST_NUMBER},
        ),
        ({"type": "number", "minimum": 1e30}, {"type": "number", "minimum": 1e30}),
        ({"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 3}),
        (OBJECT, OBJECT | {"required": [], "additionalProperties": False}),
        (OBJECT | {"additionalProperties": True}, OBJECT | {"required": [], "additionalProperties": True}),
        ({"type": "object"}, {"type": "object"}),
        ({"type": "object", "minProperties": 1}, {"type": "object", "minProperties": 1}),
        (
            {"type": "object", "patternProperties": {"x": TEXT}},
            {"type": "object", "patternProperties": {"x": TEXT}, "additionalProperties": False},
        ),
        ({"oneOf": [TEXT, {"type": "null"}]}, {"anyOf": [TEXT, {"type": "null"}]}),
        ({"enum": [1, 2.0], "type": "integer"}, {"enum": [1, 2.0]}),
        ({"$ref": "#/$defs/x", "$defs": {"x": TEXT}}, {"$ref": "#/$defs/x", "$defs": {"x": TEXT}}),
        ({"$ref": "#/definitions/a~1b", "definitions": {"a/b": TEXT}},) * 2,
        ({"type": "string", "pattern": "x"}, {"const": "p-0"}),
        (
            {"type": ["string", "null", "integer"], "pattern": "x", "maximum": 1, "minimum": 0},
            {"anyOf": [{"const": "p-0"}, {"type": ["null", "integer"], "maximum": 1, "minimum": 0}]},
        ),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_the_rest_is_narrowed_and_stripped(schema: Any, out: Any) -> None:
    assert prepared(schema) == out


def test_patterns_are_taken_out() -> None:
    schema = {
        "properties": {"a": {"pattern": "x"}, "b": {"type": "array", "items": {"type": "string", "pattern": "y"}}}
    }
    found = prepare(schema, prefix="p")
    assert found.patterns == {"p-0": "x", "p-1": "y"}
    assert isinstance(found.schema, dict)
    assert found.schema["properties"]["b"]["items"] == {"const": "p-1"}


def test_what_was_parsed_is_left_as_it_was() -> None:
    schema = {"properties": {"a": {"type": "number", "minimum": 1, "title": "t"}}}
    before = json.dumps(schema)
    prepared(schema)
    assert json.dumps(schema) == before
