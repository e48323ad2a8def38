"""The parts of a model that read prompts and media; no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from triptych.core.config import MediaLimits
    from triptych.core.guide import Grammar, Guide
    from triptych.processors.contract import Processor
    from triptych.roles.contract import ModelDescription
    from triptych.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Frontend:
    """What every role has of its model."""

    model: ModelDescription
    tokenizer: Tokenizer
    processor: Processor
    eos_token_ids: frozenset[int]
    vocab_size: int
    limits: MediaLimits


class GrammarCompiler(Protocol):
    """Turns guides into grammars, off the event loop and off the engine thread."""

    async def compile(self, guide: Guide) -> Grammar:
        """A grammar for the served model's tokens.

        Raises:
            InvalidRequest: the guide cannot be compiled; says why.
            Overloaded: too many guides wait.
        """
        ...

    def statistics(self) -> dict[str, float]:
        """Counts as of now."""
        ...

    async def close(self) -> None:
        """End what compiles and what follows grammars."""
        ...
