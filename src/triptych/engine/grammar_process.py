"""The processes in which guides are compiled and answers follow them. Started by ``grammar_host``.

    host        holds the vocabulary; forks one process for every guide
      guide     compiles it, reports, and stays: forks one process for every answer
        answer  takes tokens, returns masks

A guide is a program that a stranger wrote, and the library that runs it cannot be interrupted: a short pattern can keep
it busy for hours over one token. So whoever runs one does nothing else, and the kernel ends it: by an alarm while it
compiles, by an allowance of processor time while it follows an answer, by a limit of memory always. A process ends by
itself when the other end of its socket is closed, and all of them when the host's is.

The library's binding is called without the package around it, which would import torch and transformers: 270 MB and
1.5 s instead of 45 MB and 0.1 s.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np

from triptych.core.guide import GuideKind
from triptych.engine import utf8
from triptych.engine.grammar_wire import (
    LENGTH,
    READY,
    Outcome,
    Step,
    Task,
    Vocabulary,
    frame,
    frame_length,
    receive,
)
from triptych.engine.guide_error import GuideError
from triptych.engine.guide_source import write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

BURST_SECONDS = 1.0
"""Processor time that an answer may take for its grammar at once."""
TOKEN_SECONDS = 0.05
"""Processor time that every token adds to what is left of it."""
MAX_REASON = 300
"""Characters of the library's own message that are passed on."""

_SOURCE_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
_FAILED_CHECK = re.compile(r"Check failed: \(.*?\) is false: ")
_STATM = Path("/proc/self/statm")


class Compiler:
    """What every guide's process begins with."""

    def __init__(self, library: Any, vocabulary: Vocabulary) -> None:
        ends = set(vocabulary.ends)
        # an end of sequence ends; its bytes, should it have any, are no text
        tokens = [b"" if index in ends else data for index, data in enumerate(vocabulary.tokens)]
        self.library = library
        self.masks = utf8.masks(tokens)
        self.tokens = tokens
        self.ends = frozenset(ends)
        self._info = library.TokenizerInfo(tokens, 0, len(tokens), sorted(ends), False)

    def serve(self, channel: socket.socket) -> None:
        """Compile the guide that comes through ``channel``, then follow the answers that do."""
        task = _receive_task(channel)
        signal.setitimer(signal.ITIMER_REAL, task.seconds)
        _limit_memory(task.memory_bytes)
        before = _pages(1)
        said: list[str] = []
        try:
            with _overheard(said):
                grammar = self._compile(task)
            if said:
                raise GuideError(f"a part of it would be ignored: {said[0]}")
            first = self._first(grammar)
        except GuideError as error:
            outcome = Outcome(error=str(error)[:MAX_REASON])
        else:
            size = max(_pages(1) - before, grammar.memory_size_bytes())
            outcome = Outcome(size=size, first=first.tobytes())
        channel.sendall(frame(outcome))
        if outcome.error:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.freeze()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a guide must not write the engine's log
        _serve(channel, lambda answer: Answer(self, grammar).serve(answer, task.answer_bytes))

    def _compile(self, task: Task) -> Any:
        library = self.library
        try:
            source = write(GuideKind(task.kind), task.text, task.choices, self._convert)
            compiler = library.GrammarCompiler(self._info, 1, False, -1, False)
            if source.is_tag:
                return compiler.compile_structural_tag(source.text)
            return compiler.compile_grammar_ebnf(library.Grammar.from_ebnf(source.text, "root"))
        except MemoryError:
            raise GuideError(_too_large(task)) from None
        except UnicodeError:  # the library cuts its message in the middle of a character
            raise GuideError("the compiler refuses it, for a reason that it cannot spell") from None
        except RuntimeError as error:
            reason = _reason(error)
            raise GuideError(_too_large(task) if "bad_alloc" in reason else reason) from None

    def _convert(self, schema: str, white_space: int) -> str:
        grammar = self.library.Grammar.from_json_schema(schema, True, None, None, False, white_space, False, False)
        return str(grammar.to_string())

    def _first(self, grammar: Any) -> npt.NDArray[np.int32]:
        """The mask at the beginning of an answer."""
        answer = Answer(self, grammar)
        answer.fill()
        if not answer.mask.any():
            raise GuideError("nothing matches it that this model's tokens can spell")
        return answer.mask


class Answer:
    """One answer on its way through a grammar."""

    def __init__(self, compiler: Compiler, grammar: Any) -> None:
        self._tokens = compiler.tokens
        self._ends = compiler.ends
        self._masks = compiler.masks
        self._matcher = compiler.library.GrammarMatcher(grammar, None, False, -1, None)
        self._place = utf8.BETWEEN
        self.mask: npt.NDArray[np.int32] = np.zeros((1, self._masks.shape[1]), dtype=np.int32)
        """What may come next, shape [1, words]."""

    def serve(self, channel: socket.socket, memory_bytes: int) -> None:
        """Take tokens until the other end is closed."""
        _limit_memory(memory_bytes)
        allowance = BURST_SECONDS
        while head := channel.recv(LENGTH, socket.MSG_WAITALL):
            signal.setitimer(signal.ITIMER_PROF, allowance)
            try:
                step = self.accept(int.from_bytes(head, "little"))
            except (MemoryError, RuntimeError):  # the library's own exhaustion is a RuntimeError
                step = Step.MEMORY
            left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
            allowance = min(BURST_SECONDS, left + TOKEN_SECONDS)
            channel.sendall(bytes([step]) + self.mask.tobytes())

    def accept(self, token: int) -> Step:
        """Go on with a token and fill the mask."""
        if token in self._ends or not self._matcher.accept_token(token, False):
            return Step.REFUSED
        self._place = utf8.advance(self._place, self._tokens[token])
        self.fill()
        return Step.OPEN if self.mask.any() else Step.STUCK

    def fill(self) -> None:
        """Make the mask that of the present state."""
        if not self._matcher.fill_next_token_bitmask(self.mask, 0, False):
            self.mask.fill(-1)  # the library leaves a mask alone that forbids nothing
        self.mask &= self._masks[self._place]


def main() -> None:
    """Serve the engine whose socket is the file descriptor that the command line names."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine drains first; its end is ours
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes
    head = receive(channel, LENGTH)
    body = receive(channel, frame_length(head))
    compiler = Compiler(_load(), msgspec.msgpack.decode(body, type=Vocabulary))
    del body
    gc.collect()
    gc.freeze()  # what the processes share stays shared
    channel.sendall(READY)
    _serve(channel, compiler.serve)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def _serve(channel: socket.socket, work: Callable[[socket.socket], None]) -> None:
    """Fork a process for every socket that comes through ``channel``, until it is closed."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not data:
            return
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # no process is to be had: the other end sees its socket closed
                if not os.fork():
                    _work(channel, descriptor, work)
            os.close(descriptor)


def _work(channel: socket.socket, descriptor: int, work: Callable[[socket.socket], None]) -> NoReturn:
    """The whole life of a forked process."""
    try:
        channel.close()
        work(socket.socket(fileno=descriptor))
    except OSError:
        os._exit(1)  # the other end is gone
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def _load() -> Any:
    """The library's binding."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # the way to say that it cannot be imported
    spec = importlib.util.find_spec("xgrammar")
    if spec is None:
        raise ImportError("xgrammar is not installed")
    package = types.ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["xgrammar"] = package
    importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.tvm_ffi_binding._ffi_api")


def _receive_task(channel: socket.socket) -> Task:
    head = receive(channel, LENGTH)
    return msgspec.msgpack.decode(receive(channel, frame_length(head)), type=Task)


def _pages(column: int) -> int:
    """Bytes of this process: all that is mapped (0) or resident (1). Zero where the system does not say."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[column]) * resource.getpagesize()


def _limit_memory(more: int) -> None:
    mapped = _pages(0)
    if mapped:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + more, hard))


@contextlib.contextmanager
def _overheard(said: list[str]) -> Iterator[None]:
    """Add the library's warnings to ``said``; it writes them to the file descriptor of stderr."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as spool:
        os.dup2(spool.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        spool.seek(0)
        said += [_clean(line) for line in spool.read(1 << 16).decode(errors="replace").splitlines() if line.strip()]


def _reason(error: Exception) -> str:
    return _clean(str(error)) or "the compiler gives no reason"


def _clean(message: str) -> str:
    """A message of the library without its source lines."""
    message = _FAILED_CHECK.sub("", _SOURCE_PLACE.sub("", message)).removeprefix("Warning: ")
    return " ".join(message.split())


def _too_large(task: Task) -> str:
    return f"compiling it takes more than {task.memory_bytes >> 20} MiB"


if __name__ == "__main__":
    main()
