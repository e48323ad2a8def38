"""From the tokens of one output to the text that may be shown: detokenising and stop strings."""

from __future__ import annotations

import functools
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.events import StopText
from triptych.text.detokenize import Detokenizer
from triptych.text.stop import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.core.request import Stopping
    from triptych.text.tokenizer import Tokenizer


class Delta(NamedTuple):
    """What a few new tokens add to the visible answer."""

    tokens: int
    """How many of them belong to it: those behind a completed stop string do not."""
    text: str
    stop: StopText | None


class VisibleText:
    """The text of one output. Tokens go in at once; characters that may begin a stop string are held back."""

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens
        self.tokens = 0
        """Tokens fed so far, up to and with the one that completed a stop string."""

    def feed(self, token_ids: tuple[int, ...]) -> Delta:
        """Turn new tokens into text that may be shown."""
        shown: list[str] = []
        for index, token_id in enumerate(token_ids):
            self.tokens += 1
            step = self._matcher.feed(self._detokenizer.feed(token_id), armed=self.tokens >= self._min_tokens)
            shown.append(step.text)
            if step.stop is not None:
                return Delta(index + 1, "".join(shown), StopText(step.stop))
        return Delta(len(token_ids), "".join(shown), None)

    def finish(self) -> Delta:
        """What was held back, once nothing more can come; its last bytes may still complete a stop string."""
        step = self._matcher.finish(self._detokenizer.finish(), armed=self.tokens >= self._min_tokens)
        return Delta(0, step.text, None if step.stop is None else StopText(step.stop))


def visible_texts(tokenizer: Tokenizer, stopping: Stopping, count: int) -> tuple[VisibleText, ...]:
    """The texts of the outputs of one request; what finds their stop strings is built once for all of them."""
    matcher = StopMatcher(stopping.stop_strings, include_stop=stopping.include_stop_in_output)
    # A copy has a place of its own in the automaton, which nothing changes once it is built.
    return tuple(VisibleText(Detokenizer(tokenizer), copy(matcher), stopping.min_tokens) for _ in range(count))


def token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """A function that spells single tokens, from any thread; bytes that are no whole character become U+FFFD.

    It remembers what it has spelled, at most the vocabulary: log probabilities of whole vocabularies ask for the same
    hundred thousand tokens again and again. Special tokens are spelled out, though they add nothing to a text.
    """

    @functools.cache
    def spelled(token_id: int) -> str:
        return tokenizer.token_bytes(token_id).decode(errors="replace")

    return spelled
