"""An engine under a crowd of large photographs: what they cost its processors, its event loop and its memory.

    scripts/bench media_in                              32 requests at once, each with four photographs of 1536 x 2170
    scripts/bench media_in --pixels 200704              the tower looks at larger pictures
    scripts/bench media_in --flags="--decode-workers 2" another engine

costs      pictures per second and core, medians. ``decode`` is Pillow alone in one thread, the floor; ``transformers``
           is that and its processor for these models; ``engine`` is all that an engine with the demo model and its
           decoding processes do for a picture: gRPC, decoding, preparation, tower, two tokens of an answer.
           ``thumbnails`` is the same for pictures no larger than the tower sees them, and ``media in`` is what the
           photographs cost more. What is compared takes turns. Below it, where the engine's milliseconds went
stalls     how soon Health is answered meanwhile, asked by another process, and how late that process woke by itself:
           on a machine with too few cores the one contains the other. ``event loop`` is the longest time for which the
           engine's loop did nothing else, by the engine itself; of the last 15 to 30 s, and so perhaps of a turn before
memory     resident, of the engine and of its decoding processes, before, after, and at the most

No two pictures are alike, and every request has a salt of its own: nothing is known from before.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import os
import shlex
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from engines import Engines, two_tokens
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from turns import alternating
from watching import Metrics, Stalls, Watch

import triptych
from triptych.core.config import MIB
from triptych.core.events import Failed, Finished, Tokens
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.media_options import OptionLayer, PictureLayer
from triptych.text.chat import ChatMessage, ChatTemplate
from triptych.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from triptych.cli.child import EngineProcess
    from triptych.core.request import GenerateRequest
    from triptych.wire.channel import EngineChannel

DEMO = Path(triptych.__file__).parent / "demo_model"
SIZE = (2170, 1536)
"""Height and width."""
ALONE = 16
"""Photographs that are decoded or prepared in this process, in one round."""
IDLE_SECONDS = 3.0
"""For which Health is asked before anything is sent."""
FORGOTTEN_SECONDS = 30.0
"""After which the engine remembers no stall of its first round."""
TICK = os.sysconf("SC_CLK_TCK")


# -- what is sent ----------------------------------------------------------------------------------------------------


def photographs() -> Iterator[bytes]:
    """JPEG files: smooth, with the noise of a camera; about as large as real ones, and no two alike."""
    height, width = SIZE
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 3, (height + 64, width + 64, 3)).astype(np.int16)
    while True:
        coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        down, right = rng.integers(0, 64, 2)
        noisy = np.asarray(smooth) + noise[down : down + height, right : right + width]
        out = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
        yield out.getvalue()


def thumbnail(data: bytes, pixels: int) -> bytes:
    """A file of the same picture, about as large as the tower sees it."""
    with Image.open(io.BytesIO(data)) as picture:
        shrink = (pixels / (picture.width * picture.height)) ** 0.5
        small = picture.resize((int(picture.width * shrink), int(picture.height * shrink)))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=90)
    return out.getvalue()


class Crowd:
    """The requests, sent all at once."""

    def __init__(self, files: Sequence[bytes], pictures: int, pixels: int | None) -> None:
        template = ChatTemplate.load(DEMO, Tokenizer.load(DEMO))
        self._options = OptionLayer(PictureLayer(max_pixels=pixels))
        self._asked = []
        for group in (files[at : at + pictures] for at in range(0, len(files), pictures)):
            items = tuple(MediaItem(Modality.IMAGE, RawBytes(data)) for data in group)
            self._asked.append(template.render([ChatMessage("user", (*items, "what is it?"))], max_tokens=1_000_000))

    async def ask(self, engine: EngineChannel) -> list[float]:
        """When each had its first token, in seconds from when all were sent."""
        start = time.perf_counter()
        asked = [two_tokens(prompt.token_ids, prompt.media) for prompt in self._asked]
        answers = (_first_token(engine, replace(one, media_options=self._options)) for one in asked)
        return [came - start for came in await asyncio.gather(*answers)]


async def _first_token(engine: EngineChannel, request: GenerateRequest) -> float:
    first = 0.0
    async for event in await engine.generate(request):
        match event:
            case Tokens():
                first = first or time.perf_counter()
            case Failed(error=error):
                raise error
            case Finished():
                return first
    raise SystemExit("the engine has not answered")


# -- what it takes ---------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Seconds of processor time."""

    workers: float
    """Of the processes that decode."""
    event_loop: float
    """Of the engine's main thread."""
    threads: float
    """Of all its others."""

    def since(self, before: Cost) -> Cost:
        """What was added."""
        return Cost(*(now - then for now, then in zip(self, before, strict=True)))


class Processes:
    """An engine and its children, by what the system tells of them."""

    def __init__(self, engine: EngineProcess) -> None:
        self._pid = engine.pid

    def _children(self) -> list[int]:
        return [int(word) for file in Path(f"/proc/{self._pid}/task").glob("*/children") for word in _said(file)]

    def cost(self) -> Cost:
        """Up to now; those of its children that have ended are counted with the others."""
        own, ended = _seconds(f"{self._pid}")
        loop, _ = _seconds(f"{self._pid}/task/{self._pid}")
        return Cost(ended + sum(_seconds(f"{pid}")[0] for pid in self._children()), loop, own - loop)

    def memory(self) -> str:
        """Of the engine, and of all workers together, now and at the most."""
        engine, workers = _resident(self._pid), [_resident(pid) for pid in self._children()]
        now, most = (sum(column) for column in zip(*workers, strict=True)) if workers else (0, 0)
        return f"{engine[0]:8.0f} {engine[1]:8.0f}   {now:8.0f} {most:8.0f}   ({len(workers)})"


def _said(file: Path) -> list[str]:
    return file.read_text().split()


def _seconds(task: str) -> tuple[float, float]:
    """Of a process or thread itself, and of its children that have ended."""
    fields = Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()
    user, system, child_user, child_system = (int(field) / TICK for field in fields[11:15])
    return user + system, child_user + child_system


def _resident(pid: int) -> tuple[float, float]:
    """MiB now and at the most."""
    words = _said(Path(f"/proc/{pid}/status"))
    return tuple(int(words[words.index(f"{name}:") + 1]) * 1024 / MIB for name in ("VmRSS", "VmHWM"))


class Alone:
    """What can be compared with it, in one thread of this process."""

    def __init__(self, files: Sequence[bytes], pixels: int | None) -> None:
        self._files = itertools.cycle(files)
        settings = json.loads((DEMO / "preprocessor_config.json").read_text())
        if pixels is not None:
            settings["size"]["longest_edge"] = pixels
        self.pixels: int = settings["size"]["longest_edge"]
        """Of a picture as the tower sees it, at the most."""
        self._theirs = Qwen2VLImageProcessorPil(**settings)

    def decode(self) -> Image.Image:
        """Pillow alone."""
        return Image.open(io.BytesIO(next(self._files))).convert("RGB")

    def transformers(self) -> object:
        """The same, and its processor."""
        return self._theirs(self.decode(), return_tensors="pt")["pixel_values"]

    def seconds(self, way: Callable[[], object]) -> float:
        """Of processor time, for one photograph."""
        start = time.process_time()
        for _ in range(ALONE):
            way()
        return (time.process_time() - start) / ALONE


# -- the whole -------------------------------------------------------------------------------------------------------


def line(what: str, times: Sequence[float]) -> str:
    """A row of the stalls."""
    times = sorted(times)
    middle, late = times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
    return f"{what:30} {middle:8.2f} {late:8.2f} {times[-1]:8.2f}   ({len(times)} times)"


class Round(NamedTuple):
    """What one turn of the crowd took."""

    cost: Cost
    seconds: float
    """From the first request sent to the last one answered."""
    first: list[float]
    """Seconds to each first token."""
    stalls: Stalls
    """At the end of it; the count is of this turn."""
    answers: list[float]
    naps: list[float]


class Bench:
    """One engine, and those in front of it."""

    def __init__(self, engine: EngineChannel, processes: Processes, metrics: Metrics) -> None:
        self._engine = engine
        self._processes = processes
        self._metrics = metrics

    async def turn(self, crowd: Crowd) -> Round:
        """All requests once."""
        had = (await self._metrics.stalls()).count
        watch = await Watch.start(self._engine.address)
        before, start = self._processes.cost(), time.perf_counter()
        first = await crowd.ask(self._engine)
        seconds = time.perf_counter() - start
        cost = self._processes.cost().since(before)
        seen, stalls = await watch.stop(), await self._metrics.stalls()
        return Round(cost, seconds, first, stalls._replace(count=stalls.count - had), *seen)

    async def idle(self) -> None:
        """Health while nothing happens."""
        watch = await Watch.start(self._engine.address)
        await asyncio.sleep(IDLE_SECONDS)
        seen = await watch.stop()
        print(f"{'stalls: milliseconds':30} {'median':>8} {'p99':>8} {'worst':>8}")
        print(line("idle, Health", seen.answers))
        print(line("idle, the one who asks", seen.naps), flush=True)


def show_stalls(what: str, rounds: Sequence[Round]) -> None:
    """Three rows: the engine from outside, the machine, the engine's own word."""
    print(line(f"{what}, Health", [each for one in rounds for each in one.answers]))
    print(line(f"{what}, the one who asks", [each for one in rounds for each in one.naps]))
    worst, count = max(one.stalls.worst for one in rounds), sum(one.stalls.count for one in rounds)
    print(f"{f'{what}, event loop':30} {'':8} {'':8} {worst:8.2f}   ({count} of 100 ms or more)", flush=True)


def costs(crowds: dict[str, list[Round]], alone: dict[str, list[float]], pictures: int) -> None:
    """A row for each way, and the engine's parts."""
    parts = {
        name: Cost(*(statistics.median(part) / pictures for part in zip(*(one.cost for one in rounds), strict=True)))
        for name, rounds in crowds.items()
    }
    more = parts["engine"].since(parts["thumbnails"])
    floor, theirs = (statistics.median(alone[name]) for name in ("decode", "transformers"))
    rows = {"decode": floor, "transformers": theirs, **{name: sum(part) for name, part in parts.items()}}
    print(f"\n{'costs':16} {'a second and core':>18} {'ms a picture':>13} {'of the floor':>13}")
    for name, seconds in (rows | {"media in": sum(more)}).items():
        print(f"{name:16} {1 / seconds:18.1f} {1000 * seconds:13.1f} {floor / seconds:13.0%}")
    print(f"{'ms a picture':16} {'engine':>18} {'thumbnails':>13} {'media in':>13}")
    for name in Cost._fields:
        whole, small, added = (1000 * getattr(part, name) for part in (parts["engine"], parts["thumbnails"], more))
        print(f"  {name:14} {whole:18.1f} {small:13.1f} {added:13.1f}")
    print(f"media in to transformers: {theirs / sum(more):.2f}x")
    wall = statistics.median(one.seconds for one in crowds["engine"])
    first = sorted(each for one in crowds["engine"] for each in one.first)
    print(
        f"{pictures} photographs in {wall:.2f} s, {pictures / wall:.1f} a second on {os.cpu_count()} cores; "
        f"first token after {first[len(first) // 2]:.2f} s (median), {first[-1]:.2f} s (worst)\n"
    )


async def measure(asked: argparse.Namespace) -> None:
    """Start, look, take turns, show."""
    count = asked.requests * asked.pictures
    files = list(itertools.islice(photographs(), count))
    print(f"{count} photographs, {sum(map(len, files)) / count / MIB:.2f} MiB each on average; {asked.rounds} rounds\n")
    alone = Alone(files, asked.pixels)
    small = [thumbnail(data, alone.pixels) for data in files]
    crowds = {
        name: Crowd(group, asked.pictures, asked.pixels) for name, group in (("engine", files), ("thumbnails", small))
    }
    ways = {"decode": alone.decode, "transformers": alone.transformers}
    async with AsyncExitStack() as cleanup:
        engines = Engines(cleanup, DEMO, shlex.split(asked.flags))
        metrics = Metrics()
        engine, process = await engines.start_process("aggregated", metrics.flags)
        processes = Processes(process)
        memory = [("ready", processes.memory())]
        bench = Bench(engine, processes, metrics)
        await bench.idle()
        rounds: dict[str, list[Round]] = {name: [] for name in crowds}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(asked.rounds + 1):
            for name in alternating([*ways, *crowds], turn):
                if name in ways:
                    times[name].append(alone.seconds(ways[name]))
                else:
                    rounds[name].append(await bench.turn(crowds[name]))
            memory.append((f"after round {turn}" if turn else "after the first", processes.memory()))
            if not turn:
                await asyncio.sleep(FORGOTTEN_SECONDS)
        warm = {name: taken[1:] for name, taken in rounds.items()}
        for name, taken in warm.items():
            show_stalls(name, taken)
        costs(warm, {name: taken[1:] for name, taken in times.items()}, count)
        print(f"{'memory: MiB':16} {'engine':>8} {'at most':>8}   {'workers':>8} {'at most':>8}   (processes)")
        for when, seen in memory:
            print(f"{when:16} {seen}")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--pictures", type=int, default=4, help="in each of them")
    parser.add_argument("--pixels", type=int, help="of a picture as the tower reads it; as the model prefers otherwise")
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--flags", default="", help="of the engine")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(measure(asked))


if __name__ == "__main__":
    main()
