"""How few tokens a text can have, told from its length alone: a hostile prompt is refused before it costs anything.

    tokens  >=  characters after normalising / characters of the longest token
            >=  characters / (4 * bytes of the longest token)

Added tokens are tokens like any other here: long words that count as one. The bound is only as true as "every character
ends up in a token", so a tokenizer that is not known to work like that gets the bound 0: one that drops characters, or
that makes a single token of an unknown word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triptych.text.pieces import BYTE_OF

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPOSITION = 4
"""Characters that Unicode composition makes one of, at most; it leaves ASCII alone."""
_KEEP = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "ByteLevel", "Digits", "Metaspace"})
"""Normalisers and pre-tokenizers that drop nothing and shrink no more than composition does."""
_DROP_SPACE = frozenset({"Strip", "Whitespace", "WhitespaceSplit"})


class LengthBound:
    """The bound for one tokenizer.

    Args:
        spec: a tokenizer.json's content.
        longest: UTF-8 bytes of its longest token, added tokens included.
    """

    def __init__(self, spec: dict[str, Any], longest: int) -> None:
        steps = [*_steps(spec.get("normalizer")), *_steps(spec.get("pre_tokenizer"))]
        dropping = [step for step in steps if step.get("type") in _DROP_SPACE]
        self._longest = longest
        self._holds = _spells_anything(spec["model"], steps) and all(step in dropping or _keeps(step) for step in steps)
        self._drops_space = bool(dropping) or any(
            token.get("lstrip") or token.get("rstrip") for token in spec.get("added_tokens") or ()
        )

    def fewest(self, text: str) -> int:
        """Tokens that the text has at least."""
        if not self._holds:
            return 0
        length = sum(map(len, text.split())) if self._drops_space else len(text)
        return length // (self._longest if text.isascii() else self._longest * COMPOSITION)


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """One step, or those of a sequence."""
    if step is None:
        return
    if step.get("type") != "Sequence":
        yield step
        return
    for inner in step.get("normalizers") or step.get("pretokenizers") or ():
        yield from _steps(inner)


def _keeps(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Split", "behavior": str(behaviour)}:
            return behaviour != "Removed"
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new) >= len(old)
    return step.get("type") in _KEEP


def _spells_anything(model: dict[str, Any], steps: list[dict[str, Any]]) -> bool:
    """Whether the vocabulary has all bytes, so that no text is dropped or becomes an unknown token."""
    if model.get("type") != "BPE":
        return False
    words = model["vocab"]
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in words for byte in range(256))
    byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    return byte_level and all(character in words for character in BYTE_OF)
