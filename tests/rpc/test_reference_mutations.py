"""Mutated references against servers that take, release and tell of them: nothing is consumed but by a whole one."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.references import reference, steps
from tests.rpc.mutations import mutate, mutate_bytes
from tests.rpc.scripted_role import ScriptedRole
from tests.sessions import plain
from triptych.core.encoded import EncoderReference
from triptych.roles.contract import TransferOutcome
from triptych.wire.codec_reference import ReferenceCodec
from triptych.wire.codec_session import Endpoint
from triptych.wire.gen import encoder_pb2, generation_pb2, lifecycle_pb2
from triptych.wire.handoff_signature import HandoffSigner
from triptych.wire.status import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.rpc.conftest import Serve

COUNT = 1500
SECONDS = 30.0
SIGNER = HandoffSigner("a secret of our own")
GOOD = (reference(name="one"), reference(steps(5, (0, 3)), name="two"))
ANSWERS = {
    "Generate": {"OK", "INVALID_ARGUMENT", "UNAUTHENTICATED"},
    "Abort": {"OK", "INVALID_ARGUMENT", "UNAUTHENTICATED"},
    "TransferEncoderCache": {"OK", "INVALID_ARGUMENT", "UNAUTHENTICATED"},
}


def mutated(rng: random.Random, good: bytes, other: bytes) -> tuple[bytes, str]:
    """A reference's bytes, perhaps changed in a field, perhaps in themselves, and what was done to them."""
    message = encoder_pb2.EncoderCacheRef.FromString(good)
    story: list[str] = []
    if rng.random() < 0.6:
        story.append(mutate(rng, message))
    data = message.SerializeToString(deterministic=True)
    if rng.random() < 0.4:
        data = mutate_bytes(rng, data, other, story)
    return data, ", ".join(story) or "unchanged"


def calls(rng: random.Random, good: list[bytes]) -> Iterator[tuple[str, Any, str]]:
    """Messages of every call that has a reference in it."""
    for number in range(COUNT):
        data, story = mutated(rng, *rng.sample(good, 2))
        rpc = rng.choice(list(ANSWERS))
        message: Any = {
            "Generate": generation_pb2.GenerateRequest(request_id=f"{number}", model="scripted", prompt="hi"),
            "Abort": lifecycle_pb2.AbortRequest(),
            "TransferEncoderCache": encoder_pb2.TransferEncoderCacheRequest(transfer_id="t", consumer_instance_id="c"),
        }[rpc]
        try:
            target = message.encoder_cache.add() if rpc == "Generate" else message.encoder_cache
            target.MergeFromString(data)
        except UNREADABLE:
            continue  # how bytes are refused is another test's
        target.SetInParent()
        yield rpc, message, f"{rpc}: {story}"


@pytest.mark.parametrize("signer", [None, SIGNER], ids=["open", "signed"])
async def test_nothing_is_consumed_but_by_a_whole_reference(serve: Serve, signer: HandoffSigner | None) -> None:
    role = ScriptedRole(description={"encodes": True, "takes_rows": True, "row_backend": "memory"})
    waiting = {one.item.handle.session_id: TransferOutcome.NOT_STARTED for one in GOOD}
    role.outputs.update(waiting)
    served = await serve(role, signer=signer)
    codec = ReferenceCodec((Endpoint("encoder.example", 50051, "grpc"),), signer)
    whole = {one.item.handle.session_id: plain(one) for one in GOOD}
    outcomes: Counter[tuple[str, str]] = Counter()
    async with grpc.aio.insecure_channel(served.address) as channel:
        for rpc, message, story in calls(random.Random(5), [codec.encode(one).SerializeToString() for one in GOOD]):
            service = "Inference" if rpc == "Generate" else "Control"
            call = channel.unary_stream(f"/openengine.v1.{service}/{rpc}")(message.SerializeToString(), timeout=SECONDS)
            with suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            status = (await call.code()).name
            assert status in ANSWERS[rpc], (story, await call.details())
            outcomes[rpc, status] += 1
            if status == "OK":  # nothing that counts was changed
                sent = message.encoder_cache[0] if rpc == "Generate" else message.encoder_cache
                assert plain(codec.decode(sent)) in whole.values(), story
            else:
                assert await call.details(), story
                assert role.outputs == waiting, story
            role.outputs.update(waiting)
    taken = [one for request in role.requests for one in request.references]
    assert taken
    for one in taken:
        assert isinstance(one, EncoderReference)
        assert plain(one) == whole[one.item.handle.session_id]
    assert role.live == set()
    # Both sides are met often, or the cases would be no test.
    for rpc in ANSWERS:
        assert outcomes[rpc, "OK"] > 40, outcomes
        refused = sum(count for (name, status), count in outcomes.items() if name == rpc and status != "OK")
        assert refused > 100, outcomes
    assert (signer is not None) == any(status == "UNAUTHENTICATED" for _, status in outcomes)
