"""What a model's directory says about text, by the directory that an engine names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from triptych.text.chat import ChatTemplate
from triptych.text.generation import read_sampling
from triptych.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from triptych.core.request import Sampling
    from triptych.gateway.workers import Workers

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)

Stamp = tuple[tuple[int, int] | None, ...]


class ModelText(NamedTuple):
    """One model's text side."""

    template: ChatTemplate
    sampling: Sampling
    """What applies where a request says nothing."""


class Texts:
    """Loads each directory once, and again when its files have changed. Belongs to the event loop."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._loaded: dict[str, tuple[Stamp, ModelText]] = {}
        self._lock = asyncio.Lock()

    async def load(self, source: str) -> ModelText:
        """The template of a directory with its tokenizer, and its sampling defaults.

        Raises:
            CheckpointError: the directory is not readable here, or its files are broken.
        """
        async with self._lock:  # engines of one model start together: one of them loads, the others find it loaded
            stamp = await self._workers.run(_stamp, source)
            known = self._loaded.get(source)
            if known is not None and known[0] == stamp:
                return known[1]
            text = await self._workers.run(_load, source)
            self._loaded[source] = (stamp, text)
            return text


def _stamp(source: str) -> Stamp:
    """What tells one version of the files from another: size and time of change."""
    paths = [Path(source) / name for name in FILES]
    stats = [path.stat() if path.exists() else None for path in paths]
    return tuple(None if s is None else (s.st_size, s.st_mtime_ns) for s in stats)


def _load(source: str) -> ModelText:
    directory = Path(source)
    tokenizer = Tokenizer.load(directory)
    tokenizer.encode_plain("")  # what is built on first use takes a second for a large vocabulary: not a client's
    return ModelText(ChatTemplate.load(directory, tokenizer), read_sampling(directory))
