"""What the compiler is given for a guide: EBNF for every kind but the structural tag, which stays JSON.

White space between the parts of JSON is free but bounded: a model that could write it forever would never end. Strings
are UTF-8 as it is, with no escapes but the short ones: four hex digits could spell half a character, or a property's
name so that the compiler takes it for another. A string with bounds of length has no escapes at all. Numbers have at
most 18 digits before the point, 17 after it and 2 of exponent.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.guide import GuideKind
from triptych.engine import json_schema, structural_tag
from triptych.engine.guide_error import GuideError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_WHITE_SPACE = 32
"""Characters in a row between the parts of JSON."""

_RULES = {
    "basic_escape": r"[\"\\bfnrt]",
    "basic_integer": '"-"? ("0" | [1-9] [0-9]{0,17})',
    "basic_number": r'"-"? ("0" | [1-9] [0-9]{0,17}) ("." [0-9]{1,17})? ([eE] [+\-]? [0-9]{1,2})?',
}
"""Rules of the compiler's JSON grammar that are replaced."""
_LOOSE_CHARACTER = r"[^\"\\\r\n]"
"""A character of a string with bounds as the compiler writes it: other control characters are let through."""
_CHARACTER = r"[^\0-\x1f\"\\]"
"""As it should be. No escapes: one class that repeats takes 0.1 ms for a mask, a choice that repeats a second."""
_REGEX_RULE = re.compile(r"\w+ ::= Regex\(")
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|.)")


class Source(NamedTuple):
    """Text for the compiler."""

    text: str
    is_tag: bool
    """A structural tag; EBNF otherwise."""


def write(kind: GuideKind, text: str, choices: Sequence[str], convert: Callable[[str, int], str]) -> Source:
    """The source of a guide.

    Args:
        kind: which language ``text`` is in.
        text: the guide's own.
        choices: for a choice.
        convert: writes a JSON schema's grammar as EBNF, with so many characters of white space.

    Raises:
        GuideError: why the guide cannot be used.
    """

    def write_schema(schema: object) -> str:
        return _schema(schema, convert)

    match kind:
        case GuideKind.JSON_SCHEMA:
            return Source(write_schema(json_schema.parse(text)), is_tag=False)
        case GuideKind.JSON_OBJECT:
            return Source(write_schema({"type": "object"}), is_tag=False)
        case GuideKind.REGEX:
            return Source(_pattern(text), is_tag=False)
        case GuideKind.EBNF_GRAMMAR:
            return Source(text, is_tag=False)
        case GuideKind.CHOICE:
            return Source(f"root ::= {' | '.join(map(literal, choices))}\n", is_tag=False)
        case GuideKind.STRUCTURAL_TAG:
            tag = structural_tag.prepare(json_schema.parse(text), write_schema, _pattern)
            return Source(json.dumps(tag), is_tag=True)


def literal(text: str) -> str:
    """A string of EBNF that stands for exactly this text."""
    plain = (
        character if " " <= character <= "~" and character not in '"\\' else f"\\U{ord(character):08x}"
        for character in text
    )
    return f'"{"".join(plain)}"'


def _pattern(pattern: str) -> str:
    return f"root ::= Regex({literal(pattern)})\n"


def _schema(schema: object, convert: Callable[[str, int], str]) -> str:
    prepared = json_schema.prepare(schema, prefix=f"pattern-{secrets.token_hex(16)}")
    try:
        text = json.dumps(prepared.schema, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise GuideError("a string in it has half a surrogate pair") from None
    lines = convert(text, MAX_WHITE_SPACE).splitlines()
    ebnf = "\n".join([*map(_strict, lines), ""])
    for index, (name, pattern) in enumerate(prepared.patterns.items()):
        ebnf = ebnf.replace(rf'"\"{name}\""', f"pattern_{index}")
        ebnf += f'pattern_{index} ::= "\\"" pattern_{index}_inside "\\""\n'
        ebnf += f"pattern_{index}_inside ::= Regex({literal(pattern)}, json_string=true)\n"
    return ebnf


def _strict(line: str) -> str:
    """A rule as it should be."""
    line = _ESCAPE.sub(_spell_out, line)
    name = line.partition(" ::= ")[0]
    if name in _RULES:
        return f"{name} ::= {_RULES[name]}"
    return line if _REGEX_RULE.match(line) else line.replace(_LOOSE_CHARACTER, _CHARACTER)


def _spell_out(escape: re.Match[str]) -> str:
    """An escape with all its digits: the compiler writes two of them, and reads a digit that follows as a third."""
    digits = escape[1] or escape[2]
    return rf"\U{digits:0>8}" if digits else escape[0]
