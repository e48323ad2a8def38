"""Encoding text of which only some parts may hold added tokens.

A tokenizer recognises its added tokens (``<|im_start|>``, ``<|image_pad|>``, ...) wherever their words stand, in a
user's text too. Here the words are changed instead: a second tokenizer is built from the same JSON in which every
added token bears a secret name, and the words in *trusted* parts are exchanged for the names before encoding. What
a user writes can then never be an added token, whatever it is, while trusted tokens keep every rule they have
(stripping, normalisation) and merges run across the borders of parts as in one plain text.

Limit: a family that uses added tokens for ordinary text (runs of spaces, say) sees them in trusted parts only.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

import tokenizers

if TYPE_CHECKING:
    from collections.abc import Iterable


class Part(NamedTuple):
    """A stretch of text. Only in a trusted one are added tokens recognised."""

    text: str
    trusted: bool


class GuardedEncoder:
    """Encodes parts. Thread-safe.

    Args:
        spec: a tokenizer.json's content.
    """

    def __init__(self, spec: str) -> None:
        tree: dict[str, Any] = json.loads(spec)
        nonce = secrets.token_hex(16)
        added = sorted(tree.get("added_tokens") or (), key=lambda token: token["id"])
        # Private-use brackets and lower-case hex digits: no normaliser touches them.
        self._names = {token["content"]: f"\ue000{nonce}{index:x}\ue001" for index, token in enumerate(added)}
        plain = tokenizers.Tokenizer.from_str(json.dumps(_renamed(tree, self._names)))
        plain.no_truncation()
        plain.no_padding()
        self._tokenizer = plain
        # A renamed token that the model's vocabulary could not give up gets a new id there: translate it back.
        self._ids = {
            encoded: token["id"]
            for token in added
            if (encoded := plain.token_to_id(self._names[token["content"]])) != token["id"]
        }
        longest_first = sorted(map(re.escape, self._names), key=len, reverse=True)
        self._words = re.compile("|".join(longest_first) or r"(?!)")

    def encode(self, parts: Iterable[Part]) -> list[int]:
        """Token ids of the parts laid end to end, without the tokenizer's own prefix or suffix."""
        text = "".join(
            self._words.sub(lambda match: self._names[match[0]], part.text) if part.trusted else part.text
            for part in parts
        )
        # a batch of one: unlike encode it lets other threads run meanwhile
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [self._ids.get(i, i) for i in ids] if self._ids else ids


def _renamed(tree: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The tokenizer's JSON with new words for its added tokens, in the vocabulary too where it has them."""
    model = dict(tree["model"])
    # A word that merges need must stay: then it is ordinary text as well as an added token.
    pairs = [pair if isinstance(pair, list) else pair.split(" ", 1) for pair in model.get("merges", ())]
    merged = {word for left, right in pairs for word in (left, right, left + right)}
    free = {word: name for word, name in names.items() if word not in merged}
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {free.get(word, word): index for word, index in vocab.items()}
    else:
        model["vocab"] = [[free.get(word, word), score] for word, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = free.get(model["unk_token"], model["unk_token"])
    added = [{**token, "content": names[token["content"]]} for token in tree.get("added_tokens") or ()]
    return {**tree, "model": model, "added_tokens": added, "post_processor": None}
