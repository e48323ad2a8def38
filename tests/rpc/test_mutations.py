"""Mutated requests against a role that accepts whatever reaches it: none of them gets an undocumented answer."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc

from tests.drawings import shape_png
from tests.rpc.mutations import MAX_BYTES, MAX_TOKENS, Target, cases
from triptych.wire.gen import generation_pb2, lifecycle_pb2
from triptych.wire.status import UNREADABLE

if TYPE_CHECKING:
    from tests.rpc.conftest import Serve
    from tests.rpc.mutations import Case

TARGET = Target("scripted", 1000, "<picture>", shape_png("circle", "red"), ("first",))
COUNT = 3000
SECONDS = 30.0
ANSWERS = {
    "Generate": {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED"},
    "Abort": {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND"},
}


def test_the_cases_are_those_of_their_seed() -> None:
    def digest(seed: int) -> str:
        hasher = hashlib.sha256()
        for case in cases(TARGET, seed, 500):
            hasher.update(repr((case.rpc, case.data, case.metadata)).encode())
        return hasher.hexdigest()

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


def test_the_cases_are_bounded_and_of_many_kinds() -> None:
    stories: Counter[str] = Counter()
    for case in cases(TARGET, 7, COUNT):
        assert len(case.data) <= MAX_BYTES
        stories.update(case.story.split(", "))
        if case.rpc == "Generate":
            try:
                message = generation_pb2.GenerateRequest.FromString(case.data)
            except UNREADABLE:
                continue
            assert message.stopping.max_tokens <= MAX_TOKENS
            assert message.stopping.HasField("max_tokens")
    assert len(stories) > 500
    assert stories["unchanged"] > COUNT / 10
    for kind in ("flipped", "cut", "doubled", "inserted", "joined", "surrogate", "random"):
        assert stories[f"bytes {kind}"] > COUNT / 200


async def call(channel: grpc.aio.Channel, case: Case) -> str:
    """The status of a case. An answer has exactly one end, a refusal has none but says why."""
    if case.rpc == "Abort":
        call = channel.unary_unary("/openengine.v1.Control/Abort")(case.data, metadata=case.metadata)
        with suppress(grpc.aio.AioRpcError):
            lifecycle_pb2.AbortResponse.FromString(await call)
    else:
        call = channel.unary_stream("/openengine.v1.Inference/Generate")(case.data, metadata=case.metadata)
        kinds: list[str | None] = []
        with suppress(grpc.aio.AioRpcError):
            kinds += [generation_pb2.GenerateResponse.FromString(data).WhichOneof("event") async for data in call]
        expected = ["token", "token", "finished"] if await call.code() is grpc.StatusCode.OK else []
        assert kinds == expected, case.story
    code = await call.code()
    assert code is grpc.StatusCode.OK or await call.details(), case.story
    return str(code.name)


async def test_every_answer_is_a_documented_one(serve: Serve) -> None:
    served = await serve()
    outcomes: Counter[tuple[str, str]] = Counter()
    async with grpc.aio.insecure_channel(served.address) as channel:
        for case in cases(TARGET, 7, COUNT):
            status = await asyncio.wait_for(call(channel, case), SECONDS)
            assert status in ANSWERS[case.rpc], case.story
            outcomes[case.rpc, status] += 1
        assert served.role.live == set()
        stream = served.generate("after")
        assert [message.WhichOneof("event") async for message in stream] == ["token", "token", "finished"]
    # Both sides are met often, or the cases would be no test.
    assert COUNT / 5 < outcomes["Generate", "OK"] < COUNT * 4 / 5
    assert outcomes["Generate", "INVALID_ARGUMENT"] > COUNT / 10
    assert min(outcomes["Abort", status] for status in ANSWERS["Abort"]) > 10
