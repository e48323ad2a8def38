"""From sampled tokens to text, one token at a time."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of one growing token sequence.

    A character whose bytes come in several tokens is shown when it is complete; bytes that can never become one are
    shown as U+FFFD at once. Special tokens add nothing. The deltas joined, ``finish`` included, are the decoding of the
    whole sequence. A token costs the same however long the sequence is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.leading_spaces

    def feed(self, token_id: int) -> str:
        """What the token adds; often nothing, when a character is not complete yet."""
        if token_id in self._tokenizer.special_ids:
            return ""
        return self._shown(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """What the end of the sequence adds: U+FFFD for a character that was left incomplete."""
        return self._shown(self._utf8.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                text = text[1:]
                self._strip -= 1
        return text
