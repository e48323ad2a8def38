"""Whether the branches of a ``oneOf`` exclude each other, in which case a grammar may treat it as an ``anyOf``.

Two branches do if they have no type in common, if both list their values and none is in both lists, or if both are
objects that require the same property and its schemas exclude each other by their values: a discriminator.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

MAX_STEPS = 16
"""References followed one after the other."""
MAX_BRANCHES = 256
_EVERY = frozenset({"object", "array", "string", "number", "boolean", "null"})


def disjoint(branches: list[Any], root: Any) -> bool:
    """Whether no value can be valid by two of the branches; False also where that cannot be seen.

    Args:
        branches: checked schemas.
        root: the document that their references point into.
    """
    if len(branches) > MAX_BRANCHES:
        return False
    seen = [_resolve(branch, root) for branch in branches]
    return all(_apart(one, other, root) for one, other in itertools.combinations(seen, 2))


def _apart(one: Any, other: Any, root: Any) -> bool:
    if _kinds(one, root).isdisjoint(_kinds(other, root)) or _unequal(one, other):
        return True
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    shared = [name for name in one.get("required", ()) if name in other.get("required", ())]
    both_objects = _kinds(one, root) == _kinds(other, root) == {"object"}
    return both_objects and any(
        _unequal(_resolve(one["properties"][name], root), _resolve(other["properties"][name], root)) for name in shared
    )


def _resolve(node: Any, root: Any) -> Any:
    for _ in range(MAX_STEPS):
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            target = root
            for token in node["$ref"].split("/")[1:]:
                token = token.replace("~1", "/").replace("~0", "~")
                target = target[int(token)] if isinstance(target, list) else target[token]
            node = target
        elif "allOf" in node:
            node = node["allOf"][0]
        else:
            return node
    return True


def _kinds(node: Any, root: Any, steps: int = MAX_STEPS) -> frozenset[str]:
    """Types that a value of the schema can have, integers counted as numbers."""
    node = _resolve(node, root)
    if not isinstance(node, dict) or not steps:
        return _EVERY
    values = _values(node)
    if values is not None:
        return frozenset(_kind(value) for value in values)
    for key in ("anyOf", "oneOf"):
        if key in node:
            return frozenset().union(*(_kinds(branch, root, steps - 1) for branch in node[key]))
    types = node.get("type", ())
    kinds = {"number" if each == "integer" else each for each in ([types] if isinstance(types, str) else types)}
    return frozenset(kinds) or _EVERY


def _unequal(one: Any, other: Any) -> bool:
    left, right = _values(one), _values(other)
    if left is None or right is None:
        return False
    return {_canonical(value) for value in left}.isdisjoint(_canonical(value) for value in right)


def _values(node: Any) -> list[Any] | None:
    if not isinstance(node, dict):
        return None
    if "const" in node:
        return [node["const"]]
    return node.get("enum")


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _canonical(value: Any) -> str:
    """Equal for equal JSON values, 1 and 1.0 among them."""
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(key)}:{_canonical(value[key])}' for key in sorted(value))}}}"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)
