"""KV sessions made by hand, and a way to compare them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from triptych.core.finish import EosToken, FinishReason
from triptych.core.handles import Handle, KvLayout
from triptych.core.layout import Grid, ItemLayout, Run
from triptych.core.logprobs import CandidateColumns, TokenLogprob
from triptych.core.media import Modality
from triptych.core.plan import PositionRule, PromptPlan
from triptych.core.session import FirstToken, KvSession

if TYPE_CHECKING:
    from collections.abc import Sequence

LAYOUT = KvLayout(layers=2, kv_heads=3, head_size=16, block_size=16, dtype="float32", itemsize=4)
PLACEHOLDER = 7
MERGE = 2


def picture(start: int, h: int, w: int, *, key: int = 1) -> ItemLayout:
    """A picture of h x w merged cells."""
    return ItemLayout(
        modality=Modality.IMAGE,
        runs=(Run(start, h * w),),
        rows=h * w,
        encoder_tokens=h * w * MERGE**2,
        grid=Grid(1, h * MERGE, w * MERGE),
        content_key=key.to_bytes(32, "big"),
    )


def video(start: int, steps: int, h: int, w: int, gap: int = 3) -> ItemLayout:
    """A clip with a run of h x w merged cells for each of its steps."""
    return ItemLayout(
        modality=Modality.VIDEO,
        runs=tuple(Run(start + step * (h * w + gap), h * w) for step in range(steps)),
        rows=steps * h * w,
        encoder_tokens=steps * h * w * MERGE**2,
        grid=Grid(steps, h * MERGE, w * MERGE),
        content_key=bytes(range(32)),
    )


def plan(
    length: int, *items: ItemLayout, rule: PositionRule = PositionRule.MROPE, merge: int = MERGE, fill: int = 100
) -> PromptPlan:
    """A prompt of counting ids with placeholders where items lie."""
    ids = np.arange(fill, fill + length, dtype=np.int32)
    for item in items:
        for run in item.runs:
            ids[run.start : run.end] = PLACEHOLDER
    ids.setflags(write=False)
    return PromptPlan(ids, items, rule, merge, bytes(range(1, 33)))


def logprob(*token_ids: int, own: float = -0.1) -> TokenLogprob:
    """Somebody's number, with candidates where ids are given."""
    if not token_ids:
        return TokenLogprob(own, 3)
    count = len(token_ids)
    columns = CandidateColumns(
        np.array(token_ids, np.int32),
        -np.arange(count, dtype=np.float32) / 3,
        np.arange(1, count + 1, dtype=np.int32),
    )
    return TokenLogprob(own, 1, columns)


FIRST = (
    FirstToken(5, logprob(5, 9, 11)),
    FirstToken(6, logprob()),
    FirstToken(2, None, FinishReason.STOP, EosToken(2)),
)


def session(
    prompt: PromptPlan | None = None, *, first: Sequence[FirstToken] = FIRST, blocks: int | None = None, **fields: Any
) -> KvSession:
    """A session of three outputs; ``blocks`` follows from the plan, 3 where there is none."""
    count = 3 if prompt is None else -(-len(prompt) // LAYOUT.block_size)
    handle = Handle("prefill-1/17", "memory", "engine-1", LAYOUT, blocks or count, b"\x00state\xff")
    made = KvSession(
        handle=handle,
        plan=prompt,
        prompt=bytes(range(50, 82)),
        first=tuple(first),
        seed=2**63 + 12345678901,
        cached_prompt_tokens=16,
        model=bytes(range(100, 132)),
        adapter=b"",
        expires_unix_nanos=1_790_000_000_123_456_789,
    )
    return dataclasses.replace(made, **fields)


def plain(value: Any) -> Any:
    """As values that can be compared: everything, with the types of the arrays."""
    match value:
        case np.ndarray():
            return str(value.dtype), value.tolist()
        case tuple():
            return type(value), [plain(part) for part in value]
        case _ if dataclasses.is_dataclass(value):
            return type(value), [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return value
