"""From a vocabulary's pieces to bytes: what each token adds to the text, on its own.

Byte-level vocabularies spell every byte as one printable character; SentencePiece-like ones write ``▁`` for a space and
``<0xE2>`` for a byte they have no piece for. In both, text is the UTF-8 of the pieces' bytes laid end to end, so
decoding needs no look back further than one unfinished character.

Limit: in a SentencePiece-like vocabulary, bytes that are no UTF-8 may give another number of replacement characters
than the ``tokenizers`` library, which judges a whole run of byte pieces at once.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from triptych.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Each byte's printable character: itself where visible in Latin-1, otherwise the next free one from U+0100."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


BYTE_OF = _byte_alphabet()
"""The bytes by the characters that byte-level vocabularies spell them with."""


class PieceDecoder:
    """Reads the ``decoder`` of a tokenizer.json.

    Raises:
        CheckpointError: the decoder has a step that is not known here.
    """

    def __init__(self, spec: dict[str, Any] | None) -> None:
        self.byte_level = False
        self._byte_pieces = False
        self._replacements: list[tuple[str, str]] = []
        self.leading_spaces = 0
        """Spaces taken off the very beginning of a decoded text."""
        for step in _steps(spec):
            self._add(step)

    def _add(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self.byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_pieces = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                self.leading_spaces = start
            case {"type": "Metaspace", "replacement": str(mark)}:
                self._replacements.append((mark, " "))
                self.leading_spaces = int(step.get("prepend_scheme", "always") != "never")
            case _:
                raise CheckpointError(f"tokenizer.json: decoder step {step.get('type')!r} is not supported")

    def to_bytes(self, piece: str) -> bytes:
        """What one piece adds to the text."""
        if self.byte_level:
            try:
                return bytes(BYTE_OF[character] for character in piece)
            except KeyError:  # an added token is written as it is
                return piece.encode()
        if self._byte_pieces and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes((int(match[1], 16),))
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return piece.encode()


def _steps(spec: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if spec is None:
        raise CheckpointError("tokenizer.json has no decoder")
    if spec.get("type") == "Sequence":
        for step in spec["decoders"]:
            yield from _steps(step)
    else:
        yield spec
