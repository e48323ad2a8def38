"""Requests that go through a prefill and a decode engine, and what they must answer.

    question   a request, and what it answers when nobody disturbs it
    asking     one question on its way: PREFILL -> WAITING -> TRANSFER -> DECODE -> ENDED, well or with an error

What comes is compared however a request ends: token ids exactly, log probabilities nearly.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import math
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from tests.drawings import shape_png
from tests.e2e.servers import engine_process
from triptych.core.errors import Cancelled, TriptychError
from triptych.core.events import Failed, Finished, FinishReason, PrefillReady, Tokens
from triptych.core.logprobs import LogprobOptions
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import CacheOptions, GenerateRequest, Sampling, Stopping
from triptych.core.session import SealedSession
from triptych.wire.channel import EngineChannel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from random import Random

    from tests.e2e.servers import Engine
    from triptych.wire.answer import RemoteAnswer

MARKER = "<|vision_start|><|image_pad|><|vision_end|>"
COLOURS = ("red", "blue", "green", "teal", "orange", "black")
SHAPES = ("circle", "square", "triangle")
WORDS = ("what", "shape", "colour", "is", "the", "in", "picture", "how", "many", *SHAPES, *COLOURS)
NEAR = 1e-3
"""Of two log probabilities of the same token; those over other KV are seldom so near."""
PATIENCE = 120.0
"""Seconds after which a test gives up. Nothing is expected to take them."""


@asynccontextmanager
async def channel(engine: Engine) -> AsyncIterator[EngineChannel]:
    """A connection to an engine for the length of a block."""
    made = EngineChannel(engine.address)
    try:
        yield made
    finally:
        await made.close()


class Output(NamedTuple):
    """One output of an answer."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Question:
    """A request with what it answers alone."""

    request: GenerateRequest
    expected: list[Output]

    def check(self, got: Sequence[Output], *, whole: bool) -> None:
        """What has come is what was expected, or the beginning of it."""
        for one, expected in zip(got, self.expected, strict=True):
            count = len(one.token_ids)
            assert count == len(expected.token_ids) if whole else count <= len(expected.token_ids)
            assert one.token_ids == expected.token_ids[:count]
            for ours, theirs in zip(one.logprobs, expected.logprobs, strict=False):
                assert math.isclose(ours, theirs, abs_tol=NEAR), (ours, theirs)


def long_request(number: int, rng: Random) -> GenerateRequest:
    """Some 400 to 3,600 tokens with up to four pictures; no two of them are alike."""
    return _request(number, rng, number % 5, rng.randrange(300, 2300), rng.choice((16, 48, 96)))


def short_request(number: int, rng: Random) -> GenerateRequest:
    """Some 50 to 300 tokens with one or two pictures; no two of them are alike."""
    return _request(number, rng, rng.choice((1, 1, 2)), rng.randrange(5, 200), rng.choice((1, 8, 40)))


def text_request(number: int, words: int, rng: Random) -> GenerateRequest:
    """Some more tokens than words, and no picture: any engine can compute it."""
    return replace(_request(number, rng, 0, words, 8), request_id=f"{number}", num_sequences=1)


def _request(number: int, rng: Random, pictures: int, words: int, max_tokens: int) -> GenerateRequest:
    pngs = [shape_png(rng.choice(SHAPES), rng.choice(COLOURS), 64 + rng.randrange(64)) for _ in range(pictures)]
    text = " ".join([f"{number}", *(rng.choice(WORDS) for _ in range(words))])
    return GenerateRequest(
        request_id="question",
        model="demo",
        prompt=f"<|im_start|>user\n{MARKER * pictures}{text}?<|im_end|>\n<|im_start|>assistant\n",
        media=tuple(MediaItem(Modality.IMAGE, RawBytes(png)) for png in pngs),
        sampling=Sampling(temperature=rng.choice((0, 1.5)), seed=number),
        stopping=Stopping(max_tokens=max_tokens, ignore_eos=True),
        num_sequences=rng.choice((1, 1, 1, 3)),
        logprobs=LogprobOptions(output=True),
    )


async def questions(requests: Sequence[GenerateRequest]) -> list[Question]:
    """What an engine that does all of it answers to each."""
    found = []
    with engine_process("demo") as whole:
        async with channel(whole) as engine:
            for request in requests:
                answer = Answering(request)
                await answer.read(await engine.generate(request))
                assert answer.finished, answer.error
                found.append(Question(request, answer.outputs))
    distinct = {tuple(itertools.chain(*(output.logprobs for output in each.expected))) for each in found}
    assert len(distinct) == len(found), "KV of one prompt under the name of another would not be seen"
    return found


class Answering:
    """An answer as it comes."""

    def __init__(self, request: GenerateRequest) -> None:
        self.outputs = [Output([], []) for _ in range(request.num_sequences)]
        self.reasons: dict[int, FinishReason] = {}
        """Of the outputs that have ended."""
        self.error: TriptychError | None = None

    async def read(self, answer: RemoteAnswer) -> None:
        """All of it. Whoever is cancelled here leaves it."""
        try:
            async for event in answer:
                match event:
                    case Tokens(output_index=index):
                        self.outputs[index].token_ids.extend(event.token_ids)
                        self.outputs[index].logprobs.extend(number.logprob for number in event.logprobs)
                    case Finished(output_index=index, reason=reason):
                        self.reasons[index] = reason
                    case Failed(error=error):
                        self.error = error
        finally:
            await answer.aclose()

    @property
    def finished(self) -> bool:
        """Whether all of it has come."""
        return len(self.reasons) == len(self.outputs) and FinishReason.CANCELLED not in self.reasons.values()

    @property
    def cancelled(self) -> bool:
        """Whether an engine was told to end it."""
        return FinishReason.CANCELLED in self.reasons.values()


# -- one question on its way -------------------------------------------------------------------------


class Phase(enum.IntEnum):
    """How far a question is, as its client sees it."""

    PREFILL = 0
    WAITING = 1
    """The session is there, and no decode engine knows."""
    TRANSFER = 2
    """A decode engine was given the session, and no token has come."""
    DECODE = 3
    ENDED = 4


class Asking:
    """One question on its way through two engines."""

    def __init__(self, question: Question, request_id: str, cache: CacheOptions | None = None) -> None:
        self.question = question
        self.request = replace(question.request, request_id=request_id, cache=cache or CacheOptions())
        self.phase = Phase.PREFILL
        self.session: SealedSession | None = None
        self.go = asyncio.Event()
        """Its session is held back until then."""
        self.go.set()
        self.error: TriptychError | None = None
        """Also if an engine was told to end it."""
        self.failed_in: Phase | None = None

    async def run(self, prefill: EngineChannel, decode: EngineChannel) -> None:
        """Ask; however it ends, what came was right. Whoever is cancelled here leaves the engine that is at work."""
        answer = Answering(self.request)
        try:
            self.session = await prefilled(prefill, self.request)
            self.phase = Phase.WAITING
            await self.go.wait()
            self.phase = Phase.TRANSFER
            events = await decode.generate(replace(self.request, session=self.session, media=()))
            self.phase = Phase.DECODE
            await answer.read(events)
        except TriptychError as error:
            answer.error = error
        finally:
            self.question.check(answer.outputs, whole=answer.finished)
        if answer.cancelled and answer.error is None:
            answer.error = Cancelled("an engine was told to end it")
        assert answer.finished == (answer.error is None)
        if answer.error is not None:
            self.failed_in, self.error = self.phase, answer.error
        self.phase = Phase.ENDED


async def prefilled(engine: EngineChannel, request: GenerateRequest) -> SealedSession:
    """The session of a prompt.

    Raises:
        TriptychError: there is none.
    """
    answer = await engine.generate(replace(request, handoff=True))
    try:
        events = [event async for event in answer]
    finally:
        await answer.aclose()
    match events[-1]:
        case Failed(error=error):
            raise error
        case Finished(reason=FinishReason.CANCELLED):
            raise Cancelled("an engine was told to end it")
        case PrefillReady(session=SealedSession() as session):
            return session
    raise AssertionError(events)


async def until(condition: Callable[[], bool]) -> None:
    """Look again every half millisecond until it is so."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.0005)
