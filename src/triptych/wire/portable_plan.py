"""A PromptPlan as text that travels: prefill hands it to decode inside the session.

    text    = base64(head | zlib(body))
    head    = version, rule, counts of everything in the body, merge, fingerprint
    body    = items | run starts | run lengths | framing positions | token ids

The counts stand in the open, so that limits hold before anything is unpacked and the body has exactly one size. Token
ids lie as four planes, all lowest bytes first: that compresses best of what is fast. Nothing that follows from
the rest is written: rows follow from runs and framing, positions from grids and runs.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from triptych.core.errors import IntegrityError, InvalidRequest
from triptych.core.layout import Grid, ItemLayout, Run
from triptych.core.plan import PositionRule, PromptPlan
from triptych.wire.base64_text import from_base64, to_base64
from triptych.wire.modality import MODALITIES, NUMBERS

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_PLAN_CHARACTERS = 2 * 1024 * 1024
"""Of the text."""
MAX_PLAN_TOKENS = 1 << 20
MAX_ITEMS = 1024
MAX_RUNS = 1 << 14
"""Of all items together; a video has one for each time step."""
MAX_FRAMING = 1 << 16
MAX_MERGE = 256
FINGERPRINT_BYTES = 32

_VERSION = 1
_HEAD = struct.Struct("<BBIIIIH32s")
_ITEM = np.dtype(
    [
        ("modality", "u1"),
        ("grid", "<u4", 3),
        ("encoder_tokens", "<u4"),
        ("runs", "<u4"),
        ("framing", "<u4"),
        ("key", "V32"),
    ]
)
_RULES = {1: PositionRule.LINEAR, 2: PositionRule.MROPE}
_RULE_NUMBERS = {rule: number for number, rule in _RULES.items()}
_MAX_INT32 = 2**31 - 1
_FASTEST = 1
"""Of zlib's levels; the highest saves 4 % of the bytes for three times the time."""


class _Head(NamedTuple):
    """What stands before the body."""

    version: int
    rule: int
    tokens: int
    items: int
    runs: int
    framing: int
    merge: int
    fingerprint: bytes

    @property
    def body_bytes(self) -> int:
        """Size of the body, unpacked."""
        return self.items * _ITEM.itemsize + 4 * (2 * self.runs + self.framing + self.tokens)

    @property
    def fits(self) -> bool:
        """Whether the counts are within what is read."""
        return (
            self.tokens <= MAX_PLAN_TOKENS
            and self.items <= MAX_ITEMS
            and self.runs <= MAX_RUNS
            and self.framing <= MAX_FRAMING
        )


class _Columns(NamedTuple):
    """The body, unpacked; I items, R runs, F framing positions, T tokens."""

    items: npt.NDArray[np.void]
    starts: npt.NDArray[np.int64]
    """[R]; an item's follow one another."""
    ends: npt.NDArray[np.int64]
    """[R], one past the last."""
    framing: npt.NDArray[np.int64]
    """[F]; an item's follow one another."""
    token_ids: npt.NDArray[np.uint32]
    """[T]."""


def encode_plan(plan: PromptPlan) -> str | None:
    """Write a plan; None where the text would be longer than ``MAX_PLAN_CHARACTERS``, or a count beyond its limit."""
    if len(plan.fingerprint) != FINGERPRINT_BYTES:
        raise IntegrityError(f"a plan's fingerprint has {len(plan.fingerprint)} bytes, not {FINGERPRINT_BYTES}")
    head = _Head(
        version=_VERSION,
        rule=_RULE_NUMBERS[plan.rule],
        tokens=len(plan),
        items=len(plan.items),
        runs=sum(len(item.runs) for item in plan.items),
        framing=sum(len(item.framing) for item in plan.items),
        merge=plan.spatial_merge,
        fingerprint=plan.fingerprint,
    )
    if not head.fits:
        return None
    packed = zlib.compress(_body(plan), _FASTEST)
    data = _HEAD.pack(*head) + packed
    text = to_base64(data)
    return text if len(text) <= MAX_PLAN_CHARACTERS else None


def _body(plan: PromptPlan) -> bytes:
    items = np.array(
        [
            (
                NUMBERS[item.modality],
                tuple(item.grid),
                item.encoder_tokens,
                len(item.runs),
                len(item.framing),
                item.content_key,
            )
            for item in plan.items
        ],
        dtype=_ITEM,
    )
    runs = np.array([run for item in plan.items for run in item.runs], dtype="<u4").reshape(-1, 2)
    framing = np.array([position for item in plan.items for position in item.framing], dtype="<u4")
    planes = plan.token_ids.astype("<u4").view(np.uint8).reshape(-1, 4).T
    return b"".join(part.tobytes() for part in (items, runs.T, framing, planes))


def decode_plan(text: str) -> PromptPlan | None:
    """Read a plan; None where it is of a version that is not known here.

    Raises:
        InvalidRequest: it claims to be of a version that is, and is malformed or contradicts itself; says where.
    """
    if len(text) > MAX_PLAN_CHARACTERS:
        raise InvalidRequest(f"the plan has {len(text)} characters; at most {MAX_PLAN_CHARACTERS}")
    data = from_base64(text)
    if not data:
        raise InvalidRequest("the plan is empty")
    if data[0] != _VERSION:
        return None
    if len(data) < _HEAD.size:
        raise InvalidRequest("the plan is cut short")
    head = _Head(*_HEAD.unpack_from(data))
    _check_head(head)
    columns = _columns(head, _unpack(head, data[_HEAD.size :]))
    _check_items(columns.items)
    _check_counts(head, columns.items)
    _check_runs(head, columns)
    _check_framing(columns)
    if (columns.token_ids > _MAX_INT32).any():
        raise InvalidRequest(f"token id {columns.token_ids.max()} is beyond 2^31")
    return _plan(head, columns)


def _check_head(head: _Head) -> None:
    limits = {"tokens": MAX_PLAN_TOKENS, "items": MAX_ITEMS, "runs": MAX_RUNS, "framing": MAX_FRAMING}
    for name, most in limits.items():
        if getattr(head, name) > most:
            raise InvalidRequest(f"the plan has {getattr(head, name)} {name}; at most {most}")
    if not head.tokens:
        raise InvalidRequest("the plan has no tokens")
    if head.rule not in _RULES:
        raise InvalidRequest(f"the plan's position rule is number {head.rule}; known are {list(_RULES)}")
    if not 1 <= head.merge <= MAX_MERGE:
        raise InvalidRequest(f"the plan's merge must be in [1, {MAX_MERGE}], not {head.merge}")


def _unpack(head: _Head, packed: bytes) -> bytes:
    """The body; never more memory than the counts say."""
    stream = zlib.decompressobj()
    try:
        body = stream.decompress(packed, head.body_bytes + 1)
    except zlib.error:
        raise InvalidRequest("the plan's body cannot be unpacked") from None
    if len(body) != head.body_bytes or not stream.eof:
        raise InvalidRequest(f"the plan's body is not of the {head.body_bytes} bytes that its counts say")
    if stream.unused_data:
        raise InvalidRequest(f"{len(stream.unused_data)} bytes follow the plan")
    return body


def _columns(head: _Head, body: bytes) -> _Columns:
    items = np.frombuffer(body, _ITEM, head.items)
    at = items.nbytes
    numbers = np.frombuffer(body, "<u4", 2 * head.runs + head.framing, at).astype(np.int64)
    starts, lengths, framing = np.split(numbers, (head.runs, 2 * head.runs))
    planes = np.frombuffer(body, np.uint8, 4 * head.tokens, at + 4 * len(numbers)).reshape(4, -1)
    token_ids = np.ascontiguousarray(planes.T).view("<u4").reshape(-1)
    return _Columns(items, starts, starts + lengths, framing, token_ids)


def _check_items(items: npt.NDArray[np.void]) -> None:
    for name, column in (("grid", items["grid"].reshape(-1, 3)), ("encoder tokens", items["encoder_tokens"][:, None])):
        outside = (column < 1) | (column > _MAX_INT32)
        if outside.any():
            raise InvalidRequest(f"media item {outside.any(axis=1).argmax()}: {name} must be in [1, 2^31)")
    unknown = ~np.isin(items["modality"], list(MODALITIES))
    if unknown.any():
        index = int(unknown.argmax())
        raise InvalidRequest(f"media item {index}: modality is number {items['modality'][index]}")
    if (items["runs"] < 1).any():
        raise InvalidRequest(f"media item {(items['runs'] < 1).argmax()}: it has no runs")


def _check_counts(head: _Head, items: npt.NDArray[np.void]) -> None:
    for name in ("runs", "framing"):
        count = int(items[name].sum(dtype=np.int64))
        if count != getattr(head, name):
            raise InvalidRequest(f"the items have {count} {name} together, the plan {getattr(head, name)}")


def _check_runs(head: _Head, columns: _Columns) -> None:
    """All runs of all items ascend, and lie apart and inside the prompt."""
    owners = np.repeat(np.arange(len(columns.items)), columns.items["runs"])
    before = np.concatenate(([0], columns.ends[:-1])) if len(owners) else columns.ends
    wrong = (columns.starts < before) | (columns.ends <= columns.starts) | (columns.ends > head.tokens)
    if wrong.any():
        at = int(wrong.argmax())
        raise InvalidRequest(
            f"media item {owners[at]}: a run at {columns.starts[at]}..{columns.ends[at]} is empty, begins before the "
            f"end of the run before it, or lies outside the prompt of {head.tokens} tokens"
        )


def _check_framing(columns: _Columns) -> None:
    """Framing positions ascend and lie inside runs of their own item, and leave it a row."""
    count = len(columns.items)
    run_owners = np.repeat(np.arange(count), columns.items["runs"])
    owners = np.repeat(np.arange(count), columns.items["framing"])
    framing = columns.framing
    if len(framing):
        run = np.searchsorted(columns.starts, framing, side="right") - 1
        wrong = (run < 0) | (framing >= columns.ends[run]) | (run_owners[run] != owners)
        wrong[1:] |= framing[1:] <= framing[:-1]
        if wrong.any():
            at = int(wrong.argmax())
            raise InvalidRequest(f"media item {owners[at]}: framing position {framing[at]} is out of order or its runs")
    spans = np.bincount(run_owners, columns.ends - columns.starts, count)
    empty = spans <= columns.items["framing"]
    if empty.any():
        raise InvalidRequest(f"media item {empty.argmax()}: its runs hold framing only")


def _plan(head: _Head, columns: _Columns) -> PromptPlan:
    rule = _RULES[head.rule]
    runs = list(map(Run, columns.starts.tolist(), (columns.ends - columns.starts).tolist()))
    framing = columns.framing.tolist()
    run_at, framing_at = 0, 0
    items = []
    for index, row in enumerate(columns.items):
        own = tuple(runs[run_at : run_at + int(row["runs"])])
        frames = tuple(framing[framing_at : framing_at + int(row["framing"])])
        run_at, framing_at = run_at + len(own), framing_at + len(frames)
        item = ItemLayout(
            modality=MODALITIES[int(row["modality"])],
            runs=own,
            rows=sum(run.length for run in own) - len(frames),
            encoder_tokens=int(row["encoder_tokens"]),
            grid=Grid(*row["grid"].tolist()),
            content_key=row["key"].tobytes(),
            framing=frames,
        )
        if rule is PositionRule.MROPE and item.cells(head.merge) is None:
            grid = " x ".join(map(str, item.grid))
            raise InvalidRequest(f"media item {index}: its runs do not hold the grid {grid} merged by {head.merge}")
        items.append(item)
    token_ids = columns.token_ids.astype(np.int32)
    token_ids.setflags(write=False)
    return PromptPlan(token_ids, tuple(items), rule, head.merge, head.fingerprint)
