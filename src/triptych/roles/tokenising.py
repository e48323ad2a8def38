"""Prompts to token ids: on the event loop where that takes no time, on a worker of its own where it might."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from triptych.core.errors import InvalidRequest, Overloaded, PromptTooLong

if TYPE_CHECKING:
    import numpy.typing as npt

    from triptych.roles.contract import ModelDescription
    from triptych.text.tokenizer import Tokenizer

LONG_TEXT = 2048
"""Characters of prompt text from which tokenising leaves the event loop."""
MAX_TOKENISING = 64
"""Long texts that are being tokenised or wait for it; one more is refused as overloaded."""


def window(model: ModelDescription) -> str:
    """How long a prompt may be and why, in words that end a message."""
    return f"the context window is {model.max_context} tokens, answer included (set by {model.context_limit})"


class Tokenising:
    """Belongs to one event loop.

    Args:
        model: whose context window bounds prompts.
        tokenizer: its own.
        vocab_size: likewise.
    """

    def __init__(self, model: ModelDescription, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.texts = 0
        """Tokenised since the start."""
        self._model = model
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._under_way = 0
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")

    async def ids(self, prompt: str | tuple[int, ...]) -> npt.NDArray[np.int32]:
        """The prompt's token ids; media markers stay as they are.

        Raises:
            InvalidRequest: an id is outside the vocabulary, or there is none.
            PromptTooLong: the text cannot fit, which is said before it is tokenised.
            Overloaded: too many long texts wait.
        """
        if not isinstance(prompt, str):
            token_ids = np.asarray(prompt, dtype=np.int64)
            outside = token_ids[(token_ids < 0) | (token_ids >= self._vocab_size)]
            if outside.size:
                raise InvalidRequest(f"token id {outside[0]} is outside the vocabulary of {self._vocab_size}")
            return token_ids.astype(np.int32)
        fewest = self._tokenizer.fewest_tokens(prompt)
        if fewest >= self._model.max_context:
            raise PromptTooLong(f"the prompt has at least {fewest} tokens; {window(self._model)}")
        self.texts += 1
        if len(prompt) < LONG_TEXT:
            ids = self._tokenizer.encode(prompt)
        elif self._under_way >= MAX_TOKENISING:
            raise Overloaded(f"{self._under_way} long texts already wait to be tokenised; retry later")
        else:
            self._under_way += 1
            try:
                ids = await asyncio.get_running_loop().run_in_executor(self._pool, self._tokenizer.encode, prompt)
            finally:
                self._under_way -= 1
        if not ids:
            raise InvalidRequest("the prompt has no tokens")
        return np.asarray(ids, dtype=np.int32)

    async def close(self) -> None:
        """Wait for the worker and for what waits for it: that is bounded."""
        await asyncio.to_thread(self._pool.shutdown, wait=True)
