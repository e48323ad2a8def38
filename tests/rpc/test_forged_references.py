"""Forged references, checksum and all, against real engines: refused or failed as documented, and nothing breaks."""

from __future__ import annotations

import random
import struct
import uuid
from collections import Counter
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from tests.drawings import shape_png
from tests.rpc.features import PICTURE
from tests.rpc.real_engines import Build, listen
from triptych.cli.options import EngineOptions
from triptych.core.config import MIB
from triptych.roles.contract import RoleName
from triptych.transport.memory import MemoryExchange
from triptych.wire.codec_reference import reference_content
from triptych.wire.gen import encoder_pb2, error_pb2, lifecycle_pb2, openengine_pb2_grpc, server_pb2
from triptych.wire.gen import generation_pb2 as g
from triptych.wire.handoff_signature import checksum

if TYPE_CHECKING:
    from collections.abc import Callable

Ref = encoder_pb2.EncoderCacheRef
SECONDS = 60.0
COUNT = 200
PNG = shape_png("circle", "red")
HEAD, ROWS, PLAN = struct.Struct("<B16s"), struct.Struct("<IIIB"), struct.Struct("<BB3IIII32s32s")
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}
FAILURES = {error_pb2.ERROR_CODE_KV_SESSION_NOT_FOUND, error_pb2.ERROR_CODE_KV_TRANSFER_FAILED}


class Pair(NamedTuple):
    """An encoder, and an engine that takes media by their rows only."""

    encoder: Any
    encoder_control: Any
    consumer: Any
    consumer_control: Any

    async def encode(self) -> Ref:
        item = g.MediaItem(modality=g.MODALITY_IMAGE, raw_bytes=PNG)
        request = asked(PICTURE, media=[item], encoder=encoder_pb2.EncoderOptions())
        (event,) = [event async for event in self.encoder.Generate(request, timeout=SECONDS)]
        return Ref.FromString(event.encoder_ready.encoder_cache[0].SerializeToString())

    async def outcome(self, made: Ref) -> int:
        question = encoder_pb2.TransferEncoderCacheRequest(
            encoder_cache=made, transfer_id="t", consumer_instance_id="c"
        )
        return int((await self.encoder_control.TransferEncoderCache(question, timeout=SECONDS)).outcome)

    async def use(self, *made: Ref) -> str:
        """How a request with these references ended."""
        call = self.consumer.Generate(asked(PICTURE * len(made) + "what?", encoder_cache=made), timeout=SECONDS)
        events = []
        with suppress(grpc.aio.AioRpcError):
            events += [event async for event in call]
        status = (await call.code()).name
        if status != "OK":
            assert await call.details()
            return str(status)
        if events[-1].WhichOneof("event") == "error":
            assert events[-1].error.code in FAILURES, events[-1]
            assert events[-1].error.retryable
            return "failed"
        assert events[-1].WhichOneof("event") == "finished"
        return "finished"


def asked(prompt: str, **fields: Any) -> g.GenerateRequest:
    return g.GenerateRequest(
        request_id=uuid.uuid4().hex,
        model="demo",
        prompt=prompt,
        sampling=g.SamplingParams(temperature=0),
        stopping=g.StoppingOptions(max_tokens=2),
        **fields,
    )


async def pair(cleanup: AsyncExitStack) -> Pair:
    options = EngineOptions(kv_cache_bytes=8 * MIB, max_batched_tokens=256, max_loras=0, kv_events=False)
    build = Build("demo", options, MemoryExchange(), requires_rows=True)
    stubs = []
    for role in (RoleName.ENCODER, RoleName.AGGREGATED):
        channel = await listen(role, build, cleanup)
        stubs += [openengine_pb2_grpc.InferenceStub(channel), openengine_pb2_grpc.ControlStub(channel)]
    return Pair(*stubs)


# -- forgeries --------------------------------------------------------------------------------------


def resealed(made: Ref) -> Ref:
    """With a checksum that fits."""
    version, body = made.opaque_state[0], made.opaque_state[HEAD.size :]
    made.opaque_state = HEAD.pack(version, bytes.fromhex(checksum(reference_content(made, version, body)))) + body
    return made


def name(rng: random.Random, made: Ref) -> None:
    made.cache_id = rng.choice(["x", "../../etc/passwd", "é" * 100, made.cache_id[:-1] + "!", made.cache_id.upper()])


def instance(rng: random.Random, made: Ref) -> None:
    made.instance_id = rng.choice(["x", "/", made.instance_id[::-1]])


def backend(rng: random.Random, made: Ref) -> None:
    made.transfer_backend = rng.choice(["nixl", "shared-dir", "MEMORY", "pigeons"])


def expiry(rng: random.Random, made: Ref) -> None:
    made.expires_unix_nanos = rng.choice([0, 1, made.expires_unix_nanos - 10**12])


def rows(rng: random.Random, made: Ref) -> None:
    numbers = list(ROWS.unpack_from(made.opaque_state, HEAD.size))
    at = rng.randrange(3)
    numbers[at] = rng.choice([0, 1, numbers[at] + 1, numbers[at] * 2, 2**31, 2**32 - 1])
    rest = made.opaque_state[HEAD.size + ROWS.size :]
    made.opaque_state = made.opaque_state[: HEAD.size] + ROWS.pack(*numbers) + rest


def dtype(rng: random.Random, made: Ref) -> None:
    word = rng.choice([b"bfloat16", b"int8", b"float3", b"f", b"complex128"])
    numbers = list(ROWS.unpack_from(made.opaque_state, HEAD.size))
    rest = made.opaque_state[HEAD.size + ROWS.size + numbers[3] :]
    numbers[3] = len(word)
    made.opaque_state = made.opaque_state[: HEAD.size] + ROWS.pack(*numbers) + word + rest


def state(rng: random.Random, made: Ref) -> None:
    made.opaque_state += rng.randbytes(rng.choice([1, 8, 16, 60_000]))


def plan(rng: random.Random, made: Ref) -> None:
    head = list(PLAN.unpack_from(made.plan))
    at = rng.choice([1, 2, 3, 4, 5])  # modality, grid, encoder tokens
    head[at] = rng.choice([2, 3, 7, 255]) if at == 1 else rng.choice([1, head[at] + 1, head[at] * 2, 2**31 - 1])
    made.plan = PLAN.pack(*head) + made.plan[PLAN.size :]


def runs(rng: random.Random, made: Ref) -> None:
    head, numbers = list(PLAN.unpack_from(made.plan)), struct.unpack_from("<2I", made.plan, PLAN.size)
    kind = rng.randrange(4)
    if kind == 0:  # longer or shorter
        numbers = (0, rng.choice([1, numbers[1] - 1, numbers[1] + 1, 2**20, 2**32 - 1]))
    elif kind == 1:  # in two
        head[6], numbers = 2, (0, 1, 0, numbers[1] - 1)
    elif kind == 2:  # with a framing position
        head[7], numbers = 1, (0, numbers[1] + 1, rng.choice([0, 3]))
    else:  # so many that nothing could hold them
        head[6], numbers = 4000, (0, 1, *(250, 1) * 3999)
    made.plan = PLAN.pack(*head) + struct.pack(f"<{len(numbers)}I", *numbers)


def fingerprint(rng: random.Random, made: Ref) -> None:
    made.plan = PLAN.pack(*PLAN.unpack_from(made.plan)[:-1], rng.randbytes(32)) + made.plan[PLAN.size :]


FORGERIES: list[Callable[[random.Random, Ref], None]] = [
    *(name, instance, backend, expiry, rows, dtype, state, plan, runs, fingerprint)
]


async def test_forged_references_break_nothing() -> None:
    rng = random.Random(3)
    outcomes: Counter[str] = Counter()
    async with AsyncExitStack() as cleanup:
        engines = await pair(cleanup)
        good = await engines.encode()
        for number in range(COUNT):
            forge = FORGERIES[number % len(FORGERIES)]
            forged = Ref.FromString(good.SerializeToString())
            forge(rng, forged)
            if forged == good:
                continue
            made = [resealed(forged)]
            if rng.random() < 0.2:  # among good ones
                made.insert(rng.randrange(2), good)
            outcome = await engines.use(*made)
            assert outcome in REFUSALS or outcome == "failed", (forge.__name__, outcome, forged)
            outcomes[f"{forge.__name__} {outcome}"] += 1
            became = await engines.outcome(good)
            if outcome == "failed" and len(made) > 1 and became == encoder_pb2.TRANSFER_OUTCOME_FINISHED:
                good = await engines.encode()  # its rows had come before the other's failed to
            else:
                assert became == encoder_pb2.TRANSFER_OUTCOME_NOT_STARTED, forge.__name__
        # Both engines are well, and what was there all the time is used once.
        assert [await engines.use(good) for _ in range(2)] == ["finished", "failed"]
        assert await engines.outcome(good) == encoder_pb2.TRANSFER_OUTCOME_FINISHED
        for control in (engines.encoder_control, engines.consumer_control):
            health = await control.Health(lifecycle_pb2.HealthRequest(), timeout=SECONDS)
            assert health.state == lifecycle_pb2.HEALTH_STATE_READY, health
            load = await control.GetLoad(server_pb2.GetLoadRequest(), timeout=SECONDS)
            assert (load.running_requests, load.queued_requests) == (0, 0)
    kinds = {outcome.split()[1] for outcome in outcomes}
    assert {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "failed"} <= kinds, outcomes
