"""Random JSON schemas whose every value is short: what a guide may hold, all of it together."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "bb", "name", "größe", 'with "quotes"', "x/y", "tab\t", "", "$ref", "\U0001f600")
PATTERNS = ("^[a-z]{1,3}$", "[^x]{0,2}", "^(yes|no)$", ".{2}", r"^\d{4}-\d{2}$", r"\w{1,3}-\w{1,2}|q?", "é?[ü-ÿ]")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**6),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def strings(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["bounds", "pattern", "format"]))
    if kind == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from(PATTERNS))}
    if kind == "format":
        return {"type": "string", "format": draw(st.sampled_from(FORMATS))}
    most = draw(st.integers(0, 8))
    return {"type": "string", "maxLength": most} | draw(
        st.fixed_dictionaries({}, optional={"minLength": st.integers(0, most)})
    )


@st.composite
def numbers(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["integer", "number"]))
    if kind == "integer":
        low, high = sorted(draw(st.tuples(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))))
        high += 2
        bounds = [{}, {"multipleOf": draw(st.integers(2, 9))}]
    else:
        hundredths = st.integers(-(10**5), 10**5)
        low, high = (each / 100 for each in sorted(draw(st.tuples(hundredths, hundredths))))
        high += 0.01
        bounds = [{}]
    bounds += [
        {"minimum": low},
        {"exclusiveMaximum": high},
        {"minimum": low, "maximum": high},
        {"exclusiveMinimum": low, "exclusiveMaximum": high},
        {"minimum": low, "exclusiveMinimum": low, "maximum": high},
    ]
    return {"type": kind} | draw(st.sampled_from(bounds))


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=4))
    out: dict[str, Any] = {"type": "object", "properties": properties}
    names = st.sampled_from(sorted(properties))
    out["required"] = draw(st.just(sorted(properties)) | st.lists(names, unique=True))
    if draw(st.booleans()):
        out["additionalProperties"] = False
    if draw(st.booleans()):
        out["minProperties"] = draw(st.integers(0, len(properties)))
        out["maxProperties"] = draw(st.integers(max(out["minProperties"], len(out["required"]), 1), 5))
    return out


@st.composite
def dictionaries(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    most = {"type": "object", "maxProperties": draw(st.integers(1, 3))}
    keys = draw(
        st.sampled_from(
            [
                {"propertyNames": {"pattern": "^[a-z]{1,2}$"}, "additionalProperties": draw(inner)},
                {"propertyNames": {"maxLength": 3}, "additionalProperties": draw(inner)},
                {"propertyNames": {"enum": ["one", "two"]}, "additionalProperties": draw(inner)},
                {"patternProperties": {"^k[0-9]$": draw(inner)}},
            ]
        )
    )
    return most | keys


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"type": "array", "items": draw(inner), "maxItems": draw(st.integers(0, 4))}
    if draw(st.booleans()):
        out["minItems"] = draw(st.integers(0, out["maxItems"]))
    if out["maxItems"] and draw(st.booleans()):
        out["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=min(2, out["maxItems"])))
    return out


def _unions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    apart = st.sampled_from(
        [
            [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "array", "maxItems": 0}],
            [
                {"type": "object", "properties": {"k": {"const": word}, "v": {"type": kind}}, "required": ["k"]}
                for word, kind in (("x", "boolean"), ("y", "null"))
            ],
            [{"enum": [1, "1"]}, {"const": True}, {"enum": [1.5, None]}],
        ]
    )
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
        LEAVES.map(lambda branch: {"allOf": [branch]}),
        apart.map(lambda branches: {"oneOf": branches}),
    )


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"type": [schema["type"], "null"]} if isinstance(schema.get("type"), str) else schema


LEAVES = st.one_of(
    strings(),
    numbers(),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values, "title": "one of them"}),
    VALUES.map(lambda value: {"const": value}),
    st.sampled_from([{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/tree"}]),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(objects(inner), dictionaries(inner), arrays(inner), _unions(inner)).map(_nullable),
    max_leaves=8,
)
DEFINITIONS = {
    "leaf": {"type": ["string", "null"], "pattern": "^[pq]{2}$"},
    "tree": {
        "type": "object",
        "properties": {"leaf": {"$ref": "#/$defs/leaf"}, "tree": {"$ref": "#/$defs/tree"}},
        "required": ["leaf"],
    },
}
SCHEMAS = st.one_of(objects(TREES), objects(LEAVES), arrays(TREES), TREES).map(
    lambda schema: schema | {"$defs": DEFINITIONS, "description": "what a client would send"}
)
