"""The file of one session: its blocks in order, then what they must be.

    blocks x block_bytes              as they lie in a pool
    head                              magic, format, digest size, blocks, block_bytes, identity of session and layout
    blocks x DIGEST_BYTES             BLAKE3 of every block
    32 bytes                          BLAKE3 of head and digests

The end is written last, so a file without it is no session. A reader checks a block after the copy, in its own
memory: what it then uses is what was checked. Nothing is mapped: a mapping that somebody shortens ends the process,
a read that comes up short is an error; and a read into the pool is one copy as well.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from triptych.core.errors import Internal
from triptych.transport.moves import runs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from triptych.core.handles import Handle
    from triptych.transport.contract import Move

    Bytes = npt.NDArray[np.uint8]

MAX_VIEWS = 512
"""Buffers of one system call; every system takes 1024."""
DIGEST_BYTES = 16

_MAGIC = b"TriptBlk"
_FORMAT = 2
_HEAD = struct.Struct("<8sIIQQ32s")
_SEAL_BYTES = 32


class DamagedFile(Internal):
    """The file is shorter than it must be, or its bytes are not those that were written."""


class StrangeFile(Internal):
    """The file is whole, but it is not what the handle names."""


class BlockFileWriter:
    """Appends blocks of a pool to an empty file."""

    def __init__(self, descriptor: int, memory: Bytes) -> None:
        """From ``memory``, [num_blocks, block_bytes], into the file behind ``descriptor``, which stays the caller's."""
        self._descriptor = descriptor
        self._memory = memory
        self._digests = bytearray()
        self._end = 0

    def append(self, blocks: Sequence[int]) -> None:
        """The next blocks, at most ``MAX_VIEWS``.

        Raises:
            OSError: the directory is full, or worse.
        """
        for block in blocks:
            self._digests += blake3(self._memory[block]).digest(DIGEST_BYTES)
        self._write(_views(self._memory, blocks))

    def finish(self, handle: Handle[Any]) -> None:
        """All blocks of ``handle`` are there.

        Raises:
            OSError: as above.
        """
        end = bytearray(_head(handle)) + self._digests
        end += blake3(end).digest(_SEAL_BYTES)
        self._write([memoryview(end)])

    def _write(self, views: list[Bytes | memoryview]) -> None:
        self._end += _transfer(os.pwritev, self._descriptor, views, self._end)


class BlockFileReader:
    """Copies blocks of a file into a pool."""

    def __init__(self, descriptor: int, handle: Handle[Any]) -> None:
        """Read the end of the file behind ``descriptor``, which stays the caller's.

        Raises:
            DamagedFile: too short, too long, or changed.
            StrangeFile: of another session.
            OSError: it cannot be read.
        """
        self._descriptor = descriptor
        self._block_bytes = handle.layout.block_bytes
        start = handle.blocks * self._block_bytes
        sealed = _HEAD.size + handle.blocks * DIGEST_BYTES
        size = os.fstat(descriptor).st_size
        if size != start + sealed + _SEAL_BYTES:
            raise DamagedFile(f"it has {size} bytes, not {start + sealed + _SEAL_BYTES}")
        end = bytearray(sealed + _SEAL_BYTES)
        self._read([memoryview(end)], start)
        if blake3(memoryview(end)[:sealed]).digest(_SEAL_BYTES) != end[sealed:]:
            raise DamagedFile("its end was changed")
        if end[: _HEAD.size] != _head(handle):
            raise StrangeFile("it is another session's, or of another format")
        self._digests = bytes(end[_HEAD.size : sealed])

    def read(self, memory: Bytes, moves: Sequence[Move]) -> None:
        """Copy at most ``MAX_VIEWS`` blocks into the rows of ``memory`` and check them there.

        Raises:
            DamagedFile: a block is not what was written. The targets hold anything.
            OSError: it cannot be read.
        """
        targets = [move.target for move in moves]
        at = 0
        for run in runs(move.source for move in moves):
            self._read(_views(memory, targets[at : at + run.length]), run.first * self._block_bytes)
            at += run.length
        for source, target in moves:
            expected = self._digests[source * DIGEST_BYTES : (source + 1) * DIGEST_BYTES]
            if blake3(memory[target]).digest(DIGEST_BYTES) != expected:
                raise DamagedFile(f"block {source} was changed")

    def _read(self, views: list[Bytes | memoryview], offset: int) -> None:
        wanted = sum(view.nbytes for view in views)
        if (got := _transfer(os.preadv, self._descriptor, views, offset)) != wanted:
            raise DamagedFile(f"it ends at byte {offset + got}")


def _head(handle: Handle[Any]) -> bytes:
    layout = handle.layout
    identity = blake3()
    for part in (handle.session_id, handle.instance_id, layout.label):
        data = part.encode()
        identity.update(len(data).to_bytes(8, "little") + data)
    return _HEAD.pack(_MAGIC, _FORMAT, DIGEST_BYTES, handle.blocks, layout.block_bytes, identity.digest())


def _views(memory: Bytes, blocks: Sequence[int]) -> list[Bytes | memoryview]:
    """Rows of ``memory``, neighbours as one buffer."""
    return [memory[run.first : run.first + run.length].reshape(-1) for run in runs(blocks)]


def _transfer(call: Callable[..., int], descriptor: int, views: list[Bytes | memoryview], at: int) -> int:
    """Repeat ``call`` until every view was served or the file has ended; the bytes transferred."""
    total = 0
    while views:
        count = call(descriptor, views, at + total)
        if not count:
            break
        total += count
        while views and count >= views[0].nbytes:
            count -= views.pop(0).nbytes
        if count:
            views[0] = views[0][count:]
    return total
