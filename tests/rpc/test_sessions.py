"""Sessions on their way out of a server, and back to it to be let go."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from tests.rpc.scripted_role import SPANS, ScriptedRole, answer
from triptych.core.errors import InvalidRequest, KvSessionNotFound, Unauthenticated, UnsupportedFeature
from triptych.core.events import PrefillReady, Usage
from triptych.core.handles import Handle, KvLayout
from triptych.core.logprobs import CandidateColumns, TokenLogprob
from triptych.core.request import GenerateRequest
from triptych.core.session import FirstToken, KvSession, SealedSession
from triptych.rpc.address import Address
from triptych.rpc.inference import Inference
from triptych.rpc.message_bytes import MessageBytes
from triptych.wire.codec import encode_request
from triptych.wire.codec_reference import ReferenceCodec
from triptych.wire.codec_session import SessionCodec
from triptych.wire.gen import kv_pb2, lifecycle_pb2
from triptych.wire.handoff_signature import HandoffSigner

if TYPE_CHECKING:
    from tests.rpc.conftest import Serve, Served

LAYOUT = KvLayout(layers=2, kv_heads=1, head_size=8, block_size=16, dtype="float32", itemsize=4)
PLAIN = KvSession(
    handle=Handle("one", "shared-dir", "instance-1", LAYOUT, 1, b"state"),
    plan=None,
    prompt=bytes(32),
    first=(FirstToken(70),),
    seed=1,
    cached_prompt_tokens=0,
    model=bytes(32),
    adapter=b"",
    expires_unix_nanos=2**62,
)
BOTH: dict[str, Any] = {"kv_backend": "shared-dir", "hands_over": True, "takes_over": True}
REQUEST = GenerateRequest("r", "scripted", "hi", handoff=True)


def handing_over(session: KvSession = PLAIN, **description: Any) -> ScriptedRole:
    role = ScriptedRole(script=lambda request: [PrefillReady(request.request_id, session, Usage(2, 1, 0), SPANS)])
    role.description = BOTH | description
    role.sessions.add(session.handle.session_id)
    return role


async def session_of(served: Served) -> PrefillReady:
    events = await served.channel.generate(REQUEST)
    (event,) = [event async for event in events]
    assert isinstance(event, PrefillReady)
    return event


async def test_a_session_travels_sealed_and_comes_back_open(serve: Serve) -> None:
    served = await serve(handing_over())
    ready = await session_of(served)
    assert ready.spans == SPANS
    assert isinstance(ready.session, SealedSession)
    sent = kv_pb2.KvSessionRef.FromString(ready.session.data)
    host, _, port = served.address.rpartition(":")
    assert [(e.host, e.port, e.protocol) for e in sent.endpoints] == [(host, int(port), "grpc")]
    served.role.script = answer
    rest = await served.channel.generate(replace(REQUEST, session=ready.session, handoff=False, request_id="s"))
    await rest.aclose()
    (back,) = [request.session for request in served.role.requests if request.session]
    assert isinstance(back, KvSession)
    assert (back.handle, back.seed) == (PLAIN.handle, PLAIN.seed)


async def test_an_engine_that_takes_none_does_not_open_one(serve: Serve) -> None:
    served = await serve(handing_over(takes_over=False))
    sealed = SealedSession("x", kv_pb2.KvSessionRef(session_id="x").SerializeToString())
    served.role.refusal = UnsupportedFeature("no sessions here")
    with pytest.raises(UnsupportedFeature):
        await served.channel.generate(replace(REQUEST, session=sealed, handoff=False))
    assert served.role.requests[0].session == sealed


async def test_sessions_are_let_go_by_name(serve: Serve) -> None:
    served = await serve(handing_over())
    session = (await session_of(served)).session
    assert isinstance(session, SealedSession)
    assert (await served.channel.get_load()).active_kv_sessions == 1
    assert (await served.channel.abort_session(session)).status == lifecycle_pb2.ABORT_STATUS_ABORTED
    assert (await served.channel.get_load()).active_kv_sessions == 0
    assert (await served.channel.abort_session(session)).status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
    other = SealedSession("two", kv_pb2.KvSessionRef(session_id="two").SerializeToString())
    with pytest.raises(KvSessionNotFound):
        await served.channel.abort_session(other)


async def test_who_hands_nothing_over_has_nothing_to_let_go(serve: Serve) -> None:
    served = await serve()
    target = lifecycle_pb2.AbortRequest(kv_session=kv_pb2.KvSessionRef(session_id="one"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served.control.Abort(target)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_with_a_secret_only_what_is_signed_is_let_go(serve: Serve) -> None:
    served = await serve(handing_over(), signer=HandoffSigner("a secret of our own"))
    forged = SealedSession("one", kv_pb2.KvSessionRef(session_id="one").SerializeToString())
    with pytest.raises(InvalidRequest, match="triptych_version"):  # it is none of ours at all
        await served.channel.abort_session(forged)
    assert served.role.sessions == {"one"}
    session = (await session_of(served)).session
    assert isinstance(session, SealedSession)
    changed = kv_pb2.KvSessionRef.FromString(session.data)
    changed.endpoints[0].port += 1
    with pytest.raises(Unauthenticated):
        await served.channel.abort_session(SealedSession("one", changed.SerializeToString()))
    assert served.role.sessions == {"one"}
    await served.channel.abort_session(session)
    assert served.role.sessions == set()


async def test_a_session_that_cannot_be_written_is_taken_back(serve: Serve) -> None:
    ids = np.arange(400_000, dtype=np.int32)
    many = CandidateColumns(ids, np.zeros(len(ids), np.float32), np.ones(len(ids), np.int32))
    large = replace(PLAIN, first=(FirstToken(70, TokenLogprob(-1.0, 1, many)),))
    served = await serve(handing_over(large))
    call = served.generate("r")
    events = [event async for event in call]
    assert [event.WhichOneof("event") for event in events] == ["error"]
    assert served.role.gone == {"one"}


class LeavingContext:
    """A call whose client leaves at one moment: when the message is on its way, or just before."""

    def __init__(self, *, unsent: bool) -> None:
        self.call: asyncio.Task[None] | None = None
        self.sent: list[bytes] = []
        self._unsent = unsent

    async def read(self) -> bytes:
        return encode_request(REQUEST).SerializeToString()

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_trailing_metadata(self, trailers: object) -> None:
        pass

    async def send_initial_metadata(self, headers: object) -> None:
        if self._unsent:
            assert self.call is not None
            asyncio.get_running_loop().call_soon(self.call.cancel)

    async def write(self, data: bytes) -> None:
        self.sent.append(data)
        assert self.call is not None
        self.call.cancel()
        await asyncio.Event().wait()


@pytest.mark.parametrize("unsent", [False, True])
async def test_a_session_that_may_have_been_read_of_stays(unsent: bool) -> None:
    """Clients leave as soon as they have what they want, before the server hears that the message has arrived."""
    leave = asyncio.Event()
    role = ScriptedRole(script=lambda request: [leave, PrefillReady(request.request_id, PLAIN, Usage(2, 1, 0), SPANS)])
    role.description = BOTH
    role.sessions.add("one")
    inference = Inference(role, SessionCodec(), ReferenceCodec(), MessageBytes())
    context = LeavingContext(unsent=unsent)
    context.call = asyncio.create_task(inference.generate(None, context))
    if not unsent:
        leave.set()
    with pytest.raises(asyncio.CancelledError):
        await context.call
    leave.set()
    await inference.settled()
    assert len(context.sent) == (not unsent)
    assert role.gone == set()
    assert role.answers[0].closed.is_set()


async def test_what_an_engine_says_of_sessions(serve: Serve) -> None:
    served = await serve(handing_over())
    connector = (await served.channel.get_server_info()).kv_connector
    host, _, port = served.address.rpartition(":")
    assert connector == kv_pb2.KvConnectorInfo(
        enabled=True,
        transfer_backend="shared-dir",
        local_endpoints=[kv_pb2.KvEndpoint(host=host, port=int(port), protocol="grpc")],
        supported_protocols=["shared-dir"],
        supports_remote_prefill=True,
        supports_decode_pull=True,
        supports_abort_cleanup=True,
        handoff_profile="triptych.prompt_plan.v1",
    )
    checks = (await served.channel.health()).checks
    assert [check.message for check in checks if check.name == "kv_connector"] == ["shared-dir"]


def test_a_wildcard_is_nowhere_to_connect_to() -> None:
    for host in ("0.0.0.0", "::", ""):
        told = Address(host, 7).connectable
        assert not told.wildcard
        assert told.port == 7
    assert Address("127.0.0.1", 7).connectable == Address("127.0.0.1", 7)
