"""From the slices of a plan to the tensors of a packed batch.

The state of a request stays here from its start to its end: known tokens, block table, positions. What all
requests need in every step lies in arrays with one line for each request, so that a step in which everybody
decodes is a handful of gathers:

    line            0    1    2   ...
    tables          [blocks of the request, then 0]
    last            latest known token
    delta           position minus index, for tokens after the prompt
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from triptych.core.errors import Internal
from triptych.engine.sampler import Chooser
from triptych.models.contract import PackedBatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from triptych.core.config import SchedulerConfig
    from triptych.core.layout import ItemLayout
    from triptych.core.request import Request
    from triptych.core.step import TokenSlice
    from triptych.models.contract import TextSpec

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Built(NamedTuple):
    """A packed batch and which slice each of its sequences is."""

    batch: PackedBatch
    order: tuple[TokenSlice, ...]


class _Packed(NamedTuple):
    """Columns of the packed tokens."""

    token_ids: Ints
    """[T]."""
    positions: Ints
    """[axes, T]."""
    slots: Ints
    """[T]."""


class SequenceState:
    """What the runner knows about one request."""

    __slots__ = ("_rows_at", "chooser", "line", "prompt_len", "request", "tokens")

    def __init__(self, request: Request, line: int, capacity: int, vocab_size: int) -> None:
        self.request = request
        self.line = line
        self.prompt_len = len(request.plan)
        self.tokens = np.zeros(capacity, np.int64)
        """Known tokens by index, prompt first."""
        self.tokens[: self.prompt_len] = request.plan.token_ids
        self.chooser = Chooser(request, vocab_size)
        self._rows_at: dict[int, Ints] = {}

    def rows_at(self, item: int) -> Ints:
        """Ascending prompt positions that receive the item's rows: row ``i`` belongs to the ``i``-th of them."""
        positions = self._rows_at.get(item)
        if positions is None:
            positions = self._rows_at[item] = _row_positions(self.request.plan.items[item])
        return positions


def _row_positions(layout: ItemLayout) -> Ints:
    span = np.concatenate([np.arange(run.start, run.end, dtype=np.int64) for run in layout.runs])
    return np.setdiff1d(span, np.array(layout.framing, np.int64), assume_unique=True)


class BatchBuilder:
    """Keeps the states and packs the slices."""

    def __init__(self, spec: TextSpec, config: SchedulerConfig) -> None:
        lines = config.max_running_requests
        self._spec = spec
        self._block_size = config.block_size
        self._capacity = min(config.max_context, config.num_blocks * config.block_size)
        self._states: dict[str, SequenceState] = {}
        self._free = list(range(lines))
        self._tables = np.zeros((lines, -(-self._capacity // config.block_size)), np.int64)
        self._widths = [0] * lines
        """Blocks in each table."""
        self._last = np.zeros(lines, np.int64)
        self._delta = np.zeros(lines, np.int64)
        self._count = np.arange(lines + 1)

    def start(self, request: Request) -> None:
        """Make room for a request.

        At most ``max_running_requests`` have state: those that were preempted run again before new ones start.
        """
        line = self._free.pop()
        length = len(request.plan)
        limit = request.stopping.max_tokens
        capacity = self._capacity if limit is None else min(self._capacity, length + limit)
        self._states[request.request_id] = SequenceState(request, line, capacity, self._spec.vocab_size)
        self._tables[line] = 0
        self._widths[line] = 0
        self._last[line] = request.plan.token_ids[-1]
        self._delta[line] = request.positions.delta

    def end(self, request_id: str) -> None:
        """Drop a request's state."""
        self._free.append(self._states.pop(request_id).line)

    def state(self, request_id: str) -> SequenceState:
        """The state of a started request."""
        return self._states[request_id]

    def blocks(self, request_id: str) -> list[int]:
        """The block table of a started request."""
        line = self._states[request_id].line
        blocks: list[int] = self._tables[line, : self._widths[line]].tolist()
        return blocks

    def extend(self, piece: TokenSlice) -> None:
        """Enter the slice's new blocks into the table."""
        line = self._states[piece.request_id].line
        if piece.table_from == self._widths[line] and not piece.blocks:
            return
        width = piece.table_from + len(piece.blocks)
        self._tables[line, piece.table_from : width] = piece.blocks
        self._tables[line, width : self._widths[line]] = 0
        self._widths[line] = width

    def append(self, request_id: str, index: int, token: int) -> None:
        """Note the token that was sampled for sequence index ``index``."""
        state = self._states[request_id]
        if index < len(state.tokens):  # the last token of an answer is never computed
            state.tokens[index] = token
        self._last[state.line] = token
        state.chooser.observe(token)

    def build(self, pieces: Sequence[TokenSlice], rows: Mapping[bytes, torch.Tensor]) -> Built:
        """Pack the slices, single tokens first. ``rows`` holds the encoder rows by key.

        The logits of every slice's last token are wanted, sampled or not: they are finite only if all KV that the
        token attends to is, so a slice of broken numbers is found before anybody reads its blocks.
        """
        order, decodes, singles = self._order(pieces)
        lines = np.array([self._states[piece.request_id].line for piece in order], np.int64)
        begins = np.array([piece.start for piece in order], np.int64)
        contexts = tuple([piece.start + piece.length for piece in order])
        media_at: torch.Tensor | None = None
        media_rows: torch.Tensor | None = None
        if decodes == len(order):
            starts = self._count[: len(order) + 1]
            packed = self._gather(lines, begins)
        else:
            starts = np.cumsum([0, *(piece.length for piece in order)])
            packed = self._pack(order, starts, lines, begins, decodes)
            media_at, media_rows = self._media(order, starts, rows)
        widest = -(-max(contexts) // self._block_size)
        batch = PackedBatch(
            token_ids=self._tensor(packed.token_ids),
            positions=self._tensor(packed.positions),
            slots=self._tensor(packed.slots),
            starts=tuple(starts.tolist()),
            contexts=contexts,
            block_tables=self._tensor(self._tables[lines, :widest]),
            singles=singles,
            sample_at=self._tensor(starts[1:] - 1),
            media_at=media_at,
            media_rows=media_rows,
        )
        return Built(batch, order)

    def _gather(self, lines: Ints, indices: Ints) -> _Packed:
        """The latest tokens of some lines, at these indices of their sequences; all after the prompt."""
        blocks, offsets = np.divmod(indices, self._block_size)
        positions = np.empty((self._spec.position_axes, len(indices)), np.int64)
        positions[:] = indices + self._delta[lines]
        return _Packed(self._last[lines], positions, self._tables[lines, blocks] * self._block_size + offsets)

    def _pack(self, order: Sequence[TokenSlice], starts: Ints, lines: Ints, begins: Ints, decodes: int) -> _Packed:
        """All slices, as if every token were generated; then what belongs to a prompt is put right."""
        lengths = np.diff(starts)
        packed = self._gather(
            np.repeat(lines, lengths), np.arange(starts[-1]) + np.repeat(begins - starts[:-1], lengths)
        )
        for number in range(decodes, len(order)):
            piece = order[number]
            state = self._states[piece.request_id]
            at = int(starts[number])
            packed.token_ids[at : at + piece.length] = state.tokens[piece.start : piece.start + piece.length]
            planned = max(min(piece.length, state.prompt_len - piece.start), 0)
            table = state.request.positions.table
            packed.positions[:, at : at + planned] = table[:, piece.start : piece.start + planned]
        return packed

    def _order(self, pieces: Sequence[TokenSlice]) -> tuple[tuple[TokenSlice, ...], int, int]:
        """Slices in packed order, how many decode, how many are single tokens (those that decode come first)."""
        decodes, singles, longer = [], [], []
        for piece in pieces:
            if piece.length > 1:
                longer.append(piece)
            elif piece.start >= self._states[piece.request_id].prompt_len and piece.samples:
                decodes.append(piece)
            else:
                singles.append(piece)
        return (*decodes, *singles, *longer), len(decodes), len(decodes) + len(singles)

    def _media(
        self, order: Sequence[TokenSlice], starts: Ints, rows: Mapping[bytes, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Packed indices that take rows, and those rows; copied by the layout's mask, never by its span."""
        at: list[npt.NDArray[np.int64]] = []
        parts: list[torch.Tensor] = []
        for number, piece in enumerate(order):
            for item, key in piece.rows:
                positions = self._states[piece.request_id].rows_at(item)
                first, last = np.searchsorted(positions, (piece.start, piece.start + piece.length)).tolist()
                if first == last:
                    continue  # only framing of the item is in the slice
                at.append(positions[first:last] + (int(starts[number]) - piece.start))
                parts.append(rows[key][first:last])
        if not parts:
            return None, None
        if sum(map(len, parts)) != sum(map(len, at)):
            raise Internal("encoder rows and the positions that take them differ in number")
        return self._tensor(np.concatenate(at)), torch.cat(parts)

    def _tensor(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._spec.device)
