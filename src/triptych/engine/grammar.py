"""Guides to grammars: each is compiled once, in a process of its own, and kept while it is in use or recently was."""

from __future__ import annotations

import asyncio
import importlib.util
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from triptych.core.errors import Draining, Internal, InvalidRequest, Overloaded
from triptych.engine.grammar_host import GrammarHost
from triptych.engine.grammar_wire import LENGTH, Outcome, Task, frame, frame_length
from triptych.engine.matcher import ForkedGrammar

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from triptych.core.guide import Guide

SHUTTING_DOWN = "the engine is shutting down; retry elsewhere"


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """How much guides may cost."""

    seconds: float = 10.0
    """To compile one."""
    memory_bytes: int = 512 << 20
    """To compile one."""
    answer_bytes: int = 128 << 20
    """To follow one answer."""
    at_once: int = 2
    """Guides that are compiled at the same time."""
    waiting: int = 64
    """Guides under way, those that are compiled now among them."""
    in_use: int = 256
    """Compiled guides that requests or the cache hold; each is a process."""
    cached: int = 64
    cached_bytes: int = 512 << 20


def guided_available() -> bool:
    """Whether the grammar library is installed (the extra ``guided``)."""
    return importlib.util.find_spec("xgrammar") is not None


class GrammarCompiler:
    """Belongs to the event loop; compiling happens elsewhere and is shared by all who ask for the same guide.

    Args:
        vocabulary: bytes that every token of the model adds to the text; empty for special tokens and unknown ids.
        end_ids: tokens that end an answer; at least one.
        limits: what a guide may cost.
    """

    def __init__(
        self, vocabulary: Sequence[bytes], end_ids: frozenset[int], limits: GrammarLimits | None = None
    ) -> None:
        if not end_ids:
            raise ValueError("an answer that follows a grammar needs a token that ends it")
        self.limits = limits or GrammarLimits()
        self._vocab_size = len(vocabulary)
        self._ends = end_ids
        self._host = GrammarHost(vocabulary, end_ids)
        self._slots = asyncio.Semaphore(self.limits.at_once)
        self._under_way: dict[Guide, asyncio.Task[ForkedGrammar]] = {}
        self._living: weakref.WeakValueDictionary[Guide, ForkedGrammar] = weakref.WeakValueDictionary()
        self._cache: OrderedDict[Guide, ForkedGrammar] = OrderedDict()  # keeps them so; least recently used first
        self._closing = False
        self._counts = dict.fromkeys(("compiled", "failed", "hits"), 0)

    @property
    def pid(self) -> int:
        """The process that all others are forked from; 0 while there is none."""
        return self._host.pid

    async def compile(self, guide: Guide) -> ForkedGrammar:
        """A grammar for the model's tokens. Cancelling a caller leaves the work to the others.

        Raises:
            InvalidRequest: the guide cannot be compiled, or not within its limits; says why.
            Overloaded: too many guides wait, or are in use.
            Internal: the compiler's process cannot be started.
        """
        grammar = self._living.get(guide)
        if grammar is not None and grammar.alive():
            self._counts["hits"] += 1
            self._keep(guide, grammar)
            return grammar
        task = self._under_way.get(guide)
        if task is None:
            task = self._begin(guide)
        return await asyncio.shield(task)

    def statistics(self) -> dict[str, float]:
        """Counts since the start, and what there is now."""
        return {
            **self._counts,
            "starts": self._host.starts,
            "waiting": len(self._under_way),
            "cached": len(self._cache),
            "cached_bytes": sum(grammar.size for grammar in self._cache.values()),
            "in_use": len(self._living),
        }

    async def close(self) -> None:
        """End all processes; what is under way fails, and so do answers that still follow a grammar."""
        self._closing = True
        self._cache.clear()
        await asyncio.to_thread(self._host.close)
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    def _begin(self, guide: Guide) -> asyncio.Task[ForkedGrammar]:
        if self._closing:
            raise Draining(SHUTTING_DOWN)
        limits = self.limits
        if len(self._under_way) >= limits.waiting:
            raise Overloaded(f"{limits.waiting} guides are waiting to be compiled; retry later")
        while len(self._living) >= limits.in_use and self._cache:
            self._cache.popitem(last=False)
        if len(self._living) >= limits.in_use:
            raise Overloaded(f"{limits.in_use} different guides are in use; retry later")
        task = asyncio.create_task(self._compile(guide), name=f"compile {guide.kind.value}")
        self._under_way[guide] = task
        task.add_done_callback(lambda done: self._finish(guide, done))
        return task

    def _finish(self, guide: Guide, task: asyncio.Task[ForkedGrammar]) -> None:
        del self._under_way[guide]
        if task.cancelled() or task.exception() is not None:
            self._counts["failed"] += 1
            return
        self._counts["compiled"] += 1
        self._living[guide] = grammar = task.result()
        self._keep(guide, grammar)

    def _keep(self, guide: Guide, grammar: ForkedGrammar) -> None:
        """Make it the one most recently used, and forget others beyond what may be kept."""
        limits, cache = self.limits, self._cache
        cache[guide] = grammar
        cache.move_to_end(guide)
        while len(cache) > limits.cached or sum(each.size for each in cache.values()) > limits.cached_bytes:
            cache.popitem(last=False)

    async def _compile(self, guide: Guide) -> ForkedGrammar:
        field = f"guided.{guide.kind.value}"
        limits = self.limits
        task = Task(
            guide.kind.value, guide.text, list(guide.choices), limits.seconds, limits.memory_bytes, limits.answer_bytes
        )
        try:
            message = frame(task)
        except UnicodeEncodeError:
            raise InvalidRequest(f"{field} is not Unicode: it has half a surrogate pair") from None
        async with self._slots:
            channel = await asyncio.to_thread(self._host.open)
            try:
                outcome = await self._ask(channel, message, field)
                if outcome.error:
                    raise InvalidRequest(f"{field}: {outcome.error}")
            except BaseException:
                channel.close()
                raise
            return ForkedGrammar(channel, field, outcome.first, self._vocab_size, self._ends, outcome.size)

    async def _ask(self, channel: socket.socket, message: bytes, field: str) -> Outcome:
        seconds = self.limits.seconds
        loop = asyncio.get_running_loop()
        channel.setblocking(False)
        begun = time.monotonic()
        try:
            async with asyncio.timeout(2 * seconds):  # the process ends itself after half of it
                await loop.sock_sendall(channel, message)
                head = await _receive(loop, channel, LENGTH)
                body = await _receive(loop, channel, frame_length(head))
        except (OSError, TimeoutError):
            if self._closing:
                raise Draining(SHUTTING_DOWN) from None
            if time.monotonic() - begun >= seconds:
                raise InvalidRequest(f"{field}: compiling it took longer than {seconds:g} s") from None
            raise InvalidRequest(f"{field}: the compiler could not cope with it") from None
        finally:
            channel.setblocking(True)
        try:
            return msgspec.msgpack.decode(body, type=Outcome)
        except msgspec.DecodeError as error:
            raise Internal("the compiler's answer cannot be read") from error


async def _receive(loop: asyncio.AbstractEventLoop, channel: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = await loop.sock_recv(channel, min(size, 1 << 20))
        if not part:
            raise ConnectionError("the other end is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
