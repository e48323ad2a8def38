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
import os
import secrets
import statistics
import tempfile
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from engines import Engines, Questions, random_checkpoint, two_tokens
from sides import COPY, Kinds, measured
from turns import alternating

from triptych.cli.transports import SHARED_MEMORY
from triptych.core.config import MIB
from triptych.core.events import Failed, Finished, PrefillReady, Tokens
from triptych.core.handles import KvLayout
from triptych.core.session import KvSession, SealedSession
from triptych.wire.codec_session import SessionCodec, seal
from triptych.wire.gen import kv_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from triptych.core.request import GenerateRequest
    from triptych.wire.channel import EngineChannel

LAYOUT = KvLayout(layers=4, kv_heads=8, head_size=64, block_size=16, dtype="float32", itemsize=4)
"""256 KiB a block."""
TOKEN_BYTES = 128 * 1024
"""KV of one token of the shape ``wide-kv``."""
SIZES = (224, 896, 1792)
CROWDS = (1, 4)


# -- transports ------------------------------------------------------------------------------------------------------


def transports(kinds: Kinds, mib: Sequence[int], rounds: int) -> None:
    """Every transport by every size."""
    print(f"\ntransports: median of {rounds} rounds, GiB/s, and the share of the copy's rate")
    print(f"{'MiB':>6}  {'':12}  {'fetch':>6} {'':>6}  {'open to end':>11} {'':>6}  {'ms':>8}")
    for size in mib:
        blocks = max(1, size * MIB // LAYOUT.block_bytes)
        gib = blocks * LAYOUT.block_bytes / 2**30
        medians = measured(kinds, LAYOUT, blocks, rounds)
        copied = medians[COPY].whole
        for name, (whole, fetch) in medians.items():
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


# -- resume ----------------------------------------------------------------------------------------------------------


async def resume(kinds: Kinds, mib: Sequence[int], rounds: int) -> None:
    """From PrefillReady on, by transport and size of the prompt's KV."""
    print(f"\nresume: milliseconds from PrefillReady, median of {rounds} rounds; computed: the prompt is new to the")
    print("prefill engine, and what can be moved meanwhile is; cached: it has all of it, and all is moved at the end")
    print(f"{'MiB':>6} {'tokens':>7}  {'':12}  {'':9}  {'1st token':>9}  {'2nd token':>9}")
    async with AsyncExitStack() as cleanup:
        model = random_checkpoint("wide-kv", kinds.directory / "wide-kv", 0)
        engines = Engines(cleanup, model, ["--kv-cache-bytes", str((2 * max(mib) + 64) * MIB)])
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


# -- pictures --------------------------------------------------------------------------------------------------------


async def pictures(kinds: Kinds, shape: str, sizes: Sequence[int], rounds: int) -> None:
    """Time to first token by size, crowd and variant."""
    print(f"\npictures: milliseconds, medians of {rounds} rounds, shape {shape}, shared-dir; a round of 4 at once is 4")
    print(f"{'pixels':>6} {'at once':>7}  {'':18}  {'TTFT':>8} {'':>7}  {'from PrefillReady':>17}")
    async with AsyncExitStack() as cleanup:
        model = random_checkpoint(shape, kinds.directory / shape, max(sizes) ** 2)
        engines = Engines(cleanup, model, ["--encoder-cache-bytes", str(128 * MIB)])
        moves = ["--kv-directory", str(kinds.directory / "pictures")]
        whole = await engines.start("aggregated", [])
        prefill, decode = [await engines.start(role, moves) for role in ("prefill", "decode")]
        variants: dict[str, Callable[[GenerateRequest], Awaitable[Times]]] = {
            "aggregated": lambda request: run_whole(whole, request),
            "p+d": lambda request: run_apart(prefill, decode, request),
            "p+d without plan": lambda request: run_apart(prefill, decode, request, plan=False),
        }
        for size in sizes:
            questions = Questions(model, size)
            for crowd in CROWDS:
                taken: dict[str, list[Times]] = {name: [] for name in variants}
                for turn in range(rounds + 1):
                    for name in alternating(list(variants), turn):
                        requests = [questions.ask() for _ in range(crowd)]
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
