"""A structural tag, the grammar library's own JSON, made ready for the compiler, which passes over unknown fields.

A JSON schema or a pattern inside a tag becomes a grammar, written as for a guide of its own, so that both mean the same
here and there. Tokens are named by id: the compiler knows the bytes of tokens and no names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triptych.engine import json_schema
from triptych.engine.guide_error import GuideError
from triptych.engine.json_schema import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Callable

_FIELDS: dict[str, frozenset[str]] = {
    "const_string": frozenset({"value"}),
    "json_schema": frozenset({"json_schema", "style"}),
    "any_text": frozenset({"excludes", "max_tokens", "max_chars"}),
    "token": frozenset({"token"}),
    "exclude_token": frozenset({"exclude_tokens"}),
    "any_tokens": frozenset({"exclude_tokens", "max_tokens"}),
    "grammar": frozenset({"grammar", "syntax"}),
    "regex": frozenset({"pattern"}),
    "sequence": frozenset({"elements"}),
    "or": frozenset({"elements"}),
    "tag": frozenset({"begin", "content", "end"}),
    "triggered_tags": frozenset({"triggers", "tags", "at_least_one", "stop_after_first", "excludes"}),
    "token_triggered_tags": frozenset({"trigger_tokens", "tags", "exclude_tokens", "at_least_one", "stop_after_first"}),
    "tags_with_separator": frozenset({"tags", "separator", "at_least_one", "stop_after_first"}),
    "optional": frozenset({"content"}),
    "plus": frozenset({"content"}),
    "star": frozenset({"content"}),
    "repeat": frozenset({"min", "max", "content"}),
    "dispatch": frozenset({"rules", "loop", "excludes"}),
    "token_dispatch": frozenset({"rules", "loop", "exclude_tokens"}),
}


def prepare(tag: object, write_schema: Callable[[object], str], write_pattern: Callable[[str], str]) -> dict[str, Any]:
    """Check a tag.

    Args:
        tag: as parsed.
        write_schema: a schema's grammar as EBNF.
        write_pattern: likewise of a regular expression.

    Raises:
        GuideError: names the format and the field.
    """
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or tag.keys() != {"type", "format"}:
        raise GuideError('it must be {"type": "structural_tag", "format": ...} and nothing else')
    return {**tag, "format": _Tag(write_schema, write_pattern).format(tag["format"], "format", 0)}


class _Tag:
    def __init__(self, write_schema: Callable[[object], str], write_pattern: Callable[[str], str]) -> None:
        self._write_schema = write_schema
        self._write_pattern = write_pattern

    def format(self, node: object, place: str, depth: int) -> dict[str, Any]:
        """``place`` is the way to ``node``, with dots."""
        if depth > MAX_DEPTH:
            raise GuideError(f"it is nested more than {MAX_DEPTH} deep")
        if not isinstance(node, dict) or not isinstance(node.get("type"), str) or node["type"] not in _FIELDS:
            raise GuideError(f"{place} must be an object whose type is one of {', '.join(sorted(_FIELDS))}")
        kind = node["type"]
        unknown = node.keys() - _FIELDS[kind] - {"type"}
        if unknown:
            raise GuideError(f"{place}: {kind} has no field {min(unknown)!r} here")
        if kind == "json_schema":
            if node.get("style", "json") == "json":
                return {"type": "grammar", "grammar": self._write_schema(node.get("json_schema"))}
            json_schema.prepare(node.get("json_schema"), prefix="")  # the compiler writes it, but drops as much
        if kind == "regex":
            if not isinstance(node.get("pattern"), str):
                raise GuideError(f"{place}: 'pattern' must be a string")
            return {"type": "grammar", "grammar": self._write_pattern(node["pattern"])}
        out = dict(node)
        for key in ("begin", "end", "content"):
            if isinstance(node.get(key), dict):
                out[key] = self.format(node[key], f"{place}.{key}", depth + 1)
        for key in ("elements", "tags"):
            if isinstance(node.get(key), list):
                out[key] = [self.format(each, f"{place}.{key}", depth + 1) for each in node[key]]
        if isinstance(node.get("rules"), list):
            out["rules"] = [self._rule(rule, f"{place}.rules", depth + 1) for rule in node["rules"]]
        return out

    def _rule(self, rule: object, place: str, depth: int) -> list[Any]:
        if not isinstance(rule, list) or len(rule) != 2:
            raise GuideError(f"{place} must be pairs of a pattern and a format")
        return [rule[0], self.format(rule[1], place, depth)]
