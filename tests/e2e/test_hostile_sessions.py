"""Sessions that no engine of ours made, or that were changed on their way: refused over real gRPC, nothing consumed."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

import triptych
from tests.e2e.plain_client import PICTURE, SECONDS, Client, client, idle
from tests.e2e.servers import engine_process
from triptych.wire.gen import generation_pb2, kv_pb2, lifecycle_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

DEMO = Path(triptych.__file__).parent / "demo_model"
FLIPS = 300
INVALID = grpc.StatusCode.INVALID_ARGUMENT

Session = kv_pb2.KvSessionRef


def changed(session: Session, change: Callable[[Session], Any]) -> Session:
    copy = Session()
    copy.CopyFrom(session)
    change(copy)
    return copy


def texts(session: Session) -> dict[str, str]:
    """Our attributes."""
    return {key: value.string_value for key, value in session.attributes_struct.fields.items()}


def put(session: Session, key: str, text: str) -> Session:
    return changed(session, lambda copy: copy.attributes_struct.update({key: text}))


def truncated(session: Session) -> Iterator[Session]:
    for key, text in texts(session).items():
        for length in {0, len(text) // 2, len(text) - 1} if text else ():
            yield put(session, key, text[:length])
        yield changed(session, lambda copy, key=key: copy.attributes_struct.fields.pop(key))  # type: ignore[misc]


def forged(session: Session) -> Iterator[Session]:
    """Well-formed, and made by somebody else."""
    yield changed(session, lambda copy: copy.ClearField("attributes_struct"))
    yield changed(session, lambda copy: setattr(copy, "session_id", "f" * 32))
    yield changed(session, lambda copy: setattr(copy, "session_id", "../../../etc/passwd"))
    yield changed(session, lambda copy: setattr(copy, "transfer_backend", "nixl"))
    yield changed(session, lambda copy: setattr(copy, "dp_rank", 1))
    yield changed(session, lambda copy: setattr(copy.endpoints[0], "port", 1))
    yield put(session, "triptych_version", "1")
    yield put(session, "triptych_expires", str(2**63))
    for key, text in texts(session).items():
        if text.isdigit():
            yield put(session, key, str(int(text) + 1))


def oversized(session: Session) -> Iterator[Session]:
    yield put(session, "triptych_plan", "A" * (5 << 20))
    yield put(session, "padding", "A" * (3 << 20))
    yield changed(session, lambda copy: [copy.endpoints.add() for _ in range(1000)])
    yield changed(session, lambda copy: copy.attributes_struct.update({f"k{i}": "" for i in range(10_000)}))
    yield changed(session, lambda copy: setattr(copy, "session_id", "s" * 100_000))


def flipped(session: Session, rng: random.Random) -> bytes:
    """One bit of one of our attributes, as it would arrive."""
    data = bytearray(session.SerializeToString())
    key, text = rng.choice([pair for pair in texts(session).items() if pair[1]])
    at = data.index(text.encode(), data.index(key.encode()) + len(key))
    data[at + rng.randrange(len(text))] ^= 1 << rng.randrange(8)
    return bytes(data)


def nested(depth: int) -> bytes:
    """Attributes with a list in a list in a list."""
    value = b"\x1a\x01x"
    for _ in range(depth):
        inner = b"\x0a" + varint(len(value)) + value
        value = b"\x32" + varint(len(inner)) + inner
    entry = b"\x0a\x01a\x12" + varint(len(value)) + value
    struct = b"\x0a" + varint(len(entry)) + entry
    return b"\x0a\x01s\x2a" + varint(len(struct)) + struct


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def request_with(data: bytes) -> bytes:
    """A request whose session is these bytes."""
    request = generation_pb2.GenerateRequest(request_id="hostile", model="demo", prompt=f"{PICTURE}what is it?")
    kv = b"\x0a" + varint(len(data)) + data
    return request.SerializeToString() + b"\x42" + varint(len(kv)) + kv


class Raw:
    """Sends bytes as they are."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._generate = channel.unary_stream("/openengine.v1.Inference/Generate")

    async def status(self, data: bytes) -> grpc.aio.AioRpcError | None:
        """How the request was refused; None where it was not."""
        try:
            async for _ in self._generate(request_with(data), timeout=SECONDS):
                pass
        except grpc.aio.AioRpcError as error:
            return error
        return None


@asynccontextmanager
async def raw(address: str) -> AsyncIterator[Raw]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield Raw(channel)


async def healthy(*clients: Client) -> None:
    for each in clients:
        health = await each.control.Health(lifecycle_pb2.HealthRequest(), timeout=SECONDS)
        assert health.state == lifecycle_pb2.HEALTH_STATE_READY


def test_what_is_not_as_it_was_made_is_refused(tmp_path: Path) -> None:
    flags = ("--kv-directory", str(tmp_path / "kv"))
    with (
        engine_process("demo", "--role", "prefill", *flags) as p,
        engine_process("demo", "--role", "decode", *flags) as d,
    ):
        asyncio.run(unsigned(p.address, d.address))


async def unsigned(prefill: str, decode: str) -> None:
    rng = random.Random(7)
    async with client(prefill) as p, client(decode) as d, raw(decode) as hostile:
        session = await p.prefill("one")
        messages = [each.SerializeToString() for kind in (truncated, forged, oversized) for each in kind(session)]
        # Without the name of the profile, which stands last and may be lost: every cut takes what a session needs.
        whole = changed(session, lambda copy: copy.ClearField("handoff_profile")).SerializeToString()
        messages += [whole[:length] for length in range(1, len(whole), 97)]
        messages += [flipped(session, rng) for _ in range(FLIPS)]
        messages += [nested(10_000), nested(60), b"\xff" * 100]
        for message in messages:
            error = await hostile.status(message)
            assert error is not None, message[:300]
            assert error.code() is INVALID, (error.code(), error.details(), message[:300])
        assert (await p.load()).active_kv_sessions == 1
        await healthy(p, d)
        assert await d.decode("one", session) == "red"  # none of all that has consumed it
        await idle(prefill)
        await idle(decode)


def test_with_a_secret_what_it_did_not_sign_is_refused(tmp_path: Path) -> None:
    flags = ("--kv-directory", str(tmp_path / "kv"))
    secret = {"TRIPTYCH_HANDOFF_SECRET": "1" * 32}
    with (
        engine_process("demo", "--role", "prefill", *flags, environment=secret) as p,
        engine_process("demo", "--role", "decode", *flags, environment=secret) as d,
    ):
        asyncio.run(signed(p.address, d.address))


async def signed(prefill: str, decode: str) -> None:
    rng = random.Random(8)
    async with client(prefill) as p, client(decode) as d, raw(decode) as hostile:
        session = await p.prefill("one")
        key = "triptych_signature"
        signature = texts(session)[key]
        wrong = [put(session, key, signature[:-1]), put(session, key, signature[::-1]), put(session, key, "")]
        wrong += [changed(session, lambda copy: copy.attributes_struct.fields.pop(key)), *forged(session)]
        for each in wrong:
            error = await hostile.status(each.SerializeToString())
            assert error is not None
            expected = grpc.StatusCode.UNAUTHENTICATED if each.HasField("attributes_struct") else INVALID
            assert error.code() is expected, (error.details(), each)
            assert signature not in (error.details() or "")
        for _ in range(FLIPS):
            error = await hostile.status(flipped(session, rng))
            assert error is not None
            assert error.code() in (grpc.StatusCode.UNAUTHENTICATED, INVALID)  # the latter for what is no text
        await healthy(p, d)
        assert await d.decode("one", session) == "red"
        await idle(prefill)


@pytest.fixture(scope="module")
def other_settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with another image size."""
    directory = tmp_path_factory.mktemp("other") / "demo"
    shutil.copytree(DEMO, directory)
    file = directory / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["image_mean"] = [0.4, 0.5, 0.5]
    file.write_text(json.dumps(settings))
    return directory


def test_another_processor_is_named(tmp_path: Path, other_settings: Path) -> None:
    flags = ("--kv-directory", str(tmp_path / "kv"))
    with (
        engine_process("demo", "--role", "prefill", *flags) as p,
        engine_process(str(other_settings), "--served-name", "demo", "--role", "decode", *flags) as other,
        engine_process("demo", "--role", "decode", "--dtype", "bfloat16", *flags) as smaller,
        engine_process("demo", "--role", "decode", *flags) as d,
    ):
        asyncio.run(mismatched(p.address, d.address, {other.address: "processor", smaller.address: "bfloat16"}))


async def mismatched(prefill: str, decode: str, others: dict[str, str]) -> None:
    async with client(prefill) as p, client(decode) as d:
        session = await p.prefill("one")
        for address, word in others.items():
            async with raw(address) as other, client(address) as asked:
                error = await other.status(session.SerializeToString())
                assert error is not None
                assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert word in (error.details() or "")
                await healthy(asked)
        assert await d.decode("one", session) == "red"
        await idle(prefill)
