"""Decode and prefill step time against the memory and matrix floors, and the share that is bookkeeping.

    scripts/bench step                      the demo model and a random one of about 0.5 B parameters
    scripts/bench step --model DIR          another checkpoint

Floors are measured in the same run, alternating with the steps: the memory floor is the bytes that a step must
read (weights once, KV of every context) over the read rate of a buffer of the same size; the matrix floor is its
multiply-adds over the rate of a large matrix product in the same number format.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from triptych.cli.flags import model_directory
from triptych.core.config import MIB, SchedulerConfig
from triptych.core.layout import Positions
from triptych.core.plan import PositionRule, PromptPlan
from triptych.core.request import CacheOptions, Request, Sampling, Stopping
from triptych.engine.kv_pool import allocate, count_blocks
from triptych.engine.runner import Runner
from triptych.engine.scheduler import Scheduler
from triptych.models.registry import load_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.models.contract import Model, TextSpec

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = 256
MOST_ROUNDS, LEAST_ROUNDS, CASE_SECONDS = 15, 3, 20.0
"""A case is repeated until there are enough rounds or its time is up."""


class Case(NamedTuple):
    """One kind of step."""

    name: str
    batch: int
    prompt: int
    """Tokens computed per request: the context for decode, all of them new for prefill."""
    decode: bool


CASES = (
    Case("decode, batch 1", 1, CONTEXT, True),
    Case("decode, batch 8", 8, CONTEXT, True),
    Case("decode, batch 32", 32, CONTEXT, True),
    Case("prefill, 512 tokens", 1, 512, False),
)


class Engine:
    """Scheduler and runner without the thread, so that each part can be timed."""

    def __init__(self, model: Model) -> None:
        spec = model.text.spec
        self.spec = spec
        config = SchedulerConfig(
            max_batched_tokens=512, max_running_requests=64, max_context=min(4096, spec.max_context)
        )
        blocks = count_blocks(spec, 1024 * MIB, config.block_size)
        config = SchedulerConfig(
            max_batched_tokens=config.max_batched_tokens,
            max_running_requests=config.max_running_requests,
            max_context=config.max_context,
            num_blocks=min(blocks, 2048),
        )
        self.scheduler = Scheduler(config, row_bytes=spec.row_width * spec.dtype.itemsize)
        self.runner = Runner(model, allocate(spec, config.num_blocks, config.block_size), config)
        self.made = 0

    def add(self, prompt: int) -> str:
        """One request with a prompt nobody had before."""
        self.made += 1
        rng = np.random.default_rng(self.made)
        ids = rng.integers(0, self.spec.vocab_size, prompt).astype(np.int32)
        table = np.tile(np.arange(prompt, dtype=np.int32), (self.spec.position_axes, 1))
        rule = PositionRule.LINEAR if self.spec.position_axes == 1 else PositionRule.MROPE
        request = Request(
            request_id=f"{self.made}",
            plan=PromptPlan(ids, (), rule, 1, b"benchmark"),
            positions=Positions(table, 0),
            inputs=(),
            sampling=Sampling(temperature=0, seed=0),
            stopping=Stopping(max_tokens=64, ignore_eos=True),
            eos_token_ids=frozenset(),
            cache=CacheOptions(bypass_prefix_cache=True),
            arrival=0.0,
        )
        self.scheduler.add([request])
        return request.request_id

    def step(self) -> tuple[float, float]:
        """One step; seconds of bookkeeping and of everything."""
        begin = time.perf_counter()
        plan = self.scheduler.plan(begin)
        planned = time.perf_counter()
        result = self.runner.run(plan)
        ran = time.perf_counter()
        self.scheduler.apply(result, ran)
        end = time.perf_counter()
        return (planned - begin) + (end - ran), end - begin

    def clear(self, ids: list[str]) -> None:
        """Drop the requests."""
        for request_id in ids:
            self.scheduler.abort(request_id, 0.0)
        self.step()


def main() -> None:
    """Print one table a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint; default: the demo model and a random 0.5 B one")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.model is not None:
        directory = model_directory(chosen.model)
        measure(directory.name, directory)
        return
    measure("demo", model_directory("demo"))
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "model"
        script = str(ROOT / "scripts" / "make_checkpoint")
        subprocess.run([sys.executable, script, "0.5b", str(target), "--dtype", "bfloat16"], check=True)
        for dtype in ("float32", "bfloat16"):
            measure("0.5b", target, dtype)


def measure(name: str, directory: Path, dtype: str = "auto") -> None:
    """All cases for one model."""
    model = load_model(directory, dtype=dtype)
    spec = model.text.spec
    weights, multiply_adds = weight_cost(model)
    print(f"\n{name}: {multiply_adds / 1e6:.1f} M weights used per token, {weights / 1e6:.0f} MB, {spec.dtype}, "
          f"{torch.get_num_threads()} thread(s)")  # fmt: skip
    print(f"{'step':22} {'time':>9} {'memory floor':>13} {'matrix floor':>13} {'x floor':>8} {'bookkeeping':>18}")
    engine = Engine(model)
    for case in CASES:
        print_case(engine, case, weights, multiply_adds)


def print_case(engine: Engine, case: Case, weights: int, multiply_adds: int) -> None:
    """Steps and floors in turn, medians."""
    spec = engine.spec
    kv_bytes = case.batch * case.prompt * spec.kv_bytes_per_token() if case.decode else 0
    tokens = case.batch if case.decode else case.prompt
    read = read_rate(weights + kv_bytes)
    multiply = matrix_rate(spec)
    steps, books, memory, matrix = [], [], [], []
    begin = time.perf_counter()
    while len(steps) < MOST_ROUNDS and (len(steps) < LEAST_ROUNDS or time.perf_counter() - begin < CASE_SECONDS):
        ids = [engine.add(case.prompt) for _ in range(case.batch)]
        if case.decode:
            for _ in range(case.batch * case.prompt // 512 + 2):  # prefill, and one decode step that is not counted
                engine.step()
        book, total = engine.step()
        books.append(book)
        steps.append(total)
        engine.clear(ids)
        memory.append((weights + kv_bytes) / read())
        matrix.append(tokens * multiply_adds / multiply())
    step, floor_memory, floor_matrix = map(statistics.median, (steps, memory, matrix))
    floor = max(floor_memory, floor_matrix)
    book = statistics.median(books)
    print(
        f"{case.name:22} {1e3 * step:6.2f} ms {1e3 * floor_memory:10.2f} ms {1e3 * floor_matrix:10.2f} ms "
        f"{step / floor:8.2f} {1e6 * book:8.0f} us ({100 * book / step:.1f} %)"
    )


def weight_cost(model: Model) -> tuple[int, int]:
    """Bytes of the decoder's weights that a step reads, and multiply-adds per token."""
    slots = {slot.name: slot.target for slot in model.text.slots() if not slot.repeated}
    if "lm_head.weight" in slots:
        del slots[
            next(name for name in slots if name.endswith("embed_tokens.weight"))
        ]  # a row per token, not the table
    used = slots.values()
    return sum(t.nbytes for t in used), sum(t.numel() for t in used if t.dim() == 2)


def read_rate(size: int) -> Callable[[], float]:
    """Bytes per second of reading a buffer of ``size`` bytes."""
    buffer = torch.ones(max(size, 4096) // 4)
    buffer.sum()

    def once() -> float:
        begin = time.perf_counter()
        buffer.sum()
        return buffer.nbytes / (time.perf_counter() - begin)

    return once


def matrix_rate(spec: TextSpec) -> Callable[[], float]:
    """Multiply-adds per second of a product of two large matrices."""
    side = 768
    a, b = (torch.randn(side, side).to(spec.dtype) for _ in range(2))
    a @ b

    def once() -> float:
        begin = time.perf_counter()
        a @ b
        return side**3 / (time.perf_counter() - begin)

    return once


if __name__ == "__main__":
    main()
