"""Sessions that fit the fake roles, as another engine would have made them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.drawings import shape_png
from tests.pictures_here import decode_picture
from tests.roles.fake_engine import LAYOUT, MODEL, frontend
from triptych.core.handles import Handle
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.media_options import PictureOptions
from triptych.core.request import GenerateRequest, Sampling, Stopping
from triptych.core.session import FirstToken, KvSession
from triptych.media.limits import RequestBudget
from triptych.processors.identity import prompt_digest

if TYPE_CHECKING:
    from triptych.core.plan import PromptPlan

RED, BLUE = shape_png("circle", "red"), shape_png("square", "blue", 97)
MARKER = "<|vision_start|><|image_pad|><|vision_end|>"


def media(*pngs: bytes) -> tuple[MediaItem, ...]:
    return tuple(MediaItem(Modality.IMAGE, RawBytes(png)) for png in pngs)


def folded(*pngs: bytes, text: str = "hello there") -> tuple[int, ...]:
    """A prompt as a client has it: a marker for each picture."""
    return tuple(frontend().tokenizer.encode(MARKER * len(pngs) + text))


def plan_of(*pngs: bytes, text: str = "hello there") -> PromptPlan:
    front = frontend()
    budget, fit = RequestBudget(front.limits), front.processor.picture_fit(PictureOptions())
    inputs = [
        front.processor.encoder_input(index, decode_picture(index, png, budget, fit=fit), bytes([index + 1]) * 32)
        for index, png in enumerate(pngs)
    ]
    return front.processor.plan(np.array(folded(*pngs, text=text), np.int32), inputs)[0]


def session(plan: PromptPlan | None, *, tokens: int | None = None, outputs: int = 1, **changes: Any) -> KvSession:
    """Of a prompt of ``tokens``, the plan's unless said otherwise."""
    count = tokens or len(plan or ())
    plain = KvSession(
        handle=Handle("s", "fake", "elsewhere", LAYOUT, -(-count // LAYOUT.block_size), b""),
        plan=plan,
        prompt=bytes(32) if plan is None else prompt_digest(plan),
        first=tuple(FirstToken(70 + index) for index in range(outputs)),
        seed=99,
        cached_prompt_tokens=16,
        model=MODEL,
        adapter=b"",
        expires_unix_nanos=time.time_ns() + 3600 * 10**9,
    )
    return replace(plain, **changes)


def going_on(one: KvSession, *pngs: bytes, **changes: Any) -> GenerateRequest:
    """The decode leg of a request."""
    plain = GenerateRequest(
        "r",
        "demo",
        folded(*pngs),
        sampling=Sampling(seed=3),
        stopping=Stopping(max_tokens=4),
        num_sequences=len(one.first),
        session=one,
    )
    return replace(plain, **changes)
