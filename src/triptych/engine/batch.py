"""From the slices of a plan to the tensors of a packed batch.

The state of a request stays here from its start to its end: known tokens, block table, positions. What all
requests need in every step lies in arrays with one line for each request, so that a step in which everybody
decodes is a handful of gathers:

    line            0    1    2   ...
    tables          [blocks of the request, then its first one again and again]
    last            latest known token
    delta           position minus index, for tokens after the prompt

Wanted rows of a batch of S slices, in this order:

    0 .................... S ............................................. R
    [ last token of each   ][ tokens before those prompt tokens whose log   ]
    [ slice, packed order  ][ probability is wanted: slice by slice         ]

A token may be in both regions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from triptych.core.errors import Internal
from triptych.engine.sampler import Chooser
from triptych.models.contract import AdapterUse, PackedBatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from triptych.core.adapter import Adapter
    from triptych.core.config import SchedulerConfig
    from triptych.core.layout import ItemLayout
    from triptych.core.request import Request
    from triptych.core.step import TokenSlice
    from triptych.models.contract import TextSpec

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class PromptRows(NamedTuple):
    """Which prompt tokens of one slice get a log probability: indices ``[first, end)`` of the prompt, at least one."""

    request_id: str
    first: int
    end: int


class Built(NamedTuple):
    """A packed batch, which slice each of its sequences is, and whose the wanted rows behind those are."""

    batch: PackedBatch
    order: tuple[TokenSlice, ...]
    prompts: tuple[PromptRows, ...]


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

    __slots__ = ("_rows_at", "answered", "chooser", "line", "prompt_len", "request", "tokens")

    def __init__(self, request: Request, line: int, capacity: int, vocab_size: int) -> None:
        self.request = request
        self.line = line
        self.prompt_len = len(request.plan)
        self.tokens = np.zeros(capacity, np.int64)
        """Known tokens by index, prompt first."""
        self.tokens[: self.prompt_len] = request.plan.token_ids
        self.answered = False
        """Whether the first token is known. The log probabilities of the prompt are then given, and not again."""
        self.chooser = Chooser(request, vocab_size)
        self._rows_at: dict[int, Ints] = {}

    def predicted(self, piece: TokenSlice) -> PromptRows | None:
        """The prompt tokens whose log probability is wanted and whose predecessors are in the slice."""
        options = self.request.logprobs
        if not options.prompt or self.answered:
            return None
        first = max(piece.start + 1, options.prompt_start)
        end = min(piece.start + piece.length + 1, self.prompt_len)
        return PromptRows(piece.request_id, first, end) if first < end else None

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
        """A batch has at most ``max_running_requests`` slices, however many lines there are."""
        self._adapted = 0
        """States whose request has an adapter."""

    def start(self, request: Request) -> None:
        """Make room for a request.

        At most ``max_running_requests`` are in a batch, but those that were preempted keep their state while others,
        more urgent, start: the bound is the number of live requests, which running and waiting requests bound
        together. Lines are doubled when they are used up, and are not given back.
        """
        if not self._free:
            self._add_lines(len(self._widths))
        line = self._free.pop()
        length = len(request.plan)
        limit = request.stopping.max_tokens
        capacity = self._capacity if limit is None else min(self._capacity, length + limit)
        self._states[request.request_id] = SequenceState(request, line, capacity, self._spec.vocab_size)
        self._tables[line] = 0
        self._widths[line] = 0
        self._last[line] = request.plan.token_ids[-1]
        self._delta[line] = request.positions.delta
        self._adapted += request.adapter is not None

    def _add_lines(self, count: int) -> None:
        lines = len(self._widths)
        self._free += range(lines, lines + count)
        self._tables = np.pad(self._tables, ((0, count), (0, 0)))
        self._widths += [0] * count
        self._last = np.pad(self._last, (0, count))
        self._delta = np.pad(self._delta, (0, count))

    def end(self, request_id: str) -> None:
        """Drop a request's state."""
        state = self._states.pop(request_id)
        self._free.append(state.line)
        self._adapted -= state.request.adapter is not None

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
        if piece.table_from == 0 or width < self._widths[line]:
            self._tables[line, width:] = self._tables[line, 0]
        self._widths[line] = width

    def append(self, request_id: str, index: int, token: int) -> None:
        """Note the token that was sampled for sequence index ``index``.

        Raises:
            InvalidRequest: the request's grammar refuses it; nothing was noted.
            Internal: the request's grammar failed; likewise.
        """
        state = self._states[request_id]
        state.chooser.observe(token)
        self._note(state, index, token)

    def resume(self, request_id: str, token: int) -> None:
        """Note the first token of a started request, which another engine sampled.

        Raises:
            InvalidRequest: the request's grammar refuses it; nothing was noted.
            Internal: the request's grammar failed; likewise.
        """
        state = self._states[request_id]
        state.chooser.resume(token)
        self._note(state, state.prompt_len, token)

    def _note(self, state: SequenceState, index: int, token: int) -> None:
        if index < len(state.tokens):  # the last token of an answer is never computed
            state.tokens[index] = token
        self._last[state.line] = token
        state.answered = True

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
        prompts: list[PromptRows] = []
        before: list[Ints] = []
        if decodes == len(order):
            starts = self._count[: len(order) + 1]
            packed = self._gather(lines, begins)
        else:
            starts = np.cumsum([0, *(piece.length for piece in order)])
            packed = self._pack(order, starts, lines, begins, decodes)
            media_at, media_rows = self._media(order, starts, rows)
            for number in range(decodes, len(order)):
                predicted = self._states[order[number].request_id].predicted(order[number])
                if predicted is not None:
                    prompts.append(predicted)
                    before.append(np.arange(predicted.first - 1, predicted.end - 1) - begins[number] + starts[number])
        widest = -(-max(contexts) // self._block_size)
        batch = PackedBatch(
            token_ids=self._tensor(packed.token_ids),
            positions=self._tensor(packed.positions),
            slots=self._tensor(packed.slots),
            starts=tuple(starts.tolist()),
            contexts=contexts,
            block_tables=self._tensor(self._tables[lines, :widest]),
            singles=singles,
            sample_at=self._tensor(np.concatenate([starts[1:] - 1, *before])),
            media_at=media_at,
            media_rows=media_rows,
            adapters=self._adapters(order, starts) if self._adapted else (),
        )
        return Built(batch, order, tuple(prompts))

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

    def _adapters(self, order: Sequence[TokenSlice], starts: Ints) -> tuple[AdapterUse, ...]:
        """The packed indices of each adapter. Equal digests are one adapter, loaded twice."""
        uses: dict[bytes, tuple[Adapter, list[Ints]]] = {}
        for number, piece in enumerate(order):
            adapter = self._states[piece.request_id].request.adapter
            if adapter is not None:
                _, parts = uses.setdefault(adapter.digest, (adapter, []))
                parts.append(np.arange(starts[number], starts[number + 1]))
        return tuple(AdapterUse(adapter, self._tensor(np.concatenate(parts))) for adapter, parts in uses.values())

    def _tensor(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._spec.device)
