"""Advertised is what is accepted: every feature of the contract is tried on real engines, offered or not.

A feature says what it takes to find it in GetModelInfo and GetServerInfo, and how it is used. Where an engine
advertises it, using it must work; where not, the same use must be refused with the status of the contract. A last test
walks the messages: no field that promises something is without a feature.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from tests.checkpoints import write_checkpoint
from tests.rpc.features import FEATURES, FILES, INVALID, SAID_ONLY, SECONDS, Engine, refused
from tests.rpc.real_engines import Build, host, listen
from triptych.cli.flags import model_directory
from triptych.cli.media import MediaFlags
from triptych.cli.options import EngineOptions
from triptych.core.config import MIB
from triptych.roles.contract import RoleName
from triptych.transport.memory import MemoryExchange
from triptych.wire.gen import kv_pb2, lifecycle_pb2, model_pb2, openengine_pb2_grpc, server_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ENCODER = server_pb2.ENGINE_ROLE_ENCODER
SMALL: dict[str, Any] = {"kv_cache_bytes": 8 * MIB, "max_batched_tokens": 256}
ENGINES: dict[str, dict[str, Any]] = {
    "everything": {"max_running_requests": 8},
    "videos": {"max_running_requests": 8},
    "little": {"max_running_requests": 1, "max_loras": 0, "kv_events": False},
    "prefill": {"max_running_requests": 8, "max_loras": 0},
    "decode": {"max_running_requests": 8, "max_loras": 0},
    "encoder": {},
    "consumer": {"max_running_requests": 8, "max_loras": 0},
}
OWN = dict.fromkeys(("everything", "videos", "little", "consumer"), RoleName.AGGREGATED)
"""The role of an engine that is not named for it."""
PEERS = {"prefill": RoleName.DECODE, "decode": RoleName.PREFILL, "consumer": RoleName.ENCODER}
"""The role of the engine beside it."""
NO_URLS = {"prefill"}
READS_VIDEOS = {"videos", "encoder", "consumer"}


@pytest.fixture(params=ENGINES)
async def served(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Engine]:
    async with AsyncExitStack() as cleanup:
        yield await serve(request.param, tmp_path, monkeypatch, cleanup)


async def serve(kind: str, scratch: Path, monkeypatch: pytest.MonkeyPatch, cleanup: AsyncExitStack) -> Engine:
    model = "demo"
    if kind == "little":  # text only, and no grammar library
        model = str(write_checkpoint("qwen3", scratch / "model"))
        monkeypatch.setattr("triptych.cli.assemble.guided_available", lambda: False)
    elif kind in READS_VIDEOS:
        model = str(write_checkpoint("vl-deepstack", scratch / "model", videos=True))
    port = await host(FILES, cleanup)
    media = MediaFlags(fetch_hosts=() if kind in NO_URLS else None, fetch_ports=(port,), fetch_private_networks=True)
    options, exchange = EngineOptions(**SMALL, **ENGINES[kind]), MemoryExchange()
    own = OWN.get(kind) or RoleName(kind)
    build = Build(model, options, exchange, requires_rows=kind == "consumer", media=media)
    channel = await listen(own, build, cleanup)
    peer = await listen(PEERS[kind], build, cleanup) if kind in PEERS else None
    control = openengine_pb2_grpc.ControlStub(channel)
    info = await control.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=SECONDS)
    described = await control.GetModelInfo(
        model_pb2.GetModelInfoRequest(model=info.supported_models[0]), timeout=SECONDS
    )
    inference = openengine_pb2_grpc.InferenceStub(channel)
    beside = None if peer is None else openengine_pb2_grpc.InferenceStub(peer)
    return Engine(
        inference, control, described, info, model_directory(model), scratch, beside, f"http://127.0.0.1:{port}"
    )


async def test_what_is_advertised_works_and_the_rest_is_refused(served: Engine) -> None:
    # What belongs to another engine of those that work together is refused as such.
    role = served.server.engine_role
    alone = role == server_pb2.ENGINE_ROLE_AGGREGATED and not served.model.HasField("encoder")
    other_role = () if alone else (INVALID,)
    tried = set()
    for name, feature in FEATURES.items():
        advertised = feature.advertised(served)
        try:
            if advertised:
                await feature.use(served)
            else:
                await refused(feature.refusal, feature.use(served), *other_role)
        except BaseException as error:
            error.add_note(f"feature: {name}, advertised: {advertised}")
            raise
        tried.add((name, advertised))
    offered = {name for name, advertised in tried if advertised}
    # The engines differ, or the test would be blind on one side.
    assert ("session that is taken" in offered) == (role == server_pb2.ENGINE_ROLE_DECODE)
    assert ("session that is made" in offered) == ("abort of a session" in offered) == served.prefills
    assert ("encoder output" in offered) == ("abort of an output" in offered) == (role == ENCODER)
    assert ("encoder input" in offered) == served.model.encoder.requires_handoff
    assert ("text" in offered) == ("several outputs" in offered) == (role != ENCODER)
    opens = (served.peer is None and served.model.supports_multimodal) or served.prefills
    assert ("image by bytes" in offered) == ("image by data URI" in offered) == ("media options" in offered) == opens
    assert ("video" in offered) == (opens and "video_token_id" in served.model.extra.fields)
    assert offered.isdisjoint({"image by URL", "video by URL"}) == (served.prefills or not opens)
    if alone:
        assert ("image by bytes" in offered) == ("lora" in offered) == ("guided REGEX" in offered)


async def test_every_rpc_answers(served: Engine) -> None:
    control = served.control
    health = await control.Health(lifecycle_pb2.HealthRequest(include_inference_probe=True), timeout=SECONDS)
    assert health.state == lifecycle_pb2.HEALTH_STATE_READY, health
    names = {check.name for check in health.checks}
    assert ("kv_connector" in names) == served.server.kv_connector.enabled
    assert ("encoder_connector" in names) == served.model.HasField("encoder")
    assert {"grpc", "scheduler", "model", "inference_probe"} <= names
    sources = await control.GetKvEventSources(kv_pb2.GetKvEventSourcesRequest(), timeout=SECONDS)
    assert bool(sources.sources) == ("kv_event_heartbeat_interval_ms" in served.server.extra.fields)
    for source in sources.sources:
        assert (source.transport, source.encoding, source.data_parallel_rank) == ("grpc", "protobuf", 0)
        assert source.endpoint_addr.host not in ("", "0.0.0.0", "::")
        assert source.endpoint_addr.port > 0


PROMISING = (
    server_pb2.ServerInfo,
    server_pb2.DeploymentCapacity,
    server_pb2.ParallelismInfo,
    model_pb2.ModelInfo,
    model_pb2.GenerationCapabilities,
    model_pb2.LogprobCapabilities,
    model_pb2.GuidedDecodingCapabilities,
    model_pb2.MultimodalCapabilities,
    model_pb2.TokenizerInfo,
    model_pb2.EncoderCapabilities,
    kv_pb2.KvConnectorInfo,
    kv_pb2.KvEndpoint,
)


def set_fields(message: Any) -> set[str]:
    """The names of all fields that are set in a message and in those inside it."""
    found = set()
    for field, value in message.ListFields():
        if message.DESCRIPTOR.full_name.startswith("openengine."):
            found.add(f"{message.DESCRIPTOR.name}.{field.name}")
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.file.package == "openengine.v1":
            for one in value if field.is_repeated else [value]:
                found |= set_fields(one)
    return found


async def test_no_promise_is_without_a_feature(served: Engine) -> None:
    covered = {field for feature in FEATURES.values() for field in feature.fields}
    said = set_fields(served.server) | set_fields(served.model)
    assert said - covered - SAID_ONLY == set()
    known = {f"{message.DESCRIPTOR.name}.{name}" for message in PROMISING for name in message.DESCRIPTOR.fields_by_name}
    assert known >= SAID_ONLY
    assert covered <= known
