"""kill -9 of a prefill or a decode engine at random moments, while others of both kinds live on.

Of each kill is asked: every answer that ends well is right, every other ends with an error after which a retry helps;
requests that do not need the dead engine notice nothing; and the living give back all that they held for it in time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import statistics
import time
from collections import Counter
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.e2e.handoffs import Asking, Phase, channel, long_request, questions, until
from tests.e2e.holdings import Spares, all_held, back_to_nothing, metrics, started
from triptych.core.errors import Draining, KvSessionNotFound, KvTransferFailed
from triptych.core.request import CacheOptions
from triptych.transport.nixl_peers import PEER_IDLE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.handoffs import Question
    from tests.e2e.servers import Engine
    from triptych.wire.channel import EngineChannel

ROUNDS = 50
NIXL_ROUNDS = 12
TTL = 4.0
"""Seconds for which a session waits."""
LIMIT = TTL + 20.0
"""Seconds after which the living hold nothing for the dead."""
VICTIMS, OTHERS = 5, 2
"""Requests of one round that need the engine that dies, and that do not."""
MOMENTS = {Phase.PREFILL: 0.6, Phase.TRANSFER: 0.02, Phase.DECODE: 0.1}
"""The most that is waited for, in seconds, once a phase has begun."""
ORDER = (Phase.TRANSFER, Phase.DECODE, Phase.TRANSFER, Phase.DECODE, Phase.PREFILL)
"""One round after the other."""
WHOLE_PROMPTS = ("--max-batched-tokens", "16384")
OTHER_ROLE = {"prefill": "decode", "decode": "prefill"}


class Siege:
    """One role's engines die, one after the other; one more of that role and one of the other role live on."""

    def __init__(self, victim: str, directory: Path, asked: list[Question], rng: random.Random) -> None:
        self.victim = victim
        self.tally: Counter[str] = Counter()
        self.waits: list[float] = []
        self._directory = directory
        self._asked = asked
        self._rng = rng
        self._numbers = 0

    def askings(self, count: int) -> list[Asking]:
        """So many new ones. Some compute and fetch again what is cached."""
        self._numbers += count
        return [
            Asking(
                self._rng.choice(self._asked),
                f"{self._numbers - index}",
                CacheOptions(bypass_prefix_cache=self._rng.random() < 0.5),
            )
            for index in range(count)
        ]

    async def round(self, number: int, dying: Engine, same: Engine, other: Engine) -> None:
        """Kill one amid requests."""
        async with AsyncExitStack() as stack:
            ends = [await stack.enter_async_context(channel(engine)) for engine in (dying, same, other)]
            doomed, safe = self.askings(VICTIMS), self.askings(OTHERS)
            running = [asyncio.create_task(self._run(each, ends[0], ends[2])) for each in doomed]
            running += [asyncio.create_task(self._run(each, ends[1], ends[2])) for each in safe]
            await self._moment(ORDER[number % len(ORDER)], doomed)
            dying.process.kill()
            self.tally.update(f"killed in {asking.phase.name}" for asking in doomed)
            killed = time.monotonic()
            await asyncio.gather(*running)
            self._check(doomed, safe)
            failed = [each for each in doomed if each.error is not None]
            again = [Asking(each.question, f"{each.request.request_id} again") for each in failed]
            await asyncio.gather(*(self._run(each, ends[1], ends[2]) for each in again))
            assert [each.error for each in again if each.error is not None] == []
        await asyncio.to_thread(dying.process.wait)
        living = [(same, self.victim), (other, OTHER_ROLE[self.victim])]
        await back_to_nothing(lambda: all_held(living, self._directory), LIMIT)
        self.waits.append(time.monotonic() - killed)

    async def _run(self, asking: Asking, same: EngineChannel, other: EngineChannel) -> None:
        """Through an engine of the victim's role and one of the other."""
        await (asking.run(same, other) if self.victim == "prefill" else asking.run(other, same))

    async def _moment(self, phase: Phase, doomed: list[Asking]) -> None:
        if phase is Phase.TRANSFER:
            await self._volley(doomed, self._rng.choice((1, VICTIMS - 1)))
        elif phase is Phase.DECODE:
            count = self._rng.randint(2, VICTIMS)
            await until(lambda: sum(asking.phase >= phase for asking in doomed) >= count)
        await asyncio.sleep(self._rng.random() ** 2 * MOMENTS[phase])  # early ones more often

    async def _volley(self, doomed: list[Asking], count: int) -> None:
        """So many sessions are given to the decode engine at once; those that are ready later, when they are."""
        for asking in doomed:
            asking.go.clear()
        await until(lambda: sum(asking.phase >= Phase.WAITING for asking in doomed) >= count)
        for asking in doomed:
            asking.go.set()

    def _check(self, doomed: list[Asking], safe: list[Asking]) -> None:
        """Ends of requests; what they said was checked as it came."""
        assert [each.error for each in safe if each.error is not None] == []
        for asking in doomed:
            error, phase = asking.error, asking.failed_in
            if error is None or phase is None:
                self.tally["finished"] += 1
                continue
            assert error.retryable, repr(error)
            if self.victim == "decode":
                assert isinstance(error, Draining), repr(error)
                assert phase > Phase.WAITING, repr(error)
            elif phase is Phase.PREFILL:
                assert isinstance(error, Draining), repr(error)
            else:  # the decode engine says it; once it has the KV it needs nobody else
                assert isinstance(error, KvSessionNotFound | KvTransferFailed), repr(error)
                assert phase < Phase.DECODE, repr(error)
            self.tally[f"failed in {phase.name}: {type(error).__name__}"] += 1
        self.tally["untouched"] += len(safe)


def dead(directory: Path) -> list[str]:
    """Signs of life of owners that do not live: only two do."""
    alive = [path.name for path in directory.glob("*.alive")]
    return alive if len(alive) > 2 else []


async def connections(*engines: Engine) -> list[float]:
    """Whom the living are still connected to, with memory registered, beside each other."""
    numbers = [(await metrics(engine)).get("kv_fetcher_peers", 0) for engine in engines]
    return [count for count in numbers if count > 1]


def transports() -> list[object]:
    missing = importlib.util.find_spec("nixl_cu12") is None
    return [
        pytest.param("shared-dir", ROUNDS, id="shared-dir"),
        pytest.param("nixl", NIXL_ROUNDS, id="nixl", marks=pytest.mark.skipif(missing, reason="no nixl here")),
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize(("transport", "rounds"), transports())
async def test_kill_9(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, transport: str, rounds: int
) -> None:
    monkeypatch.setenv("TRIPTYCH_HANDOFF_SECRET", "a secret of thirty-two bytes, or more")
    kv, rng = tmp_path / "kv", random.Random(f"{victim} {transport}")
    # whole prompts in one step: then all of their KV is still to be written when the hand-over is known
    flags = ("--kv-transport", transport, "--kv-directory", str(kv), "--session-ttl", f"{TTL:g}", *WHOLE_PROMPTS)
    siege = Siege(victim, kv, await questions([long_request(number, rng) for number in range(20)]), rng)
    begin = time.monotonic()
    with ExitStack() as stack:
        spares = stack.enter_context(Spares("--role", victim, *flags))
        same, other = await started(stack, ("--role", victim, *flags), ("--role", OTHER_ROLE[victim], *flags))
        for number in range(rounds):
            await siege.round(number, await spares.take(last=number == rounds - 1), same, other)
        await back_to_nothing(lambda: asyncio.to_thread(dead, kv), LIMIT)
        await back_to_nothing(lambda: connections(same, other), LIMIT + PEER_IDLE_SECONDS)
        for engine in (same, other):
            engine.process.terminate()
        assert [engine.process.wait(60) for engine in (same, other)] == [0, 0]
        assert not kv.exists() or list(kv.iterdir()) == []
    print(f"\n{transport}, kill -9 of {victim}: {rounds} rounds in {time.monotonic() - begin:.0f} s")
    print(f"  seconds until nothing is held: median {statistics.median(siege.waits):.2f}, most {max(siege.waits):.2f}")
    for what, count in sorted(siege.tally.items()):
        print(f"  {what}: {count}")
    assert all(siege.tally[f"killed in {phase.name}"] >= rounds / 2 for phase in MOMENTS)
