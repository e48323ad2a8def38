"""What a step costs besides the model: plan, pack, apply.

    python benchmarks/bookkeeping.py

Prints microseconds a step (median of many) while 1, 16 and 64 requests decode, with an empty queue and with a
thousand waiting requests behind them, and the same for the sampler over a vocabulary of Qwen's size.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from triptych.core.config import SchedulerConfig
from triptych.core.layout import Positions
from triptych.core.plan import PositionRule, PromptPlan
from triptych.core.request import CacheOptions, Request, Sampling, Stopping
from triptych.core.step import StepPlan, StepResult
from triptych.engine.batch import BatchBuilder
from triptych.engine.sampler import Chooser, Draw, choose_tokens
from triptych.engine.scheduler import Scheduler
from triptych.models.contract import TextSpec

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
VOCAB = 151_936
SPEC = TextSpec(
    vocab_size=VOCAB,
    hidden_size=256,
    layers=4,
    kv_heads=2,
    head_size=64,
    max_context=4096,
    position_axes=3,
    deepstack_levels=3,
    dtype=torch.float32,
    device=torch.device("cpu"),
)


def request(name: str, length: int, sampling: Sampling) -> Request:
    """A text prompt whose first token differs from every other's."""
    ids = np.arange(length, dtype=np.int32)
    ids[0] = abs(hash(name)) % 100_000
    return Request(
        request_id=name,
        plan=PromptPlan(ids, (), PositionRule.MROPE, 2, bytes(32)),
        positions=Positions(np.tile(np.arange(length, dtype=np.int32), (3, 1)), 0),
        inputs=(),
        sampling=sampling,
        stopping=Stopping(max_tokens=2000, ignore_eos=True),
        eos_token_ids=frozenset({2}),
        cache=CacheOptions(),
        arrival=0.0,
    )


class Timed:
    """Seconds of repeated calls, by stage."""

    def __init__(self) -> None:
        self.stages: dict[str, list[float]] = {}

    def __call__(self, stage: str, work: Callable[[], T]) -> T:
        """Do the work and note how long it took."""
        begin = time.perf_counter()
        result = work()
        self.stages.setdefault(stage, []).append(time.perf_counter() - begin)
        return result

    def medians(self) -> dict[str, float]:
        """Microseconds."""
        return {stage: 1e6 * statistics.median(times) for stage, times in self.stages.items()}


def decode_steps(running: int, waiting: int, steps: int = 400) -> dict[str, float]:
    """Median cost of each stage of a step in which everybody decodes."""
    config = SchedulerConfig(max_running_requests=running, num_blocks=64 * (running * 8 + 1), max_waiting_requests=2000)
    config = replace(config, max_batched_tokens=4096)
    scheduler, builder = Scheduler(config, row_bytes=4096), BatchBuilder(SPEC, config)
    for number in range(running + waiting):
        scheduler.add(request(f"r{number}", 40, Sampling(temperature=0)))
    timed = Timed()
    for number in range(steps):
        clock = timed if number > 20 else Timed()
        plan = clock("plan", lambda: scheduler.plan(0.0))
        for start in plan.starts:
            builder.start(start)
        clock("pack", lambda plan=plan: pack(builder, plan))
        sampled = {piece.request_id: 7 for piece in plan.tokens}
        clock("note", lambda plan=plan: note(builder, plan))
        clock("apply", lambda sampled=sampled: scheduler.apply(StepResult(sampled), 0.0))
    return timed.medians()


def pack(builder: BatchBuilder, plan: StepPlan) -> None:
    """What the runner does before the model."""
    for piece in plan.tokens:
        builder.extend(piece)
    builder.build(plan.tokens, {})


def note(builder: BatchBuilder, plan: StepPlan) -> None:
    """What the runner does after it."""
    for piece in plan.tokens:
        builder.append(piece.request_id, piece.start + piece.length, 7)


def sampling_cost(rows: int, sampling: Sampling, repeats: int = 15) -> float:
    """Median microseconds for one step's tokens."""
    # Zipf's law over shuffled ids: about as peaked as text.
    law = -1.5 * torch.arange(1, VOCAB + 1).log()
    shuffles = torch.Generator().manual_seed(0)
    logits = torch.stack([law[torch.randperm(VOCAB, generator=shuffles)] for _ in range(rows)])
    draws = [Draw(Chooser(request(f"s{row}", 40, replace(sampling, seed=row)), VOCAB), 40) for row in range(rows)]
    timed = Timed()
    for _ in range(repeats):
        copy = logits.clone()
        timed("sample", lambda copy=copy: choose_tokens(copy, draws))
    return timed.medians()["sample"]


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    print("running  waiting |   plan  apply   pack   note |  plan+apply per request   (microseconds)")
    for running, waiting in ((1, 0), (1, 1000), (16, 0), (16, 1000), (64, 0), (64, 1000)):
        cost = decode_steps(running, waiting)
        share = (cost["plan"] + cost["apply"]) / running
        stages = " ".join(f"{cost[stage]:6.1f}" for stage in ("plan", "apply", "pack", "note"))
        print(f"{running:7d}  {waiting:7d} | {stages} | {share:10.2f}")
    print(f"\nsampling, {VOCAB} tokens | rows=1  rows=16   (microseconds)")
    kinds = {
        "greedy": Sampling(temperature=0),
        "temperature": Sampling(),
        "top_k 20, top_p 0.8": Sampling(top_k=20, top_p=0.8),
        "top_p 0.95": Sampling(top_p=0.95, temperature=0.7),
        "greedy, penalties": Sampling(temperature=0, repetition_penalty=1.1, presence_penalty=0.5),
    }
    for name, sampling in kinds.items():
        print(f"{name:24s} | {sampling_cost(1, sampling):8.0f} {sampling_cost(16, sampling):8.0f}")


if __name__ == "__main__":
    main()
