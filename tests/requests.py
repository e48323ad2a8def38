"""Requests as the engine takes them, made by hand: the i-th item is a stretch of placeholders."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from triptych.core.adapter import AdapterInfo
from triptych.core.encoder_input import EncoderInput
from triptych.core.layout import Grid, ItemLayout, Positions, Run
from triptych.core.logprobs import LogprobOptions
from triptych.core.media import Modality
from triptych.core.plan import PositionRule, PromptPlan
from triptych.core.request import CacheOptions, Request, Sampling, Stopping, derived_seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PLACEHOLDER = 3
EOS = 2
MERGE = 4
"""Encoder tokens for each row."""


def content_key(picture: int) -> bytes:
    return picture.to_bytes(32, "big")


def item(
    picture: int, *runs: tuple[int, int], framing: Sequence[int] = (), encoder_tokens: int | None = None
) -> ItemLayout:
    """Layout of picture number ``picture`` over (start, length) runs."""
    rows = sum(length for _, length in runs) - len(framing)
    return ItemLayout(
        modality=Modality.IMAGE,
        runs=tuple(Run(*run) for run in runs),
        rows=rows,
        encoder_tokens=encoder_tokens or rows * MERGE,
        grid=Grid(1, 2, 2 * rows),
        content_key=content_key(picture),
        framing=tuple(framing),
    )


def request(
    request_id: str,
    tokens: Sequence[int],
    items: Iterable[ItemLayout] = (),
    *,
    sampling: Sampling | None = None,
    stopping: Stopping | None = None,
    cache: CacheOptions | None = None,
    eos: Iterable[int] = (EOS,),
    arrival: float = 0.0,
    priority: int = 0,
    logprobs: LogprobOptions | None = None,
    grammar: object = None,
    adapter: FakeAdapter | None = None,
    axes: int = 1,
    delta: int = 0,
) -> Request:
    """A request whose positions are its indices, shifted by ``delta`` after the prompt."""
    layouts = tuple(items)
    ids = np.array(tokens, np.int32)
    for layout in layouts:
        for run in layout.runs:
            ids[run.start : run.end] = PLACEHOLDER
        ids[list(layout.framing)] = PLACEHOLDER + 1
    return Request(
        request_id=request_id,
        plan=PromptPlan(ids, layouts, PositionRule.LINEAR, 1, bytes(32)),
        positions=Positions(np.tile(np.arange(len(ids), dtype=np.int32), (axes, 1)), delta),
        inputs=tuple(picture_input(layout) for layout in layouts),
        sampling=sampling or Sampling(temperature=0),
        stopping=stopping or Stopping(max_tokens=8),
        eos_token_ids=frozenset(eos),
        cache=cache or CacheOptions(),
        arrival=arrival,
        priority=priority,
        logprobs=logprobs or LogprobOptions(),
        grammar=grammar,
        adapter=adapter,
    )


def group(leader: Request, count: int) -> list[Request]:
    """The outputs of one client's request, as the engine takes them; the first keeps the name."""
    seed = leader.sampling.seed or 0
    return [leader] + [
        dataclasses.replace(
            leader,
            request_id=f"{leader.request_id}.{index}",
            sampling=dataclasses.replace(leader.sampling, seed=derived_seed(seed, index)),
        )
        for index in range(1, count)
    ]


@dataclass(frozen=True)
class FakeAdapter:
    """An adapter of which nothing is known but its names and its digest."""

    lora_id: int

    @property
    def info(self) -> AdapterInfo:
        return AdapterInfo(self.lora_id, f"adapter{self.lora_id}", f"/adapters/{self.lora_id}")

    @property
    def digest(self) -> bytes:
        return self.lora_id.to_bytes(32, "big")


def picture_input(layout: ItemLayout) -> EncoderInput:
    """Each patch is one row of four samples, which spell the picture's number."""
    number = int.from_bytes(layout.content_key, "big") % (1 << 20)
    spelt = np.frombuffer(number.to_bytes(4, "big"), np.uint8)
    patches = np.broadcast_to(spelt, (layout.encoder_tokens, 1, 1, 1, 4))
    return EncoderInput(layout, patches, np.zeros((1, 256), np.float32))


def picture_number(given: EncoderInput) -> int:
    """What the first patch spells."""
    return int.from_bytes(given.patches[0].tobytes(), "big")
