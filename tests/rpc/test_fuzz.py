"""Mutated requests against the whole engine: every answer is a documented one, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc
import pytest

from tests.adapters import make_adapter
from tests.drawings import shape_png
from tests.roles.running import ask, load_model, options, running
from tests.rpc.features import PICTURE
from tests.rpc.mutations import Case, Target, cases
from triptych.cli.flags import model_directory
from triptych.core.adapter import AdapterInfo
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import GenerateRequest, Sampling, Stopping
from triptych.rpc.server import serve_role
from triptych.wire.gen import error_pb2, generation_pb2, lifecycle_pb2

if TYPE_CHECKING:
    from pathlib import Path

    from triptych.roles.aggregated import Aggregated

AT_ONCE = 16
SECONDS = 60.0
PNG = shape_png("circle", "red")
REFUSALS = {
    "INVALID_ARGUMENT",
    "UNIMPLEMENTED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "CANCELLED",  # by an abort that came before it was accepted
}
FAILURES = {
    error_pb2.ERROR_CODE_INVALID_ARGUMENT,
    error_pb2.ERROR_CODE_UNSUPPORTED_FEATURE,
    error_pb2.ERROR_CODE_OVERLOADED,
}


async def call(channel: grpc.aio.Channel, case: Case) -> str:
    """How one call ended: a status, or the terminal event of an accepted request."""
    events = []
    if case.rpc == "Abort":
        call = channel.unary_unary("/openengine.v1.Control/Abort")(case.data, metadata=case.metadata, timeout=SECONDS)
        with suppress(grpc.aio.AioRpcError):
            lifecycle_pb2.AbortResponse.FromString(await call)
    else:
        method = channel.unary_stream("/openengine.v1.Inference/Generate")
        call = method(case.data, metadata=case.metadata, timeout=SECONDS)
        with suppress(grpc.aio.AioRpcError):
            events += [generation_pb2.GenerateResponse.FromString(data) async for data in call]
    status = (await call.code()).name
    if status != "OK":
        assert status in REFUSALS, (case.story, await call.details())
        assert await call.details(), case.story
        assert not events, case.story
    elif case.rpc == "Generate":
        return f"Generate {check_stream(case, events)}"
    return f"{case.rpc} {status}"


def check_stream(case: Case, events: list[generation_pb2.GenerateResponse]) -> str:
    """An accepted request has each output's end once, and one usage or one error, which is last."""
    assert events, case.story
    kinds = [event.WhichOneof("event") for event in events]
    if kinds[-1] == "error":
        assert events[-1].error.code in FAILURES, (case.story, events[-1])
        assert "error" not in kinds[:-1], case.story
        return "error"
    ends = [event.finished.output_index for event in events if event.WhichOneof("event") == "finished"]
    assert sorted(ends) == list(range(len(ends))), case.story
    assert [event.HasField("usage") for event in events] == [False] * (len(events) - 1) + [True], case.story
    assert set(kinds) <= {"prompt", "token", "finished"}, case.story
    assert kinds[-1] == "finished", case.story
    return "finished"


async def colour(role: Aggregated) -> str:
    """A good request."""
    asked = GenerateRequest(
        request_id=uuid.uuid4().hex,
        model="demo",
        prompt=f"<|im_start|>user\n{PICTURE}what colour is the circle?<|im_end|>\n<|im_start|>assistant\n",
        media=(MediaItem(Modality.IMAGE, RawBytes(PNG)),),
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=20),
    )
    return (await ask(role, asked)).text


@pytest.mark.parametrize(
    ("seed", "count"), [(11, 1000), pytest.param(12, 20_000, marks=(pytest.mark.slow, pytest.mark.timeout(1200)))]
)
async def test_nothing_a_client_sends_is_answered_wrongly_or_held(seed: int, count: int, tmp_path: Path) -> None:
    adapter = make_adapter(model_directory("demo"), tmp_path / "adapter", seed=1)
    async with running(load_model(options())) as role:
        await role.load_adapter(AdapterInfo(1, "first", str(adapter)))
        server = await serve_role(role, "127.0.0.1", 0)
        target = Target("demo", 4096, PICTURE, PNG, ("first",))
        outcomes: Counter[str] = Counter()
        async with grpc.aio.insecure_channel(server.address) as channel:
            places = asyncio.Semaphore(AT_ONCE)

            async def one(case: Case) -> None:
                async with places:
                    outcomes[await call(channel, case)] += 1

            for start in range(0, count, 500):
                some = list(cases(target, seed + start, min(500, count - start)))
                await asyncio.gather(*map(one, some))
            assert await colour(role) == "red"
        await server.stop(None)
        load, ledgers = role.load(), role.statistics()
    assert (load.running_requests, load.queued_requests, load.used_blocks, load.running_tokens) == (0, 0, 0, 0)
    assert load.waiting_tokens == 0
    assert ledgers["kv_blocks"]["held"] == 0
    assert ledgers["encoder_cache"]["held_bytes"] == 0
    assert ledgers["media_admission"]["shares_in_use"] == ledgers["media_admission"]["waiting"] == 0
    print(dict(outcomes))
    for ending in ("Generate finished", "Generate INVALID_ARGUMENT", "Generate UNIMPLEMENTED", "Abort OK"):
        assert outcomes[ending] > count / 100, outcomes
