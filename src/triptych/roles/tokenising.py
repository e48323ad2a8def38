"""Prompts to token ids, and how many of them there may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from triptych.core.errors import InvalidRequest, PromptTooLong

if TYPE_CHECKING:
    import numpy.typing as npt

    from triptych.roles.contract import ModelDescription
    from triptych.roles.prompt_thread import PromptThread
    from triptych.text.tokenizer import Tokenizer

LONG_TEXT = 2048
"""Characters of prompt text from which tokenising leaves the event loop."""


def window(model: ModelDescription) -> str:
    """How long a prompt may be and why, in words that end a message."""
    return f"the context window is {model.max_context} tokens, answer included (set by {model.context_limit})"


class Tokenising:
    """Belongs to one event loop.

    Args:
        model: whose context window bounds prompts.
        tokenizer: its own.
        vocab_size: likewise.
        thread: for long texts.
    """

    def __init__(self, model: ModelDescription, tokenizer: Tokenizer, vocab_size: int, thread: PromptThread) -> None:
        self.texts = 0
        """Tokenised since the start."""
        self._model = model
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._thread = thread

    async def ids(self, prompt: str | tuple[int, ...]) -> npt.NDArray[np.int32]:
        """The prompt's token ids; media markers stay as they are.

        Raises:
            InvalidRequest: an id is outside the vocabulary, or there is none.
            PromptTooLong: the text cannot fit, which is said before it is tokenised.
            Overloaded: too many long prompts wait.
        """
        if not isinstance(prompt, str):
            if len(prompt) >= self._model.max_context:
                raise PromptTooLong(f"the prompt has {len(prompt)} tokens; {window(self._model)}")
            token_ids = np.asarray(prompt, dtype=np.int64)
            outside = token_ids[(token_ids < 0) | (token_ids >= self._vocab_size)]
            if outside.size:
                raise InvalidRequest(f"token id {outside[0]} is outside the vocabulary of {self._vocab_size}")
            return token_ids.astype(np.int32)
        fewest = self._tokenizer.fewest_tokens(prompt)
        if fewest >= self._model.max_context:
            raise PromptTooLong(f"the prompt has at least {fewest} tokens; {window(self._model)}")
        self.texts += 1
        ids = await self._thread.run(lambda: self._tokenizer.encode(prompt), long=len(prompt) >= LONG_TEXT)
        if not ids:
            raise InvalidRequest("the prompt has no tokens")
        return np.asarray(ids, dtype=np.int32)
