"""A JSON schema made ready for the grammar compiler, so that every answer it allows is valid by the schema.

The compiler drops what it cannot express, mostly in silence. Here a keyword that would not hold is refused by name, and
where the schema leaves something open that an answer could lose itself in, it is closed:

- an object that lists its properties has no others unless ``additionalProperties`` says so; they come in their order
- an integer has at most 19 digits, a number with one bound stays below 10^18
- without a ``type`` the values are of the types that the keywords speak of

A pattern means the whole string. It is taken out here and comes back under its name when the grammar is written: the
compiler's own way would let a quotation mark through.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn

from triptych.engine.guide_error import GuideError
from triptych.engine.one_of import disjoint

MAX_DEPTH = 64
"""Schemas inside each other."""
LARGEST_INTEGER = 2**63 - 1
LARGEST_NUMBER = 10**18
DECIMALS = 6
"""Digits after the point that a number with bounds can have."""
FORMATS = frozenset(
    {
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    }
)

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_FAMILIES = {
    "object": frozenset(
        {
            *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
            *("minProperties", "maxProperties"),
        }
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
_ALONE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""Beside one of these nothing else would be enforced."""
_DEFINITIONS = ("$defs", "definitions")
_REMARKS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "discriminator"),
    }
)
_KNOWN = frozenset({"type", *_ALONE, *_DEFINITIONS, *_REMARKS}.union(*_FAMILIES.values()))

Schema = dict[str, Any] | bool


class Prepared(NamedTuple):
    """What the compiler is given."""

    schema: Schema
    patterns: dict[str, str]
    """Patterns of strings; in the schema stands ``{"const": NAME}`` instead."""


def parse(text: str) -> Any:
    """JSON of which every number can be written down again.

    Raises:
        GuideError: it is not JSON, too deep, or has a number out of range.
    """
    try:
        return json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=_no_number)
    except RecursionError:
        raise GuideError("it is nested too deep") from None
    except json.JSONDecodeError as error:
        raise GuideError(f"it is not JSON: {error}") from None


def prepare(schema: object, prefix: str) -> Prepared:
    """Check a schema and narrow it.

    Args:
        schema: as parsed.
        prefix: begins the names of patterns; a text that no client can know.

    Raises:
        GuideError: names the place and the keyword.
    """
    walk = _Walk(prefix)
    prepared = walk.schema(schema, "#", 0)
    for place, target in walk.references:
        if target not in walk.places:
            raise GuideError(f"{place}: $ref {target!r} is not the place of a schema in this document")
    for place, branches in walk.one_ofs:
        if not disjoint(branches, schema):
            raise GuideError(f"{place}: the branches of 'oneOf' do not plainly exclude each other; use 'anyOf'")
    return Prepared(prepared, walk.patterns)


class _Walk:
    """One pass over a schema, which collects what can only be checked once all of it was seen."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.patterns: dict[str, str] = {}
        self.places: set[str] = set()
        self.references: list[tuple[str, str]] = []
        self.one_ofs: list[tuple[str, list[Any]]] = []

    def schema(self, node: object, place: str, depth: int) -> Schema:
        """``place`` is the JSON pointer of ``node``."""
        if depth > MAX_DEPTH:
            raise GuideError(f"it is nested more than {MAX_DEPTH} deep")
        if not isinstance(node, dict | bool):
            raise GuideError(f"{place} must be an object or a boolean")
        self.places.add(place)
        if isinstance(node, bool):
            return node
        for key in node:
            if (key not in _KNOWN and not key.startswith("x-")) or (key == "$id" and depth):
                raise GuideError(f"{place}: {key!r} cannot be enforced")
        out: dict[str, Any] = {}
        for key in _DEFINITIONS:
            if key in node:
                out[key] = self._named(node, key, place, depth)
        alone = next((key for key in _ALONE if key in node), None)
        return out | (self._alone(node, alone, place, depth) if alone else self._typed(node, place, depth))

    def _named(self, node: dict[str, Any], key: str, place: str, depth: int) -> dict[str, Schema]:
        children = node[key]
        if not isinstance(children, dict):
            raise GuideError(f"{place}: {key!r} must be an object")
        return {
            name: self.schema(child, f"{place}/{key}/{_token(name)}", depth + 1) for name, child in children.items()
        }

    def _listed(self, node: dict[str, Any], key: str, place: str, depth: int) -> list[Schema]:
        children = node[key]
        if not isinstance(children, list) or not children:
            raise GuideError(f"{place}: {key!r} must be a list that is not empty")
        return [self.schema(child, f"{place}/{key}/{index}", depth + 1) for index, child in enumerate(children)]

    def _alone(self, node: dict[str, Any], key: str, place: str, depth: int) -> dict[str, Any]:
        beside = node.keys() - _REMARKS - {key, *_DEFINITIONS} - ({"type"} if key in ("enum", "const") else set())
        beside = {name for name in beside if not name.startswith("x-")}
        if beside:
            raise GuideError(f"{place}: {min(beside)!r} beside {key!r} cannot be enforced")
        value = node[key]
        if key == "$ref":
            if not isinstance(value, str):
                raise GuideError(f"{place}: '$ref' must be a string")
            self.references.append((place, value))
            return {key: value}
        if key in ("enum", "const"):
            _check_values(node, value if key == "enum" else [value], place)
            return {key: value}
        children = self._listed(node, key, place, depth)
        if key == "allOf" and len(children) > 1:
            raise GuideError(f"{place}: 'allOf' of more than one schema cannot be enforced")
        if key == "oneOf":
            self.one_ofs.append((place, value))
            return {"anyOf": children}
        return {key: children}

    def _typed(self, node: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        types = _types(node, place)
        if not types:
            return {}
        out: dict[str, Any] = {"type": types[0] if len(types) == 1 else types}
        if "object" in types:
            out |= self._object(node, place, depth)
        if "array" in types:
            out |= self._array(node, place, depth)
        if "number" in types or "integer" in types:
            out |= _number(node, types, place)
        if "string" in types:
            if "pattern" in node:
                return self._with_pattern(out, [each for each in types if each != "string"], node, place)
            out |= _string(node, place)
        return out

    def _with_pattern(self, out: dict[str, Any], others: list[str], node: dict[str, Any], place: str) -> dict[str, Any]:
        pattern = node["pattern"]
        if not isinstance(pattern, str):
            raise GuideError(f"{place}: 'pattern' must be a string")
        beside = node.keys() & {"minLength", "maxLength", "format"}
        if beside:
            raise GuideError(f"{place}: {min(beside)!r} beside 'pattern' cannot be enforced")
        name = f"{self._prefix}-{len(self.patterns)}"
        self.patterns[name] = pattern
        return {"anyOf": [{"const": name}, out | {"type": others}]} if others else {"const": name}

    def _object(self, node: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        out = _counts(node, ("minProperties", "maxProperties"), place)
        additional = node.get("additionalProperties")
        closed = additional is False or (additional is None and "properties" in node)
        if not closed and out.get("minProperties", 0) > 1:
            raise GuideError(f"{place}: 'minProperties' above 1 needs \"additionalProperties\": false")
        names = self._named(node, "properties", place, depth) if "properties" in node else {}
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise GuideError(f"{place}: 'required' must be a list of strings")
        for name in required:
            if name not in names:
                raise GuideError(f"{place}: 'required' names {name!r}, which is not among the properties")
        if "properties" in node:
            out |= {"properties": names, "required": required}
            for name in names:
                if not closed and not (name.isascii() and name.isprintable() and not set(name) & set('"\\')):
                    raise GuideError(f'{place}: the property {name!r} needs "additionalProperties": false')
        patterns, spelling = "patternProperties" in node, "propertyNames" in node
        if patterns + spelling + bool(names) > 1:
            raise GuideError(f"{place}: only one of properties, patternProperties and propertyNames can be enforced")
        if patterns:
            out["patternProperties"] = self._named(node, "patternProperties", place, depth)
            if len(out["patternProperties"]) != 1 or additional not in (None, False):
                raise GuideError(f"{place}: 'patternProperties' needs one pattern and no 'additionalProperties'")
        if spelling:
            out["propertyNames"] = self.schema(node["propertyNames"], f"{place}/propertyNames", depth + 1)
        if closed or patterns:
            out["additionalProperties"] = False
        elif additional is not None:
            out["additionalProperties"] = self.schema(additional, f"{place}/additionalProperties", depth + 1)
        return out

    def _array(self, node: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        out = _counts(node, ("minItems", "maxItems"), place)
        if "prefixItems" in node:
            out["prefixItems"] = self._listed(node, "prefixItems", place, depth)
        if "items" in node:
            out["items"] = self.schema(node["items"], f"{place}/items", depth + 1)
        return out


def _types(node: dict[str, Any], place: str) -> list[str]:
    """The types of a schema's values; empty for all."""
    types = node.get("type", [family for family, keys in _FAMILIES.items() if node.keys() & keys])
    if isinstance(types, str):
        types = [types]
    if not isinstance(types, list) or ("type" in node and not types):
        raise GuideError(f"{place}: 'type' must be a string or a list of strings")
    for each in types:
        if each not in _TYPES:
            raise GuideError(f"{place}: {each!r} is not a type")
    return types


def _counts(node: dict[str, Any], keys: tuple[str, ...], place: str) -> dict[str, Any]:
    found = {key: node[key] for key in keys if key in node}
    for key, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise GuideError(f"{place}: {key!r} must be an integer of at least 0")
    return found


def _string(node: dict[str, Any], place: str) -> dict[str, Any]:
    out = _counts(node, ("minLength", "maxLength"), place)
    if "format" in node:
        if node["format"] not in FORMATS:
            raise GuideError(f"{place}: the format {node['format']!r} is not one of {', '.join(sorted(FORMATS))}")
        if out:
            raise GuideError(f"{place}: {min(out)!r} beside 'format' cannot be enforced")
        out["format"] = node["format"]
    return out


def _number(node: dict[str, Any], types: list[str], place: str) -> dict[str, Any]:
    out = {key: node[key] for key in _FAMILIES["number"] if key in node}
    for key, value in out.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise GuideError(f"{place}: {key!r} must be a number")
    if "multipleOf" in out:
        if "number" in types or len(out) > 1:
            raise GuideError(f"{place}: 'multipleOf' can be enforced for integers without bounds only")
        return out
    largest = LARGEST_NUMBER if "number" in types else LARGEST_INTEGER
    low = max((out[key] for key in ("minimum", "exclusiveMinimum") if key in out), default=None)
    high = min((out[key] for key in ("maximum", "exclusiveMaximum") if key in out), default=None)
    if low is not None and high is None and low < largest:
        out["maximum"] = high = largest
    if high is not None and low is None and high > -largest:
        out["minimum"] = low = -largest
    if "number" in types and low is not None and high is not None and not _writable(out):
        raise GuideError(f"{place}: no number of {DECIMALS} decimals lies between its bounds")
    return out


def _writable(bounds: dict[str, Any]) -> bool:
    """Whether a number with few enough decimals is within the bounds: the compiler writes none if not."""
    scale = Decimal(10) ** DECIMALS
    low, high = -math.inf, math.inf
    for key, value in bounds.items():
        scaled = Decimal(repr(value)) * scale
        if "Minimum" in key or key == "minimum":
            low = max(low, math.floor(scaled) + 1 if key.startswith("exclusive") else math.ceil(scaled))
        else:
            high = min(high, math.ceil(scaled) - 1 if key.startswith("exclusive") else math.floor(scaled))
    return low <= high


def _check_values(node: dict[str, Any], values: object, place: str) -> None:
    if not isinstance(values, list) or not values:
        raise GuideError(f"{place}: 'enum' must be a list that is not empty")
    types = _types(node, place) if "type" in node else list(_TYPES)
    for value in values:
        if not set(types) & set(types_of(value)):
            raise GuideError(f"{place}: {json.dumps(value)[:100]} is not of the type that stands beside it")


def types_of(value: object) -> tuple[str, ...]:
    """The JSON schema types that a value has."""
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("integer", "number") if value.is_integer() else ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
        case _:
            return ("object",)


def _token(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= 20 else LARGEST_INTEGER + 1
    if abs(value) > LARGEST_INTEGER:
        raise GuideError(f"the number {digits[:40]} is out of range")
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise GuideError(f"the number {digits[:40]} is out of range")
    return value


def _no_number(word: str) -> NoReturn:
    raise GuideError(f"{word} is not JSON")
