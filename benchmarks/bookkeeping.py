"""What a step costs besides the model: plan, pack, apply.

    python benchmarks/bookkeeping.py [steps] [queue] [sampling]

``steps``: microseconds of each stage of a step (median of many) while 1, 16 and 64 requests decode.
``queue``: the same of plan and apply with nobody, a thousand and ten thousand requests of mixed priorities in the
queue, while nobody ends, and while every step ends one of 64, takes the next from the queue, and sees one arrive and
one leave. ``sampling``: the sampler over a vocabulary of Qwen's size.
"""

from __future__ import annotations

import argparse
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
RUNNING = 64
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


def request(name: str, length: int, sampling: Sampling, priority: int = 0, tokens: int = 2000) -> Request:
    """A text prompt whose first token differs from every other's."""
    ids = np.arange(length, dtype=np.int32)
    ids[0] = abs(hash(name)) % 100_000
    return Request(
        request_id=name,
        plan=PromptPlan(ids, (), PositionRule.MROPE, 2, bytes(32)),
        positions=Positions(np.tile(np.arange(length, dtype=np.int32), (3, 1)), 0),
        inputs=(),
        sampling=sampling,
        stopping=Stopping(max_tokens=tokens, ignore_eos=True),
        eos_token_ids=frozenset({2}),
        cache=CacheOptions(),
        arrival=0.0,
        priority=priority,
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


def decode_steps(running: int, steps: int = 400) -> dict[str, float]:
    """Median cost of each stage of a step in which everybody decodes."""
    config = SchedulerConfig(max_running_requests=running, num_blocks=64 * (running * 8 + 1), max_batched_tokens=4096)
    scheduler, builder = Scheduler(config, row_bytes=4096), BatchBuilder(SPEC, config)
    for number in range(running):
        scheduler.add([request(f"r{number}", 40, Sampling(temperature=0))])
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


class Crowd:
    """A scheduler with 64 running requests and ``waiting`` more, kept at that number.

    Args:
        waiting: Requests in the queue.
        turnover: Whether answers are short: about one ends in each step, and one starts.
    """

    def __init__(self, waiting: int, *, turnover: bool) -> None:
        config = SchedulerConfig(
            max_running_requests=RUNNING,
            num_blocks=RUNNING * 256,
            max_batched_tokens=4096,
            max_waiting_requests=waiting + RUNNING,
        )
        self._scheduler = Scheduler(config, row_bytes=4096, kv_changes=True)
        self._turnover = turnover
        self._live = RUNNING + waiting
        self._made = 0
        self._queued: dict[str, None] = {}
        self._timed = Timed()
        for number in range(RUNNING):
            # Lengths apart, or all of them would end in one step.
            self._add(1 + number if turnover else 2000)
        self._step(Timed())
        self._fill(Timed())

    def measure(self, steps: int = 400) -> dict[str, float]:
        """Median microseconds of plan, apply, and of what comes between steps: add and abort."""
        for number in range(steps):
            timed = self._timed if number > 20 else Timed()
            self._step(timed)
            if self._queued:
                name = next(reversed(self._queued))  # nearly always one that still waits
                timed("abort", lambda name=name: self._scheduler.abort(name, 0.0))
                self._queued.pop(name, None)
            self._fill(timed)
        return self._timed.medians()

    def _fill(self, timed: Timed) -> None:
        load = self._scheduler.load()
        for _ in range(self._live - load.running_requests - load.queued_requests):
            timed("add", lambda: self._add(RUNNING if self._turnover else 2000))

    def _add(self, tokens: int) -> None:
        self._made += 1
        name, priority = f"r{self._made}", self._made * 7 % 21 - 10
        self._scheduler.add([request(name, 40, Sampling(temperature=0), priority, tokens)])
        self._queued[name] = None

    def _step(self, timed: Timed) -> None:
        plan = timed("plan", lambda: self._scheduler.plan(0.0))
        for start in plan.starts:
            self._queued.pop(start.request_id, None)
        result = StepResult({piece.request_id: 7 for piece in plan.tokens if piece.samples})
        timed("apply", lambda: self._scheduler.apply(result, 0.0))
        self._scheduler.take_kv_changes()


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


def print_steps() -> None:
    """Every stage, by the number of requests that run."""
    print("running |   plan  apply   pack   note |  plan+apply per request   (microseconds)")
    for running in (1, 16, RUNNING):
        cost = decode_steps(running)
        share = (cost["plan"] + cost["apply"]) / running
        stages = " ".join(f"{cost[stage]:6.1f}" for stage in ("plan", "apply", "pack", "note"))
        print(f"{running:7d} | {stages} | {share:10.2f}")


def print_queue() -> None:
    """Plan and apply, by the number of requests that wait."""
    print(f"{RUNNING} running, mixed priorities")
    print("              waiting |   plan  apply  plan+apply |    add  abort   (microseconds)")
    for turnover in (False, True):
        for waiting in (0, 1_000, 10_000):
            cost = Crowd(waiting, turnover=turnover).measure()
            what = "one ends a step" if turnover else "nobody ends"
            between = " ".join(f"{cost[stage]:6.1f}" if stage in cost else "     -" for stage in ("add", "abort"))
            both = cost["plan"] + cost["apply"]
            print(f"{what:15s} {waiting:5d} | {cost['plan']:6.1f} {cost['apply']:6.1f} {both:11.1f} | {between}")


def print_sampling() -> None:
    """The sampler, by what it is asked for."""
    print(f"sampling, {VOCAB} tokens | rows=1  rows=16   (microseconds)")
    kinds = {
        "greedy": Sampling(temperature=0),
        "temperature": Sampling(),
        "top_k 20, top_p 0.8": Sampling(top_k=20, top_p=0.8),
        "top_p 0.95": Sampling(top_p=0.95, temperature=0.7),
        "greedy, penalties": Sampling(temperature=0, repetition_penalty=1.1, presence_penalty=0.5),
    }
    for name, sampling in kinds.items():
        print(f"{name:24s} | {sampling_cost(1, sampling):8.0f} {sampling_cost(16, sampling):8.0f}")


TABLES = {"steps": print_steps, "queue": print_queue, "sampling": print_sampling}


def main() -> None:
    """Print the tables that were named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], metavar="|".join(TABLES), help="default: all")
    torch.set_num_threads(1)
    for name in parser.parse_args().tables or TABLES:
        TABLES[name]()
        print()


if __name__ == "__main__":
    main()
