"""A compiled grammar and an answer that follows it, both in processes of their own: see ``grammar_process``.

The next mask is computed while the model computes: ``accept`` sends the token and returns, ``allowed`` takes the mask
that has come meanwhile. Neither can be held up by a grammar for longer than ``WAIT_SECONDS``.
"""

from __future__ import annotations

import socket
import weakref
from typing import TYPE_CHECKING

import numpy as np

from triptych.core.errors import Internal, InvalidRequest, TriptychError
from triptych.engine.grammar_wire import LENGTH, READY, Step, mask_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

WAIT_SECONDS = 5.0
"""How long the engine waits for a mask. Less than that is the process's own limit, in processor time."""


class ForkedGrammar:
    """A guide's process. It ends with the last that holds this object.

    Args:
        channel: to the process, which has compiled the guide.
        field: names the guide in messages.
        first: mask at the beginning of an answer.
        vocab_size: tokens of the model.
        ends: ids that end an answer.
        size: bytes that the guide occupies.
    """

    def __init__(
        self, channel: socket.socket, field: str, first: bytes, vocab_size: int, ends: frozenset[int], size: int
    ) -> None:
        self._channel = channel
        self.field = field
        self.first = first
        self.vocab_size = vocab_size
        self.ends = ends
        self.size = size
        weakref.finalize(self, channel.close)

    def matcher(self) -> ForkedMatcher:
        """A new matcher at the beginning of an answer."""
        return ForkedMatcher(self)

    def alive(self) -> bool:
        """Whether the process is still there."""
        try:
            return bool(self._channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def open(self) -> socket.socket:
        """A socket to a new process that follows one answer.

        Raises:
            OSError: none can be had.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._channel, [READY], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        ours.settimeout(WAIT_SECONDS)
        return ours


class ForkedMatcher:
    """Follows one answer. Belongs to the engine thread. Its process is there from the first token to the last."""

    def __init__(self, grammar: ForkedGrammar) -> None:
        self._grammar = grammar
        self._channel: socket.socket | None = None
        self._close: weakref.finalize[[], ForkedMatcher] | None = None
        self._reply = bytearray(1 + mask_bytes(grammar.vocab_size))
        self._reply[1:] = grammar.first
        self._owed = False  # a mask was asked for and not yet taken
        self._ended = False
        self._trouble: TriptychError | None = None

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, shape [vocab]; after a complete answer only the ends of sequence.

        Raises:
            InvalidRequest: the grammar cannot be followed: too much time or memory, or no token is left.
            Internal: the token that was chosen was none of those allowed.
        """
        if self._trouble is None and self._owed:
            self._trouble = self._take()
            self._owed = False
        if self._trouble is not None:
            self._end()
            raise self._trouble
        if self._ended:
            ends = np.zeros(self._grammar.vocab_size, dtype=np.bool_)
            ends[list(self._grammar.ends)] = True
            return ends
        packed = np.frombuffer(self._reply, dtype=np.uint8, offset=1)
        return np.unpackbits(packed, count=self._grammar.vocab_size, bitorder="little").view(np.bool_)

    def accept(self, token: int) -> None:
        """Take note of the token that was chosen; one of those allowed. What is wrong with it, ``allowed`` says."""
        if self._ended or self._trouble is not None:
            return
        if self._owed:
            self.allowed()
        if token in self._grammar.ends:
            self._end()
            return
        try:
            if self._channel is None:
                self._channel = channel = self._grammar.open()
                self._close = weakref.finalize(self, channel.close)
            self._channel.sendall(token.to_bytes(LENGTH, "little"))
        except OSError:
            self._trouble = self._refusal("its process has ended")
        else:
            self._owed = True

    def _take(self) -> TriptychError | None:
        assert self._channel is not None
        view = memoryview(self._reply)
        try:
            while view:
                count = self._channel.recv_into(view)
                if not count:
                    break
                view = view[count:]
        except OSError:
            pass  # too late, or reset
        if view:
            return self._refusal("the grammar takes too long, or too much memory, to be followed")
        match self._reply[0]:
            case Step.OPEN:
                return None
            case Step.STUCK:
                return self._refusal("the answer came to where the grammar leaves no token to go on with")
            case Step.MEMORY:
                return self._refusal("the grammar takes too much memory to be followed")
            case _:
                return Internal(f"{self._grammar.field}: a token was chosen that the grammar does not allow")

    def _refusal(self, reason: str) -> InvalidRequest:
        return InvalidRequest(f"{self._grammar.field}: {reason}")

    def _end(self) -> None:
        self._ended = True
        if self._close is not None:
            self._close()
