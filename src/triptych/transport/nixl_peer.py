"""A consumer's end to one producer: an agent of its own, and what is being read there.

One agent a peer, because the end of an agent is the only proof that a READ which went wrong touches nothing any more
(``nixl_agent``), and because a peer that hangs or dies then concerns nobody else.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from triptych.transport.nixl_agent import NixlAgent, PeerLost, ReadState
from triptych.transport.nixl_ledger import ROW_BYTES, STAMP_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt

    from triptych.transport.contract import BlockMemory
    from triptych.transport.nixl_agent import NixlOptions, NixlRead
    from triptych.transport.nixl_state import NixlPlace
    from triptych.transport.nixl_words import Word

LANDINGS = 4
"""Fetches from one peer that may be under way at once; others wait their turn."""
SETTLE_ROUNDS = 8
"""Looks at a peer before it is disconnected; one was always enough, none ended the process."""
WORD_ROUNDS = 16
"""Looks at a peer after something was said to it, lest the word stays behind."""
_HEAD = (STAMP_BYTES + ROW_BYTES) // 8


class Landing:
    """Registered memory of one fetch for what it reads besides blocks: stamp, row, generations."""

    def __init__(self, words: npt.NDArray[np.int64]) -> None:
        self._words = words
        self.address = words.ctypes.data

    @property
    def stamp(self) -> bytes:
        """Of the producer's start."""
        return self._words[: STAMP_BYTES // 8].tobytes()

    @property
    def tag(self) -> int:
        """Of the session in the row."""
        return int(self._words[_HEAD - 2].view(np.uint64))

    @property
    def consumer(self) -> int:
        """Who has claimed it."""
        return int(self._words[_HEAD - 1].view(np.uint64))

    def generations(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of ``blocks``, if generations from the least of them on were read."""
        found: npt.NDArray[np.int64] = self._words[_HEAD:][blocks - blocks.min()]
        return found


class NixlPeer:
    """One producer. Used by the fetcher's thread alone."""

    def __init__(self, pool: BlockMemory, name: str, options: NixlOptions, place: NixlPlace) -> None:
        """Connect to it.

        Args:
            pool: where its blocks go.
            name: of our agent; nobody else's, ever.
            options: ours.
            place: the producer's; authentic.

        Raises:
            PeerLost: it is not there.
            StartupError: nixl cannot be used.
        """
        self.place = place
        self.users = 0
        """Fetches."""
        self.needed = 0.0
        """When it was last."""
        self.lost = ""
        """Why nothing can be read there any more."""
        self.closed = False
        self._settled = 0
        self._unsaid = 0
        """Looks that are left for the last word."""
        self._pool = pool
        words = np.zeros((LANDINGS, _HEAD + place.num_blocks), np.int64)
        self._landings = [Landing(row) for row in words]
        self._reads: list[tuple[NixlRead, Landing | None]] = []
        """Under way; with each the landing that nobody waits for any more."""
        self._agent = NixlAgent(name, options)
        try:
            self._agent.register(pool.memory, words)
            self._agent.connect(place.metadata, place.instance_id)
        except BaseException:
            self._agent.close()
            raise

    def borrow(self) -> Landing | None:
        """A landing, or None while all are in use."""
        return self._landings.pop() if self._landings else None

    def give_back(self, landing: Landing, read: NixlRead | None) -> None:
        """The landing is not needed any more, once ``read``, which may still be under way, is over."""
        if read is None or all(each is not read for each, _ in self._reads):
            self._landings.append(landing)
        else:
            self._reads = [(each, landing if each is read else other) for each, other in self._reads]

    def say(self, word: Word) -> None:
        """Leave word; if that fails, the peer is lost."""
        if not self.lost:
            self._unsaid = WORD_ROUNDS
            try:
                self._agent.send(word.pack())
            except PeerLost as error:
                self.lost = str(error)

    def look(self, landing: Landing, slot: int, blocks: npt.NDArray[np.int64]) -> NixlRead:
        """Read the stamp, the session's row, and the generations from the least of ``blocks`` to the greatest."""
        place, at = self.place, landing.address
        local = [(at, STAMP_BYTES), (at + STAMP_BYTES, ROW_BYTES)]
        remote = [(place.table, STAMP_BYTES), (place.table + slot * ROW_BYTES, ROW_BYTES)]
        if len(blocks):
            first, last = int(blocks.min()), int(blocks.max())
            size = 8 * (last + 1 - first)
            local.append((at + 8 * _HEAD, size))
            remote.append((place.generations + 8 * first, size))
        return self._read(np.asarray(local, np.uint64), np.asarray(remote, np.uint64))

    def read(
        self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> NixlRead:
        """Read runs of blocks, [runs] each: first source, first target, how many; all inside both pools."""
        size = self.place.block_bytes
        starts = ((targets, self._pool.memory.ctypes.data), (sources, self.place.memory))
        lengths = (counts * size).astype(np.uint64)
        local, remote = (
            np.column_stack([np.uint64(base) + (firsts * size).astype(np.uint64), lengths]) for firsts, base in starts
        )
        return self._read(local, remote)

    def poll(self) -> bool:
        """Move on what is under way; whether anything is over that was not."""
        if self._unsaid and not self.lost:
            self._unsaid -= 1
            self._move()
        going = []
        for read, landing in self._reads:
            if read.poll() is ReadState.UNDER_WAY:
                going.append((read, landing))
            else:
                self._over(read)
                if landing is not None:
                    self._landings.append(landing)
        ended = len(going) < len(self._reads)
        self._reads = going
        return ended

    @property
    def busy(self) -> bool:
        """Whether a read is under way, or a word."""
        return bool(self._reads) or (self._unsaid > 0 and not self.lost)

    def settle(self) -> bool:
        """Move on what a lost connection has left; whether the agent may be closed.

        UCX ends the process when a worker is destroyed that still has pieces of failed READs queued. Each call works
        off all that there are; they come up while the connection is being taken apart.
        """
        self._move()
        self._settled += 1
        return not self._reads and self._settled >= SETTLE_ROUNDS

    def close(self) -> None:
        """Disconnect; it must have settled. From now on nothing that was read there touches our memory."""
        self._agent.close()
        self.closed = True

    def abandon(self) -> None:
        """Leave it as it is: the process is about to end."""
        self._agent.abandon()
        self.closed = True

    def _read(self, local: npt.NDArray[np.uint64], remote: npt.NDArray[np.uint64]) -> NixlRead:
        read = self._agent.read(local, remote)
        if read.state is ReadState.UNDER_WAY:
            self._reads.append((read, None))
        else:
            self._over(read)
        return read

    def _move(self) -> None:
        with contextlib.suppress(PeerLost):  # who reads or speaks next will hear of it
            self._agent.received()

    def _over(self, read: NixlRead) -> None:
        read.release()
        if read.state is ReadState.FAILED:
            self.lost = self.lost or read.reason
