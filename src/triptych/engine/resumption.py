"""Prompts that another engine computed, on their way into this one.

    arrived --reserve--> loading --heard--> the outputs run, each with a table of its own
       |                    |
       +-leave-->           +-leave--> nobody waits; the blocks stay held until it is heard

Blocks that a transport may still write to belong to the resumption and to nobody else, whatever becomes of the
outputs that wait for it. Only what is heard of the load frees them.

All outputs of one request wait for one load. Its table is the prompt's; what a token after it needs is reserved too:

    table      [ found in the prefix cache ][ fetched ............ ][ fetched, partly filled ]
    outputs      each shares the full blocks;     the first writes behind the prompt in the last one,
                                                  the others in a copy of it; in a new block where all are full
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import IntegrityError
from triptych.core.step import Copy, Load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Items

    from triptych.core.handles import KvHandle
    from triptych.engine.blocks import BlockPool
    from triptych.engine.priority import Key
    from triptych.engine.sequence import Sequence


class Resumption:
    """One session and the outputs that go on from it."""

    __slots__ = ("found", "handle", "members", "number", "spares", "table")

    def __init__(self, number: int, handle: KvHandle, members: list[Sequence]) -> None:
        self.number = number
        """No other of this engine has it."""
        self.handle = handle
        self.members = members
        """Those that have not ended."""
        self.table: list[int] = []
        """Blocks of the prompt; none where no output goes on."""
        self.found = 0
        """Leading blocks of the table that came from the prefix cache."""
        self.spares: list[int] = []
        """Blocks for what comes after the prompt."""

    @property
    def key(self) -> Key:
        """Its place among all that wait."""
        return self.members[0].key

    def blocks(self, block_size: int) -> int:
        """How many it needs, found ones included."""
        first = self.members[0]
        going_on = sum(member.ending(first_token(member)) is None for member in self.members)
        return first.prompt_len // block_size + going_on if going_on else 0

    @property
    def load(self) -> Load:
        """What the transport has to do."""
        return Load(self.number, self.handle, tuple(enumerate(self.table))[self.found :])


class Landed(NamedTuple):
    """One output whose prompt is there."""

    sequence: Sequence
    blocks: list[int]
    """Its table; one reference on each is its own."""


def first_token(sequence: Sequence) -> int:
    """The token that a waiting output begins with."""
    resume = sequence.request.resume
    if resume is None:
        raise IntegrityError(f"request {sequence.request_id!r} waits for another engine's work and names none")
    return resume.token_id


class Resumptions:
    """All resumptions of one engine."""

    __slots__ = (
        *("_block_size", "_loads", "_made", "_pool"),
        *("arrived", "arriving", "by_id", "cancels", "copies", "held", "loading", "scrubs"),
    )

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._made = 0
        self._loads: dict[int, Resumption] = {}
        self.by_id: dict[str, Sequence] = {}
        """Every output that waits."""
        self.arrived: list[Resumption] = []
        """Those for which nothing is reserved."""
        self.arriving = 0
        """Their outputs."""
        self.loading = 0
        """All other outputs that wait."""
        self.held = 0
        """References on blocks."""
        self.cancels: list[int] = []
        """Loads that nobody waits for any more, for the next plan."""
        self.copies: list[Copy] = []
        """For the next plan."""
        self.scrubs: list[int] = []
        """Free blocks that may hold anything, for the next plan."""

    @property
    def loads(self) -> int:
        """How many are loading, waited for or not."""
        return len(self._loads)

    def arrive(self, members: Items[Sequence], handle: KvHandle) -> None:
        """Take new outputs that go on from one session."""
        resumption = Resumption(self._made, handle, list(members))
        self._made += 1
        self.arrived.append(resumption)
        self.arriving += len(members)
        for member in members:
            member.resumption = resumption
            self.by_id[member.request_id] = member

    def reserve(self, resumption: Resumption, found: list[int], missing: int) -> None:
        """Begin to load one that arrived, behind the ``found`` blocks.

        Raises:
            IntegrityError: there are fewer blocks than the caller counted.
        """
        self.arrived.remove(resumption)
        self._loads[resumption.number] = resumption
        self.arriving -= len(resumption.members)
        self.loading += len(resumption.members)
        self._pool.share(found)
        new = self._pool.allocate(missing)
        if new is None:
            raise IntegrityError(f"load {resumption.number}: blocks counted as available were not")
        blocks = [*found, *new]
        length = -(-resumption.members[0].prompt_len // self._block_size) if blocks else 0
        resumption.table, resumption.spares = blocks[:length], blocks[length:]
        resumption.found = len(found)
        self.held += len(blocks)

    def leave(self, sequence: Sequence) -> None:
        """An output ends while it waits. The load goes on as long as a transport may write."""
        resumption = self._detach(sequence)
        if not resumption.members:
            if resumption.number in self._loads:
                self.cancels.append(resumption.number)
            elif resumption in self.arrived:
                self.arrived.remove(resumption)

    def heard(self, number: int) -> Resumption:
        """The load has ended: nothing writes to its blocks any more. Its outputs land or leave next.

        Raises:
            IntegrityError: there is no such load.
        """
        resumption = self._loads.pop(number, None)
        if resumption is None:
            raise IntegrityError(f"load {number} ended, but is not under way")
        return resumption

    def land(self, resumption: Resumption) -> list[Landed]:
        """The outputs that are left of one that was heard, each with its table. What nobody took is given back."""
        landed = []
        for index, member in enumerate(tuple(resumption.members)):
            blocks = self._table(resumption, index, member.prompt_len // self._block_size)
            self._pool.share(blocks)
            member.unproven = tuple(blocks[resumption.found :])
            self._detach(member)
            landed.append(Landed(member, blocks))
        held = [*resumption.table, *resumption.spares]
        self._pool.release(held)
        self.held -= len(held)
        self.scrub(held[resumption.found :])
        return landed

    def scrub(self, blocks: Items[int]) -> None:
        """Of blocks that may hold anything, have those made finite that nobody holds."""
        self.scrubs += (block for block in blocks if not self._pool.holds(block))

    def settle(self) -> None:
        """What was for the next plan is in it."""
        self.cancels.clear()
        self.copies.clear()
        self.scrubs.clear()

    def references(self) -> Iterator[int]:
        """Every block of every load."""
        for resumption in self._loads.values():
            yield from resumption.table
            yield from resumption.spares

    def check_integrity(self) -> None:
        """Compare the ledger with itself.

        Raises:
            IntegrityError: naming the contradiction.
        """
        loading = [member for each in self._loads.values() for member in each.members]
        arriving = [member for each in self.arrived for member in each.members]
        if {member.request_id: member for member in (*loading, *arriving)} != self.by_id:
            raise IntegrityError("a request waits for a prompt that is not on its way, or for two")
        if (len(loading), len(arriving), sum(1 for _ in self.references())) != (self.loading, self.arriving, self.held):
            raise IntegrityError("requests that wait for another engine's prompt, or its blocks, are miscounted")

    def _table(self, resumption: Resumption, index: int, full: int) -> list[int]:
        """The blocks of the output at ``index``: the prompt's ``full`` ones and one of its own."""
        partly = resumption.table[full:]  # at most one
        if partly and index == 0:
            return resumption.table.copy()
        own = resumption.spares[index - len(partly)]
        self.copies += (Copy(block, own) for block in partly)
        return [*resumption.table[:full], own]

    def _detach(self, sequence: Sequence) -> Resumption:
        resumption = sequence.resumption
        if resumption is None:
            raise IntegrityError(f"request {sequence.request_id!r} waits for nothing")
        resumption.members.remove(sequence)
        sequence.resumption = None
        del self.by_id[sequence.request_id]
        if resumption in self.arrived:
            self.arriving -= 1
        else:
            self.loading -= 1
        return resumption
