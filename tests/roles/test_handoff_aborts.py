"""Callers who leave, abort, or never come, at every moment of a hand-over: no wrong answer, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from tests.drawings import shape_png
from tests.roles.pair import Pair, begin, load_models, running_pair, travelled
from tests.roles.running import Answered, ask_all, options
from triptych.core.errors import Cancelled, KvSessionNotFound, Overloaded, RequestNotFound
from triptych.core.events import Failed, Finished, FinishReason, PrefillReady, Tokens
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import GenerateRequest, Sampling, Stopping
from triptych.roles.contract import HealthState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from triptych.core.session import KvSession
    from triptych.roles.contract import Answer
    from triptych.roles.desk import Desk

MARKER = "<|vision_start|><|image_pad|><|vision_end|>"
TTL = 0.4
GONE = (KvSessionNotFound, Overloaded)
"""What a decode engine may say when the session was withdrawn, had expired, or there was no room."""


def distinct_requests(count: int, rng: random.Random) -> list[GenerateRequest]:
    pictures = [shape_png(shape, colour, 64) for shape in ("circle", "square") for colour in ("red", "blue", "green")]
    requests = []
    for index in range(count):
        chosen = rng.sample(pictures, rng.choice((0, 1, 1, 2)))
        text = " ".join(rng.choice(("what is it?", "hello", "which colour?")) for _ in range(rng.randrange(1, 9)))
        requests.append(
            GenerateRequest(
                request_id="alone",
                model="demo",
                prompt=f"<|im_start|>user\n{MARKER * len(chosen)}{text}<|im_end|>\n<|im_start|>assistant\n",
                media=tuple(MediaItem(Modality.IMAGE, RawBytes(png)) for png in chosen),
                sampling=Sampling(temperature=rng.choice((0, 5)), seed=index),
                stopping=Stopping(max_tokens=rng.choice((1, 8, 40)), ignore_eos=True),
                num_sequences=rng.choice((1, 1, 1, 3)),
            )
        )
    return requests


@dataclass
class Storm:
    """Requests with what each of them answers when nobody disturbs it."""

    pair: Pair
    rng: random.Random
    requests: list[GenerateRequest]
    expected: list[list[Answered]]
    tally: Counter[str] = field(default_factory=Counter)

    async def moment(self) -> None:
        """Some time passes, often none."""
        for _ in range(self.rng.choice((0, 0, 1, 3, 10))):
            await asyncio.sleep(0)
        if self.rng.random() < 0.4:
            await asyncio.sleep(self.rng.random() * 0.05)

    # -- phases: each gets a request of which nothing has happened yet ---------------------------------------

    async def leave_prefill(self, request: GenerateRequest) -> None:
        answer = await self.pair.prefill.accept(request)
        await self.moment()
        self.tally["left"] += 1
        await answer.aclose()

    async def abort_prefill(self, request: GenerateRequest) -> None:
        answer = await self.pair.prefill.accept(request)
        await self.moment()
        self.tally["aborted by id"] += 1
        await self.pair.prefill.abort(request.request_id)
        end = [event async for event in answer][-1]
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.CANCELLED
        await answer.aclose()

    async def abort_session(self, request: GenerateRequest) -> None:
        session = await self.begun(request)
        await self.moment()
        self.tally["aborted by session"] += 1
        await self.pair.prefill.abort_session(session.handle.session_id)
        await self.pair.prefill.abort_session(session.handle.session_id)

    async def abort_by_id(self, request: GenerateRequest) -> None:
        await self.begun(request)
        await self.moment()
        self.tally["aborted by id"] += 1
        await self.pair.prefill.abort(request.request_id)

    async def forget(self, request: GenerateRequest) -> None:
        await self.begun(request)

    async def leave_admission(self, request: GenerateRequest) -> None:
        session = await self.begun(request)
        accepting = asyncio.create_task(self.pair.decode.accept(replace(request, session=session, media=())))
        await self.moment()
        self.tally["left"] += 1
        if accepting.cancel():
            with suppress(asyncio.CancelledError, *GONE):
                await (await accepting).aclose()
        else:
            with suppress(*GONE):
                await accepting.result().aclose()

    async def abort_admission(self, request: GenerateRequest) -> None:
        session = await self.begun(request)
        accepting = asyncio.create_task(self.pair.decode.accept(replace(request, session=session, media=())))
        await self.moment()
        with suppress(RequestNotFound):
            await self.pair.decode.abort(request.request_id)
            self.tally["aborted by id"] += 1
        with suppress(Cancelled, *GONE):
            await self.read(await accepting, request, None)

    async def leave_decode(self, request: GenerateRequest) -> None:
        answer = await self.taken(request)
        if answer is not None:
            self.tally["left"] += 1
            await self.read(answer, request, self.rng.randrange(4))

    async def abort_decode(self, request: GenerateRequest) -> None:
        answer = await self.taken(request)
        if answer is not None:
            await self.moment()
            self.tally["aborted by id"] += 1
            await self.pair.decode.abort(request.request_id)
            await self.read(answer, request, None)

    async def abort_session_of_decode(self, request: GenerateRequest) -> None:
        session = await self.begun(request)
        with suppress(*GONE):
            answer = await self.pair.decode.accept(replace(request, session=session, media=()))
            await self.moment()
            self.tally["aborted by session"] += 1
            await self.pair.prefill.abort_session(session.handle.session_id)
            await self.read(answer, request, None)

    async def both(self, request: GenerateRequest) -> None:
        session = await self.begun(request)
        accepting = asyncio.create_task(self.pair.decode.accept(replace(request, session=session, media=())))
        await self.moment()
        self.tally["aborted by session"] += 1
        await self.pair.prefill.abort_session(session.handle.session_id)
        with suppress(*GONE):
            await self.read(await accepting, request, None)

    async def whole(self, request: GenerateRequest) -> None:
        answer = await self.taken(request)
        if answer is not None:
            await self.read(answer, request, None)

    # -- steps -------------------------------------------------------------------------------------------------

    async def begun(self, request: GenerateRequest) -> KvSession:
        return (await begin(self.pair.prefill, request)).session

    async def taken(self, request: GenerateRequest) -> Answer | None:
        session = await self.begun(request)
        await self.moment()
        try:
            return await self.pair.decode.accept(replace(request, session=session, media=()))
        except GONE:
            return None

    async def read(self, answer: Answer, request: GenerateRequest, events: int | None) -> None:
        """All of an answer, or so many events; what comes is always the beginning of what was expected."""
        expected = self.expected[int(request.request_id.split(" ")[1])]
        got: list[list[int]] = [[] for _ in expected]
        ends = 0
        try:
            async for event in answer:
                match event:
                    case Tokens(output_index=index):
                        got[index] += event.token_ids
                    case Finished(output_index=index, reason=reason):
                        ends += reason is not FinishReason.CANCELLED
                        if reason is not FinishReason.CANCELLED:
                            assert tuple(got[index]) == expected[index].token_ids
                    case Failed(error=error):
                        assert isinstance(error, GONE), error
                        assert not any(got)
                if events is not None and (events := events - 1) <= 0:
                    break
        finally:
            await answer.aclose()
        for mine, one in zip(got, expected, strict=True):
            assert tuple(mine) == one.token_ids[: len(mine)]
        self.tally["answered"] += ends == len(expected)


PHASES: tuple[Callable[[Storm, GenerateRequest], Awaitable[None]], ...] = (
    Storm.leave_prefill,
    Storm.abort_prefill,
    Storm.abort_session,
    Storm.abort_by_id,
    Storm.forget,
    Storm.leave_admission,
    Storm.abort_admission,
    Storm.leave_decode,
    Storm.abort_decode,
    Storm.abort_session_of_decode,
    Storm.both,
    Storm.whole,
)


WAYS = ("left", "aborted by id", "aborted by session")


async def healthy(role: Desk) -> bool:
    return all(check.state is HealthState.READY for check in await role.health(probe=True))


async def check_storm(total: int, concurrency: int, seed: int) -> Counter[str]:
    """Returns how many requests ended in which way."""
    rng = random.Random(seed)
    models = load_models(options(max_running_requests=concurrency))
    async with running_pair(models, ttl=TTL) as pair:
        requests = distinct_requests(24, rng)
        storm = Storm(pair, rng, requests, [await ask_all(pair.whole, one) for one in requests])
        numbers = iter(range(total))

        async def worker() -> None:
            for number in numbers:
                index = rng.randrange(len(requests))
                phase = PHASES[number % len(PHASES)]
                await phase(storm, replace(requests[index], request_id=f"{number} {index}"))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
        await pair.idle()
        assert storm.tally["answered"] > total / len(PHASES) / 2
        counts = pair.prefill.statistics()["kv_sessions"]
        assert counts["granted"] == counts["taken"] + counts["expired"] + counts["withdrawn"]
        assert min(counts["taken"], counts["expired"], counts["withdrawn"]) > 0
        assert pair.decode.statistics()["intake"] == {
            "image_loads": 0,
            "clip_loads": 0,
            "preprocess_calls": 0,
            "tokenisations": 0,
        }
        # the ledgers were compared whenever an engine fell idle: one that contradicts itself is not healthy
        assert await healthy(pair.prefill)
        assert await healthy(pair.decode)
        await pair.idle()
        return storm.tally


async def test_a_hundred_and_some() -> None:
    tally = await check_storm(132, 12, seed=1)
    assert set(tally) == {"answered", *WAYS}


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_two_thousand() -> None:
    tally = await check_storm(2700, 24, seed=2)
    print(dict(tally))
    assert sum(tally[way] for way in WAYS) >= 2000


async def test_a_session_that_nobody_has_read_of_is_never_taken() -> None:
    """Its name cannot be known, but suppose it were."""
    async with running_pair(load_models(options())) as pair:
        asked = distinct_requests(1, random.Random(3))[0]
        answer = await pair.prefill.accept(asked)
        async with asyncio.timeout(20):
            while not pair.prefill.statistics()["kv_sessions"]["waiting"]:
                await asyncio.sleep(0.001)
        ready = answer._events[-1]
        assert isinstance(ready, PrefillReady)
        await answer.aclose()
        await pair.idle()
        (got, *_) = await ask_all(pair.decode, replace(asked, session=travelled(ready.session), media=()))
        assert isinstance(got.end, Failed)
        assert isinstance(got.end.error, KvSessionNotFound)
