"""A checkpoint's tokenizer, read from its ``tokenizer.json``."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import tokenizers

from triptych.core.checkpoint import read_json_if_present, read_text
from triptych.core.errors import CheckpointError, InvalidRequest, one_line
from triptych.text.bound import LengthBound
from triptych.text.guarded import GuardedEncoder, Part
from triptych.text.pieces import PieceDecoder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MAX_REASON = 200
"""Characters of the library's own error message that are passed on."""


class Tokenizer:
    """Text to ids and back. Thread-safe; encoding costs about a second for a few million characters."""

    def __init__(self, library: tokenizers.Tokenizer, spec: dict[str, Any], eos_token_ids: frozenset[int]) -> None:
        """See ``load``. ``spec`` is the tokenizer.json's content."""
        self._library = library
        self._pieces = pieces = PieceDecoder(spec.get("decoder"))
        self._guarded: GuardedEncoder | None = None
        self._lock = threading.Lock()
        added = library.get_added_tokens_decoder()
        self.added_tokens: dict[str, int] = {token.content: index for index, token in added.items()}
        """Every added token, special or not, with its id."""
        self.special_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        """Ids that are left out of the visible text."""
        self.eos_token_ids = eos_token_ids
        """Ids that end an answer. Empty where no file names one."""
        vocab = library.get_vocab()
        self._bound = LengthBound(spec, max((len(pieces.to_bytes(word)) for word in vocab), default=1))

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read a checkpoint's tokenizer.

        Args:
            directory: holds tokenizer.json and, where they exist, generation_config.json, tokenizer_config.json and
                config.json, which name the end-of-sequence tokens.

        Raises:
            CheckpointError: a file is missing or broken.
        """
        path = directory / "tokenizer.json"
        text = read_text(path)
        try:
            library = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
            raise CheckpointError(f"{path} is not a tokenizer: {one_line(error)[:MAX_REASON]}") from None
        library.no_truncation()
        library.no_padding()
        return cls(library, json.loads(text), _find_eos(directory, library))

    @property
    def leading_spaces(self) -> int:
        """Spaces that decoding takes off the beginning of a text."""
        return self._pieces.leading_spaces

    def encode(self, text: str) -> list[int]:
        """Token ids, with added tokens recognised wherever their words stand, and whatever the tokenizer itself adds.

        Args:
            text: trusted: see ``encode_plain`` for what a user wrote.

        Raises:
            InvalidRequest: the text is not Unicode (it has a lone surrogate).
        """
        check_unicode(text)
        # a batch of one: unlike encode it lets other threads run meanwhile
        ids: list[int] = self._library.encode_batch_fast([text])[0].ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids among which no added token can be: ``<|image_pad|>`` stays text of thirteen characters.

        Raises:
            InvalidRequest: the text is not Unicode (it has a lone surrogate).
        """
        return self.encode_parts((Part(text, trusted=False),))

    def encode_parts(self, parts: Iterable[Part]) -> list[int]:
        """Token ids of parts laid end to end, with added tokens recognised in trusted parts only.

        Raises:
            InvalidRequest: a part is not Unicode (it has a lone surrogate).
        """
        parts = tuple(parts)
        for part in parts:
            check_unicode(part.text)
        with self._lock:
            if self._guarded is None:  # built on first use: an engine that is sent token ids never needs it
                self._guarded = GuardedEncoder(self._library.to_str())
            guarded = self._guarded
        return guarded.encode(parts)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the text's length in tokens, had without tokenising it.

        It holds however the text is encoded, and also where it is mostly added tokens, one token for a long word each.
        """
        return self._bound.fewest(text)

    def piece(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token; empty for an id it does not have."""
        return self._library.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 that a token adds to the text, perhaps part of a character; empty for an unknown id."""
        return self._pieces.to_bytes(self.piece(token_id))


def check_unicode(text: str) -> None:
    """Refuse what has no UTF-8.

    Raises:
        InvalidRequest: the text has a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"text is not Unicode: character {error.start} is a lone surrogate") from None


def token_word(value: Any) -> str | None:
    """A token as configuration files write it: its word, or an object with the word as ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _find_eos(directory: Path, library: tokenizers.Tokenizer) -> frozenset[int]:
    """Generation settings and the tokenizer's own eos together; the model's configuration where both are silent."""
    found = set(read_json_if_present(directory, "generation_config.json").token_ids("eos_token_id"))
    word = token_word(read_json_if_present(directory, "tokenizer_config.json").values.get("eos_token"))
    index = library.token_to_id(word) if word else None
    if index is not None:
        found.add(index)
    if not found:
        config = read_json_if_present(directory, "config.json")
        found = set(config.token_ids("eos_token_id") or config.section("text_config").token_ids("eos_token_id"))
    return frozenset(found)
