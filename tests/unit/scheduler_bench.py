"""A scheduler with a simulated runner, and requests for it."""

from __future__ import annotations

import dataclasses

from tests.requests import item, request
from tests.unit.simulation import ROW_BYTES, Heard, SimulatedRunner, answer_alone, run_all, step
from triptych.core.config import SchedulerConfig
from triptych.core.request import Stopping
from triptych.engine.scheduler import Scheduler

ROOMY = SchedulerConfig(
    max_batched_tokens=64,
    max_running_requests=8,
    max_context=256,
    block_size=4,
    num_blocks=64,
    encoder_items=8,
    encoder_tokens=1000,
    encoder_cache_bytes=1000,
)


class Bench:
    """A scheduler with a simulated runner and what was heard."""

    def __init__(self, *, kv_changes: bool = False, **changes: float) -> None:
        self.config = dataclasses.replace(ROOMY, **changes)
        self.scheduler = Scheduler(self.config, ROW_BYTES, kv_changes=kv_changes)
        self.runner = SimulatedRunner(self.config)
        self.heard = Heard()

    def add(self, *requests: object) -> None:
        for each in requests:
            self.scheduler.add([each])

    def step(self, now: float = 0.0) -> object:
        return step(self.scheduler, self.runner, self.heard, now)

    def lengths(self) -> dict[str, int]:
        """What one more step computes."""
        return {piece.request_id: piece.length for piece in self.step().tokens}

    def computed_prompt_tokens(self, length: int) -> int:
        """What was computed so far of prompts of this length."""
        pieces = [piece for plan in self.runner.plans for piece in plan.tokens]
        return sum(max(min(piece.start + piece.length, length) - piece.start, 0) for piece in pieces)

    def run(self) -> int:
        return run_all(self.scheduler, self.runner, self.heard)

    def alone(self, made: object) -> list[int]:
        return answer_alone(made, min(self.config.max_context, self.config.num_blocks * self.config.block_size))


def text(name: str, length: int, tokens: int = 8, *, first: int = 10, **options: object) -> object:
    return request(
        name,
        [first, *range(20, 19 + length)],
        stopping=Stopping(max_tokens=tokens, ignore_eos=True),
        **options,
    )


def pictures(
    name: str, *rows: int, gap: int = 1, tail: int = 2, tokens: int = 3, start: int = 100, cost: int = 4
) -> object:
    """Pictures start, start + 1, ... of so many rows, with ``gap`` text tokens before each."""
    items, at = [], 0
    for number, count in enumerate(rows):
        at += gap
        items.append(item(start + number, (at, count), encoder_tokens=count * cost))
        at += count
    return request(name, [10] * (at + tail), items, stopping=Stopping(max_tokens=tokens, ignore_eos=True))
