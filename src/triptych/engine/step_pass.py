"""What one call of ``plan`` has decided so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.step import Store, TokenSlice

if TYPE_CHECKING:
    from triptych.core.request import Request
    from triptych.core.step import Load
    from triptych.engine.encoding import EncodePass, Selection
    from triptych.engine.leases import Lease
    from triptych.engine.sequence import Sequence


class StepPass:
    """The parts of a plan that requests make.

    Args:
        budget: tokens that may still be computed.
        encoder: the encoder's share.
        now: monotonic seconds.
        block_size: tokens of a KV block.
    """

    __slots__ = ("_block_size", "budget", "encoder", "loads", "now", "starts", "stores", "tokens")

    def __init__(self, budget: int, encoder: EncodePass, now: float, block_size: int) -> None:
        self._block_size = block_size
        self.budget = budget
        self.encoder = encoder
        self.now = now
        self.starts: list[Request] = []
        self.tokens: list[TokenSlice] = []
        self.loads: list[Load] = []
        self.stores: list[Store] = []

    def slice(self, sequence: Sequence, selection: Selection) -> None:
        """Compute the selected tokens of a running request."""
        if not sequence.started:
            sequence.started = True
            if sequence.first_scheduled is None:
                sequence.first_scheduled = self.now
            self.starts.append(sequence.request)
        length = selection.end - sequence.computed
        sent, blocks = sequence.sent, sequence.blocks
        self.tokens.append(
            TokenSlice(
                sequence.request_id,
                sequence.computed,
                length,
                sent,
                tuple(blocks[sent:]) if sent < len(blocks) else (),
                selection.rows,
                selection.end == sequence.known,
            )
        )
        sequence.sent = len(blocks)
        sequence.in_flight = True
        self.budget -= length
        if sequence.lease is not None:
            self._store(sequence, sequence.lease, selection.end)

    def _store(self, sequence: Sequence, lease: Lease, end: int) -> None:
        """Hand on the blocks that are full then; with the last token of the prompt all that are left, at least one."""
        seals = end == sequence.prompt_len
        ready = -(-end // self._block_size) if seals else end // self._block_size
        blocks = tuple(sequence.blocks[len(lease.blocks) : ready])
        if blocks:
            self.stores.append(Store(sequence.request_id, lease.session_id, blocks, not lease.open, seals))
