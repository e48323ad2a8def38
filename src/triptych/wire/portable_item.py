"""One media item's layout as bytes that travel: an encoder engine hands it to prefill inside the reference.

    bytes   = head | runs | framing | times
    head    = version, modality, whether there are times, grid, encoder tokens, counts of runs and framing, content
              key, fingerprint
    runs    = for each: positions between it and the run before it, length
    framing = positions
    times   = seconds, one for each step of the grid, or none

An item begins at position 0, whichever prompt it will be placed in. Nothing that follows from the rest is written:
rows follow from runs and framing.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from triptych.core.errors import IntegrityError, InvalidRequest
from triptych.core.layout import MAX_SECONDS, Grid, ItemLayout, Run
from triptych.wire.modality import MODALITIES, NUMBERS
from triptych.wire.portable_plan import FINGERPRINT_BYTES, MAX_PLAN_TOKENS

MAX_ITEM_RUNS = 4096
"""A video has one for each time step."""
MAX_ITEM_FRAMING = 4096
MAX_ITEM_TIMES = 4096

_VERSION = 2
_HEAD = struct.Struct("<BBB3IIII32s32s")
_TIME_BYTES = 8
_MAX_INT32 = 2**31 - 1


class PortableItem(NamedTuple):
    """What is said of an item beside where its rows are."""

    layout: ItemLayout
    """Its runs begin at position 0."""
    fingerprint: bytes
    """32 bytes: model revision and processor settings."""


class _Head(NamedTuple):
    """What stands first."""

    version: int
    modality: int
    timed: int
    """0 or 1."""
    t: int
    h: int
    w: int
    encoder_tokens: int
    runs: int
    framing: int
    key: bytes
    fingerprint: bytes

    @property
    def times(self) -> int:
        """How many there are."""
        return self.timed * self.t

    @property
    def size(self) -> int:
        """Of the whole, in bytes."""
        return _HEAD.size + 4 * (2 * self.runs + self.framing) + _TIME_BYTES * self.times


def encode_item(item: PortableItem) -> bytes:
    """Write an item, wherever its runs begin.

    Raises:
        InvalidRequest: a count is beyond its limit.
    """
    layout = item.layout
    if len(item.fingerprint) != FINGERPRINT_BYTES:
        raise IntegrityError(f"an item's fingerprint has {len(item.fingerprint)} bytes, not {FINGERPRINT_BYTES}")
    head = _Head(
        _VERSION,
        NUMBERS[layout.modality],
        int(bool(layout.times)),
        *layout.grid,
        layout.encoder_tokens,
        len(layout.runs),
        len(layout.framing),
        layout.content_key,
        item.fingerprint,
    )
    _check_counts(head)
    _check_end(layout.end - layout.start)
    numbers: list[int] = []
    end = layout.start
    for run in layout.runs:
        numbers += (run.start - end, run.length)
        end = run.end
    numbers += (position - layout.start for position in layout.framing)
    return _HEAD.pack(*head) + struct.pack(f"<{len(numbers)}I{head.times}d", *numbers, *layout.times)


def decode_item(data: bytes) -> PortableItem:
    """Read an item.

    Raises:
        InvalidRequest: it is of another version, malformed or contradicts itself.
    """
    if not data:
        raise InvalidRequest("it is empty")
    if data[0] != _VERSION:
        raise InvalidRequest(f"its version is {data[0]}; {_VERSION} is known here")
    if len(data) < _HEAD.size:
        raise InvalidRequest("it is cut short")
    head = _Head(*_HEAD.unpack_from(data))
    _check_counts(head)
    if len(data) != head.size:
        raise InvalidRequest(f"it has {len(data)} bytes, and its counts say {head.size}")
    if head.modality not in MODALITIES:
        raise InvalidRequest(f"its modality is number {head.modality}")
    for name in ("t", "h", "w", "encoder_tokens"):
        if not 1 <= getattr(head, name) <= _MAX_INT32:
            raise InvalidRequest(f"its {name} must be in [1, 2^31), not {getattr(head, name)}")
    count = 2 * head.runs + head.framing
    numbers = struct.unpack_from(f"<{count}I", data, _HEAD.size)
    times = struct.unpack_from(f"<{head.times}d", data, _HEAD.size + 4 * count)
    runs = _runs(numbers[0 : 2 * head.runs : 2], numbers[1 : 2 * head.runs : 2])
    return PortableItem(_layout(head, runs, numbers[2 * head.runs :], times), head.fingerprint)


def _check_counts(head: _Head) -> None:
    if not 1 <= head.runs <= MAX_ITEM_RUNS:
        raise InvalidRequest(f"it has {head.runs} runs; it must have between 1 and {MAX_ITEM_RUNS}")
    if head.framing > MAX_ITEM_FRAMING:
        raise InvalidRequest(f"it has {head.framing} framing positions; at most {MAX_ITEM_FRAMING}")
    if head.timed > 1:
        raise InvalidRequest(f"whether it has times is said by {head.timed}, which is neither 0 nor 1")
    if head.times > MAX_ITEM_TIMES:
        raise InvalidRequest(f"it has {head.times} times; at most {MAX_ITEM_TIMES}")


def _check_end(end: int) -> None:
    if end > MAX_PLAN_TOKENS:
        raise InvalidRequest(f"it reaches over {end} positions; at most {MAX_PLAN_TOKENS}")


def _runs(gaps: tuple[int, ...], lengths: tuple[int, ...]) -> tuple[Run, ...]:
    if gaps[0]:
        raise InvalidRequest(f"its runs begin at {gaps[0]}, not at 0")
    runs: list[Run] = []
    end = 0
    for gap, length in zip(gaps, lengths, strict=True):
        if not length:
            raise InvalidRequest(f"its run {len(runs)} is empty")
        runs.append(Run(end + gap, length))
        end = runs[-1].end
    _check_end(end)
    return tuple(runs)


def _layout(head: _Head, runs: tuple[Run, ...], framing: tuple[int, ...], times: tuple[float, ...]) -> ItemLayout:
    if not all(0 <= at <= MAX_SECONDS for at in times):
        raise InvalidRequest(f"its times must be from 0 to {MAX_SECONDS:.0f} seconds")
    try:
        return ItemLayout(
            modality=MODALITIES[head.modality],
            runs=runs,
            rows=sum(run.length for run in runs) - len(framing),
            encoder_tokens=head.encoder_tokens,
            grid=Grid(head.t, head.h, head.w),
            content_key=head.key,
            framing=framing,
            times=times,
        )
    except InvalidRequest:  # of all its rules these are not checked above; it would list every position
        raise InvalidRequest("its framing positions must ascend, lie inside its runs and leave it a row") from None
