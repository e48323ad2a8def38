"""The encoder apart: memory of its process, what a picture costs more, and how fast its rows move.

    scripts/bench encoder_handoff                        all of it; writes 4.3 GB into the directory for temporary files
    scripts/bench encoder_handoff --only memory          one part: memory, pictures or rows
    scripts/bench encoder_handoff --pixels 448 --items 3 other pictures, several in each request

memory     resident memory of an encoder process and of an aggregated one, each alone and with its default flags; a
           random checkpoint of the shape of Qwen3-VL-2B in bfloat16; beside them what the libraries take
pictures   an aggregated engine against an encoder and an engine without a tower, over gRPC: time to the first token,
           every picture a new one. What neither tower nor decoder has spent of it is the rest; the difference of the
           rests, over the pictures of a request, is what encoding apart costs
rows       both sides of each transport in this process, the rows of one picture as they lie in blocks of 64 KiB; a copy
           by numpy of the same bytes is 100 %, and a file is what shared-dir cannot beat
Medians; what is compared takes turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engines import ROOT, Engines, Questions, random_checkpoint
from sides import COPY, Kinds, measured
from turns import alternating

from triptych.cli.transports import SHARED_MEMORY
from triptych.core.config import GIB, MIB
from triptych.core.events import EncoderReady, Failed, Finished, Tokens
from triptych.core.request import EncodeOptions
from triptych.engine.row_arena import ROW_LAYOUT
from triptych.models.registry import describe, describe_tower

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from triptych.core.events import Span
    from triptych.core.request import GenerateRequest
    from triptych.wire.channel import EngineChannel

SIZES = (224, 896, 1792)
CELL = 32
"""Pixels along one side of what becomes a row."""
ROW_BYTES = 16 * 1024
"""Of the shapes ``2b`` and ``wide-rows`` in bfloat16."""
DISK_BYTES = 5 * GIB
"""What a checkpoint of the shape ``2b`` takes, and a little."""
LIBRARIES = """
import triptych.cli.assemble, triptych.models.vision.qwen3_vl
print(open("/proc/self/status").read())
"""


# -- memory ----------------------------------------------------------------------------------------------------------


class Resident(NamedTuple):
    """MiB of one process."""

    now: float
    peak: float

    @classmethod
    def read(cls, status: str) -> Resident:
        """Out of /proc/PID/status."""
        sizes = dict(re.findall(r"^(\w+):\s*(\d+) kB$", status, re.MULTILINE))
        return cls(*(int(sizes[name]) / 1024 for name in ("VmRSS", "VmHWM")))

    @classmethod
    def of(cls, pid: int) -> Resident:
        """A process of this machine."""
        return cls.read(Path(f"/proc/{pid}/status").read_text())


def libraries() -> Resident:
    """A process that has imported what engines import, and loaded nothing."""
    command = [sys.executable, "-c", LIBRARIES]
    return Resident.read(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


async def memory(shape: str) -> None:
    """Each process alone, once it is ready and once it has encoded a picture."""
    place = tempfile.gettempdir()
    if shape == "2b" and (free := shutil.disk_usage(place).free) < DISK_BYTES:
        raise SystemExit(f"{place} has {free // MIB} MiB free; the checkpoint takes {DISK_BYTES // MIB}")
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as directory:
        model = random_checkpoint(shape, Path(directory) / shape, max(SIZES) ** 2, "bfloat16")
        weights = {"aggregated": describe(model).weight_bytes, "encoder": describe_tower(model).weight_bytes}
        print(
            f"\nmemory: MiB, shape {shape}, bfloat16; 512 of KV pool in the one, 256 for rows in the other; in both up"
        )
        print(f"to 128 of encoder cache, and {libraries().now:.0f} of libraries")
        print(f"{'':12}  {'weights':>8}  {'ready':>8}  {'picture':>8}  {'peak':>8}")
        seen: dict[str, Resident] = {}
        for role, take in (("aggregated", run_whole), ("encoder", encode)):
            async with AsyncExitStack() as cleanup:
                engines = Engines(cleanup, model, ["--encoder-directory", f"{directory}/rows"])
                channel, process = await engines.start_process(role, [])
                ready = Resident.of(process.pid)
                await take(channel, Questions(model, SIZES[0]).ask())
                seen[role] = used = Resident.of(process.pid)
            row = f"{weights[role] / MIB:8.0f}  {ready.now:8.0f}  {used.now:8.0f}  {used.peak:8.0f}"
            print(f"{role:12}  {row}", flush=True)
        share = weights["encoder"] / weights["aggregated"]
        print(f"{'of it':12}  {share:8.1%}  {'':8}  {seen['encoder'].now / seen['aggregated'].now:8.1%}")


# -- pictures --------------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Of one request, in milliseconds."""

    first: float
    """To the first token."""
    models: float
    """Of it, while tower or decoder computed."""

    @property
    def rest(self) -> float:
        """All else: gRPC, preparation, queues, rows on their way."""
        return self.first - self.models


async def run_whole(engine: EngineChannel, request: GenerateRequest) -> Times:
    """By one engine."""
    start = time.time()
    first, spans = await _first_token(engine, request)
    return _times(start, first, spans)


async def run_apart(encoder: EngineChannel, engine: EngineChannel, request: GenerateRequest) -> Times:
    """By an encoder and another one."""
    start = time.time()
    ready = await encode(encoder, request)
    consuming = replace(request, media=(), references=ready.references)
    first, spans = await _first_token(engine, consuming)
    return _times(start, first, (*ready.spans, *spans))


async def encode(encoder: EngineChannel, request: GenerateRequest) -> EncoderReady:
    """The request's pictures."""
    async for event in await encoder.generate(replace(request, encode=EncodeOptions())):
        match event:
            case EncoderReady():
                return event
            case Failed(error=error):
                raise error
    raise SystemExit("the encoder has encoded nothing")


async def _first_token(engine: EngineChannel, request: GenerateRequest) -> tuple[float, tuple[Span, ...]]:
    """When it came, in Unix seconds, and what the engine did."""
    first = 0.0
    async for event in await engine.generate(request):
        match event:
            case Tokens():
                first = first or time.time()
            case Failed(error=error):
                raise error
            case Finished(spans=spans):
                return first, spans
    raise SystemExit("the engine has not answered")


def _times(start: float, first: float, spans: Iterable[Span]) -> Times:
    """One engine's prefill may contain its encode: what overlaps counts once."""
    models, until = 0.0, start
    for span in sorted((span for span in spans if span.name in ("encode", "prefill")), key=lambda span: span.start):
        models += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return Times(1000 * (first - start), 1000 * models)


async def pictures(kinds: Kinds, shape: str, sizes: Sequence[int], items: Sequence[int], rounds: int) -> None:
    """Time to first token by size, pictures of a request, and variant."""
    print(f"\npictures: milliseconds, medians of {rounds} rounds, shape {shape}, bfloat16")
    columns = f"{'TTFT':>8} {'':>7}  {'models':>8}  {'rest':>8}  {'more, a picture':>15}"
    print(f"{'pixels':>6} {'items':>6}  {'':16}  {columns}")
    async with AsyncExitStack() as cleanup:
        model = random_checkpoint(shape, kinds.directory / shape, max(sizes) ** 2, "bfloat16")
        engines = Engines(cleanup, model, ["--encoder-cache-bytes", str(512 * MIB), "--encoder-quota", str(512 * MIB)])
        whole = await engines.start("aggregated", [])
        variants: dict[str, Callable[[GenerateRequest], Awaitable[Times]]] = {
            "aggregated": lambda request: run_whole(whole, request)
        }
        for kind in [name for name in kinds.all() if name != "memory"]:
            flags = ["--encoder-transport", kind, "--encoder-directory", str(kinds.directory / "rows")]
            encoder = await engines.start("encoder", flags, kinds.secret)
            consumer = await engines.start("aggregated", [*flags, "--requires-handoff"], kinds.secret)
            variants[f"e+pd {kind}"] = lambda request, e=encoder, pd=consumer: run_apart(e, pd, request)
        for size in sizes:
            questions = Questions(model, size)
            for count in items:
                taken: dict[str, list[Times]] = {name: [] for name in variants}
                for turn in range(rounds + 1):
                    for name in alternating(list(variants), turn):
                        times = await variants[name](questions.ask(count))
                        if turn:  # the first round warms up
                            taken[name].append(times)
                show(size, count, taken)


def show(size: int, count: int, taken: dict[str, list[Times]]) -> None:
    """A row for each variant, against one engine."""
    base = taken["aggregated"]
    first, rest = (statistics.median(getattr(times, name) for times in base) for name in ("first", "rest"))
    for variant, all_times in taken.items():
        ttft, models, other = (
            statistics.median(getattr(times, name) for times in all_times) for name in ("first", "models", "rest")
        )
        more = "" if variant == "aggregated" else f"{(other - rest) / count:+15.1f}"
        row = f"{ttft:8.1f} {ttft / first - 1:+7.1%}  {models:8.1f}  {other:8.1f}  {more}"
        print(f"{size:>6} {count:>6}  {variant:16}  {row}", flush=True)


# -- rows ------------------------------------------------------------------------------------------------------------


def rows(kinds: Kinds, sizes: Sequence[int], rounds: int) -> None:
    """Every transport by every size of picture."""
    print(f"\nrows: median of {rounds} rounds, {ROW_BYTES // 1024} KiB a row; from the opening of a session to its end")
    print(f"{'pixels':>6} {'rows':>6} {'MiB':>6}  {'':12}  {'rows/s':>10}  {'GiB/s':>6} {'':>6}  {'ms':>8}")
    for size in sizes:
        count = (size // CELL) ** 2
        medians = measured(kinds, ROW_LAYOUT, ROW_LAYOUT.blocks(count * ROW_BYTES), rounds)
        copied = medians[COPY].whole
        for name, (whole, _) in medians.items():
            what = f"{size:>6} {count:>6} {count * ROW_BYTES / MIB:>6.1f}  {name:12}"
            rate = f"{count / whole:10.0f}  {count * ROW_BYTES / GIB / whole:6.2f} {copied / whole:6.0%}"
            print(f"{what}  {rate}  {1000 * whole:8.2f}", flush=True)


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("memory", "pictures", "rows"))
    parser.add_argument("--pixels", type=int, nargs="+", default=SIZES, help="width and height of a picture")
    parser.add_argument("--items", type=int, nargs="+", default=[1], help="pictures in a request")
    parser.add_argument("--shape", default="wide-rows", help="of the model for pictures (scripts/make_checkpoint)")
    parser.add_argument("--memory-shape", default="2b", help="of the model for memory")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if asked.only in (None, "memory"):
        asyncio.run(memory(asked.memory_shape))
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix="triptych-bench-", dir=base) as directory:
        kinds = Kinds(Path(directory), secrets.token_hex(32))
        if asked.only in (None, "pictures"):
            asyncio.run(pictures(kinds, asked.shape, asked.pixels, asked.items, asked.rounds))
        if asked.only in (None, "rows"):
            rows(kinds, asked.pixels, asked.rounds)


if __name__ == "__main__":
    main()
