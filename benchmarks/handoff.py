"""Prefill to decode: bandwidth of the KV transports, time to the next token, and what the portable plan saves.

    scripts/bench handoff                        1, 64 and 256 MiB; pictures of 224, 896 and 1792 pixels
    scripts/bench handoff --mib 1 1024           other sizes
    scripts/bench handoff --only transports      one part: transports, resume or pictures

transports   both sides in this process; a block copy by numpy of the same bytes is 100 %, and a file is what shared-dir
             cannot beat
resume       prefill and decode processes and a random model with much KV: from PrefillReady to the first token that the
             caller sees (it came with the session) and to the next one (which needs the KV)
pictures     aggregated, prefill and decode processes and a random vision model: time to first token over gRPC, every
             picture a new one. Without the plan the decode engine gets the picture again, and prepares it
Medians; what is compared takes turns.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import io
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from triptych.cli.child import EngineProcess
from triptych.cli.eval import Memory
from triptych.cli.options import SECRET_VARIABLE
from triptych.cli.transports import SHARED_MEMORY, Nixl, SharedDir
from triptych.core.config import MIB
from triptych.core.events import Failed, Finished, PrefillReady, Tokens
from triptych.core.handles import KvLayout
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import CacheOptions, GenerateRequest, Sampling, Stopping
from triptych.core.session import KvSession, SealedSession
from triptych.text.chat import ChatMessage, ChatTemplate
from triptych.text.tokenizer import Tokenizer
from triptych.transport.contract import FetchOutcome, KvPool, Move, SessionEvent
from triptych.wire.channel import EngineChannel
from triptych.wire.codec_session import SessionCodec, seal
from triptych.wire.gen import kv_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from triptych.cli.transports import Transport
    from triptych.transport.contract import FetchResult

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = KvLayout(layers=4, kv_heads=8, head_size=64, block_size=16, dtype="float32", itemsize=4)
"""256 KiB a block."""
TOKEN_BYTES = 128 * 1024
"""KV of one token of the shape ``wide-kv``."""
SIZES = (224, 896, 1792)
CROWDS = (1, 4)
TTL = 600.0
COPY = "numpy copy"
FILE = "a file"
WAIT = 120.0
"""Seconds after which something is wrong."""


class Kinds(NamedTuple):
    """The transports that can be had here, each opened in one place."""

    directory: Path
    secret: str

    def all(self) -> dict[str, Transport]:
        """New ones by name."""
        made: dict[str, Transport] = {"memory": Memory(), "shared-dir": SharedDir(self.directory / "kv", TTL)}
        if importlib.util.find_spec("nixl_cu12") is not None:
            made["nixl"] = Nixl(self.secret)
        return made


# -- transports ------------------------------------------------------------------------------------------------------


class Sides:
    """Both ends of one transport over two pools."""

    def __init__(self, transport: Transport, source: KvPool, target: KvPool) -> None:
        self._free = threading.Event()
        self._done = threading.Event()
        self._result: FetchResult | None = None
        self._blocks = list(range(len(source.memory)))
        self._publisher = transport.publisher(source, uuid.uuid4().hex, self._tell)
        self._fetcher = transport.fetcher(target, uuid.uuid4().hex)

    def _tell(self, _: str, event: SessionEvent) -> None:
        if event is SessionEvent.FREE:
            self._free.set()

    def _end(self, result: FetchResult) -> None:
        self._result = result
        self._done.set()

    def move(self, *, writes: bool) -> tuple[float, float]:
        """One session with all blocks: seconds from its opening to its end, and of the fetch alone.

        With ``writes`` the fetch begins when the producer has let go of its blocks; else at once.
        """
        self._free.clear()
        self._done.clear()
        start = time.perf_counter()
        name = uuid.uuid4().hex
        self._publisher.open(name)
        self._publisher.publish(name, self._blocks)
        handle = self._publisher.seal(name)
        if writes and not self._free.wait(WAIT):
            raise SystemExit("the blocks were never free")
        fetching = time.perf_counter()
        self._fetcher.fetch(handle, [Move(block, block) for block in self._blocks], WAIT, self._end)
        if not self._done.wait(WAIT) or self._result is None or self._result.outcome is not FetchOutcome.FINISHED:
            raise SystemExit(f"the fetch has not ended well: {self._result}")
        end = time.perf_counter()
        if not self._free.wait(WAIT):
            raise SystemExit("the blocks were never free")
        return end - start, end - fetching

    def close(self) -> None:
        """Both."""
        self._fetcher.close()
        self._publisher.close()


def random_pool(blocks: int) -> KvPool:
    """Every page written."""
    memory = np.random.default_rng(0).integers(0, 256, (blocks, LAYOUT.block_bytes), dtype=np.uint8)
    return KvPool(LAYOUT, memory, np.zeros(blocks, np.int64))


def copy_seconds(source: KvPool, target: KvPool) -> float:
    """The same bytes, block by block."""
    start = time.perf_counter()
    for block in range(len(source.memory)):
        target.memory[block] = source.memory[block]
    return time.perf_counter() - start


def file_seconds(path: Path, source: KvPool, target: KvPool) -> tuple[float, float]:
    """The same bytes into a new file in the directory of the engines and out of it: of all, and of the reading."""
    start = time.perf_counter()
    with path.open("xb", buffering=0) as file:
        for block in source.memory:
            file.write(block)
    reading = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        for block in target.memory:
            file.readinto(block)
    end = time.perf_counter()
    path.unlink()
    return end - start, end - reading


def transports(kinds: Kinds, mib: Sequence[int], rounds: int) -> None:
    """Every transport by every size."""
    print(f"\ntransports: median of {rounds} rounds, GiB/s, and the share of the copy's rate")
    print(f"{'MiB':>6}  {'':12}  {'fetch':>6} {'':>6}  {'open to end':>11} {'':>6}  {'ms':>8}")
    for size in mib:
        blocks = max(1, size * MIB // LAYOUT.block_bytes)
        source, target = random_pool(blocks), random_pool(blocks)
        opened = {name: Sides(transport, source, target) for name, transport in kinds.all().items()}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in (COPY, FILE, *opened)}
        for turn in range(rounds + 1):
            for name in alternating(list(taken), turn):
                target.memory.fill(0)
                if name == COPY:
                    seconds = (copy_seconds(source, target),) * 2
                elif name == FILE:
                    seconds = file_seconds(kinds.directory / "file", source, target)
                else:
                    seconds = opened[name].move(writes=name == "shared-dir")
                if not np.array_equal(source.memory, target.memory):
                    raise SystemExit(f"{name} has moved other bytes")
                if turn:  # the first round warms up
                    taken[name].append(seconds)
        for sides in opened.values():
            sides.close()
        gib = blocks * LAYOUT.block_bytes / 2**30
        copied = statistics.median(whole for whole, _ in taken[COPY])
        for name, times in taken.items():
            whole, fetch = (statistics.median(column) for column in zip(*times, strict=True))
            rates = f"{gib / fetch:6.2f} {copied / fetch:6.0%}  {gib / whole:11.2f} {copied / whole:6.0%}"
            print(f"{size:>6}  {name:12}  {rates}  {1000 * whole:8.1f}", flush=True)


# -- engines ---------------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Of one request, in milliseconds."""

    first: float
    """To the first token that the caller sees."""
    second: float
    """To the next one."""
    ready: float
    """From PrefillReady to the first; 0 where there was none."""
    ready_second: float
    """From PrefillReady to the next; 0 where there was none."""


async def run_whole(engine: EngineChannel, request: GenerateRequest) -> Times:
    """By one engine."""
    start = time.perf_counter()
    first, second = await _two_tokens(engine, request)
    return Times((first - start) * 1000, (second - start) * 1000, 0, 0)


async def run_apart(
    prefill: EngineChannel, decode: EngineChannel, request: GenerateRequest, *, plan: bool = True
) -> Times:
    """By two. Without ``plan`` it is taken out of the session (whose time does not count), and the media go along."""
    start = time.perf_counter()
    session = await _session(prefill, request)
    ready = time.perf_counter()
    going_on = replace(request, session=session, media=(), cache=replace(request.cache, bypass_prefix_cache=True))
    if not plan:
        going_on = replace(going_on, session=_without_plan(session), media=request.media)
    lost = time.perf_counter() - ready
    first, second = (moment - lost for moment in await _two_tokens(decode, going_on))
    return Times(*(1000 * seconds for seconds in (first - start, second - start, first - ready, second - ready)))


async def _session(prefill: EngineChannel, request: GenerateRequest) -> SealedSession:
    async for event in await prefill.generate(replace(request, handoff=True)):
        match event:
            case PrefillReady(session=SealedSession() as session):
                return session
            case Failed(error=error):
                raise error
    raise SystemExit("the prefill engine has made no session")


def _without_plan(session: SealedSession) -> SealedSession:
    codec = SessionCodec()
    read: KvSession = codec.decode(kv_pb2.KvSessionRef.FromString(session.data))
    return seal(codec.encode(replace(read, plan=None)))


async def _two_tokens(engine: EngineChannel, request: GenerateRequest) -> tuple[float, float]:
    """When the first token came, and when the second: they may have come together."""
    times: list[float] = []
    async for event in await engine.generate(request):
        match event:
            case Tokens(token_ids=token_ids):
                times += [time.perf_counter()] * len(token_ids)
            case Failed(error=error):
                raise error
            case Finished():
                pass
    return times[0], times[1]


class Engines:
    """Engine processes, ended with the stack."""

    def __init__(self, cleanup: AsyncExitStack, model: Path, flags: Sequence[str]) -> None:
        self._cleanup = cleanup
        self._words = [str(model), *flags]

    async def start(self, role: str, flags: Sequence[str], secret: str | None = None) -> EngineChannel:
        """One of them, ready."""
        environment = {} if secret is None else {SECRET_VARIABLE: secret}
        engine = await EngineProcess.start(role, [*self._words, *flags], environment)
        self._cleanup.push_async_callback(engine.stop)
        await engine.wait_ready(lambda done, total: None)
        channel = EngineChannel(engine.address)
        self._cleanup.push_async_callback(channel.close)
        return channel


def random_checkpoint(shape: str, directory: Path, max_pixels: int) -> Path:
    """A float32 model with random weights that takes pictures as large as they come."""
    make = [sys.executable, str(ROOT / "scripts" / "make_checkpoint"), shape, str(directory), "--dtype", "float32"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    settings = directory / "preprocessor_config.json"
    if settings.exists():
        said = json.loads(settings.read_text())
        said["size"]["longest_edge"] = max_pixels
        settings.write_text(json.dumps(said))
    return directory


def two_tokens(prompt: tuple[int, ...], media: tuple[MediaItem, ...] = ()) -> GenerateRequest:
    """Greedy, under a salt of its own."""
    return GenerateRequest(
        request_id=uuid.uuid4().hex,
        model="bench",
        prompt=prompt,
        media=media,
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=2, ignore_eos=True),
        cache=CacheOptions(salt=uuid.uuid4().hex),
    )


# -- resume ----------------------------------------------------------------------------------------------------------


async def resume(kinds: Kinds, mib: Sequence[int], rounds: int) -> None:
    """From PrefillReady on, by transport and size of the prompt's KV."""
    print(f"\nresume: milliseconds from PrefillReady, median of {rounds} rounds; computed: the prompt is new to the")
    print("prefill engine, and what can be moved meanwhile is; cached: it has all of it, and all is moved at the end")
    print(f"{'MiB':>6} {'tokens':>7}  {'':12}  {'':9}  {'1st token':>9}  {'2nd token':>9}")
    async with AsyncExitStack() as cleanup:
        model = random_checkpoint("wide-kv", kinds.directory / "wide-kv", 0)
        pool = ["--kv-cache-bytes", str((2 * max(mib) + 64) * MIB), "--served-name", "bench"]
        engines = Engines(cleanup, model, pool)
        pairs = {}
        for name in list(kinds.all())[1:]:
            moves = ["--kv-transport", name, "--kv-directory", str(kinds.directory / "engines")]
            secret = kinds.secret if name == "nixl" else None
            pairs[name] = [await engines.start(role, moves, secret) for role in ("prefill", "decode")]
        for size in mib:
            tokens = size * MIB // TOKEN_BYTES
            prompt = tuple(np.random.default_rng(size).integers(20, 200, tokens).tolist())
            taken: dict[tuple[str, str], list[Times]] = {}
            for turn in range(rounds + 1):
                for name in alternating(list(pairs), turn):
                    request = two_tokens(prompt)
                    for how in ("computed", "cached"):
                        again = replace(request, request_id=uuid.uuid4().hex)
                        times = await run_apart(*pairs[name], again)
                        if turn:  # the first round warms up
                            taken.setdefault((name, how), []).append(times)
            for (name, how), all_times in sorted(taken.items()):
                first = statistics.median(times.ready for times in all_times)
                second = statistics.median(times.ready_second for times in all_times)
                print(f"{size:>6} {tokens:>7}  {name:12}  {how:9}  {first:9.1f}  {second:9.1f}")


def alternating(names: list[str], turn: int) -> list[str]:
    """Another one begins each time, and every second time they come backwards."""
    at = turn % len(names)
    turned = names[at:] + names[:at]
    return turned[::-1] if turn % 2 else turned


# -- pictures --------------------------------------------------------------------------------------------------------


def pictures_of(size: int) -> Iterator[bytes]:
    """JPEG files of smooth random pictures, no two alike."""
    rng = np.random.default_rng(size)
    while True:
        coarse = rng.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
        yield out.getvalue()


async def pictures(kinds: Kinds, shape: str, sizes: Sequence[int], rounds: int) -> None:
    """Time to first token by size, crowd and variant."""
    print(f"\npictures: milliseconds, medians of {rounds} rounds, shape {shape}, shared-dir; a round of 4 at once is 4")
    print(f"{'pixels':>6} {'at once':>7}  {'':18}  {'TTFT':>8} {'':>7}  {'from PrefillReady':>17}")
    async with AsyncExitStack() as cleanup:
        model = random_checkpoint(shape, kinds.directory / shape, max(sizes) ** 2)
        engines = Engines(cleanup, model, ["--served-name", "bench", "--encoder-cache-bytes", str(128 * MIB)])
        moves = ["--kv-directory", str(kinds.directory / "pictures")]
        whole = await engines.start("aggregated", [])
        prefill, decode = [await engines.start(role, moves) for role in ("prefill", "decode")]
        variants: dict[str, Callable[[GenerateRequest], Awaitable[Times]]] = {
            "aggregated": lambda request: run_whole(whole, request),
            "p+d": lambda request: run_apart(prefill, decode, request),
            "p+d without plan": lambda request: run_apart(prefill, decode, request, plan=False),
        }
        template = ChatTemplate.load(model, Tokenizer.load(model))
        for size in sizes:
            drawn = pictures_of(size)

            def asked(drawn: Iterator[bytes] = drawn) -> GenerateRequest:
                item = MediaItem(Modality.IMAGE, RawBytes(next(drawn)))
                prompt = template.render([ChatMessage("user", (item, "what is it?"))], max_tokens=4096)
                return two_tokens(prompt.token_ids, prompt.media)

            for crowd in CROWDS:
                taken: dict[str, list[Times]] = {name: [] for name in variants}
                for turn in range(rounds + 1):
                    for name in alternating(list(variants), turn):
                        requests = [asked() for _ in range(crowd)]
                        times = await asyncio.gather(*(variants[name](request) for request in requests))
                        if turn:  # the first round warms up
                            taken[name] += times
                show(size, crowd, taken)


def show(size: int, crowd: int, taken: dict[str, list[Times]]) -> None:
    """A row for each variant, against the one without the plan."""
    medians = {name: statistics.median(times.first for times in all_times) for name, all_times in taken.items()}
    for name, first in medians.items():
        change = first / medians["p+d without plan"] - 1
        ready = statistics.median(times.ready for times in taken[name])
        after = f"{ready:17.1f}" if ready else ""
        print(f"{size:>6} {crowd:>7}  {name:18}  {first:8.1f} {change:+7.1%}  {after}", flush=True)


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("transports", "resume", "pictures"))
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 64, 256], help="KV of one prompt")
    parser.add_argument("--pixels", type=int, nargs="+", default=SIZES, help="width and height of a picture")
    parser.add_argument("--shape", default="vl-plain", help="of the vision model (scripts/make_checkpoint)")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix="triptych-bench-", dir=base) as directory:
        kinds = Kinds(Path(directory), secrets.token_hex(32))
        if asked.only in (None, "transports"):
            transports(kinds, asked.mib, asked.rounds)
        if asked.only in (None, "resume"):
            asyncio.run(resume(kinds, asked.mib, asked.rounds))
        if asked.only in (None, "pictures"):
            asyncio.run(pictures(kinds, asked.shape, asked.pixels, asked.rounds))


if __name__ == "__main__":
    main()
