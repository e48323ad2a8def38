"""The Control service over a real connection, and whether what it advertises is true."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import pytest

import triptych
from tests.rpc.scripted_role import ScriptedRole
from triptych.core.media import Modality
from triptych.roles.contract import HealthCheck, HealthState
from triptych.wire.gen import (
    encoder_pb2,
    generation_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    openengine_pb2,
    server_pb2,
)

if TYPE_CHECKING:
    from tests.rpc.conftest import Serve, Served


async def refused(call: Any) -> grpc.StatusCode:
    """The status of a unary call that does not succeed."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.details()
    assert "Traceback" not in caught.value.details()
    code: grpc.StatusCode = caught.value.code()
    return code


async def model_info(served: Served) -> model_pb2.ModelInfo:
    info: model_pb2.ModelInfo = await served.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="scripted"))
    return info


async def test_server_info(serve: Serve) -> None:
    served = await serve()
    info = await served.control.GetServerInfo(server_pb2.GetServerInfoRequest())
    assert (info.engine_name, info.engine_version) == ("triptych", triptych.__version__)
    assert info.engine_role == server_pb2.ENGINE_ROLE_AGGREGATED
    assert info.instance_id == "instance-1"
    assert list(info.supported_models) == ["scripted"]
    assert (info.schema_revision, info.minimum_client_revision) == (1, 1)
    assert info.schema_release == "768a93c7b44e40f28c692ad0b471a8f2"
    assert info.parallelism.tensor_parallel_size == 1
    assert info.parallelism.HasField("data_parallel_rank")
    assert info.kv_connector.HasField("enabled")
    assert not info.kv_connector.enabled
    assert (info.capacity.kv_block_size, info.capacity.total_kv_blocks) == (16, 100)
    assert (info.capacity.max_running_requests, info.capacity.max_batched_tokens) == (8, 512)
    assert dict(info.extra) == {"device": "cpu", "dtype": "float32"}


@pytest.mark.parametrize("name", ["scripted", "/models/scripted"])
async def test_model_info_by_served_name_and_by_id(serve: Serve, name: str) -> None:
    served = await serve()
    info = await served.control.GetModelInfo(model_pb2.GetModelInfoRequest(model=name))
    assert (info.model_id, info.served_model_name) == ("/models/scripted", "scripted")
    assert list(info.served_model_aliases) == ["/models/scripted"]
    assert info.max_context_length == 4096
    assert (info.tokenizer.source, info.tokenizer.mode) == ("/models/scripted", "auto")
    assert info.multimodal_capabilities.routing_image_token_id == 42


async def test_a_text_only_model_has_no_multimodal_capabilities(serve: Serve) -> None:
    served = await serve(ScriptedRole(modalities=()))
    info = await model_info(served)
    assert info.HasField("supports_multimodal")
    assert not info.supports_multimodal
    assert not info.HasField("multimodal_capabilities")


@pytest.mark.parametrize(
    ("name", "status"), [("", grpc.StatusCode.INVALID_ARGUMENT), ("other", grpc.StatusCode.NOT_FOUND)]
)
async def test_model_info_of_another_model(serve: Serve, name: str, status: grpc.StatusCode) -> None:
    served = await serve()
    assert await refused(served.control.GetModelInfo(model_pb2.GetModelInfoRequest(model=name))) is status


async def test_load(serve: Serve) -> None:
    served = await serve()
    before = time.time_ns()
    load = await served.control.GetLoad(server_pb2.GetLoadRequest())
    assert before <= load.timestamp_unix_nanos <= time.time_ns()
    assert load.instance_id == "instance-1"
    assert load.HasField("running_requests")
    assert (load.running_requests, load.queued_requests) == (0, 2)
    assert (load.used_kv_blocks, load.total_kv_blocks) == (3, 100)
    assert (load.running_tokens, load.waiting_tokens) == (40, 50)
    assert (load.prefill_batch_size, load.decode_batch_size) == (1, 0)
    assert not load.HasField("active_kv_sessions")
    assert len(load.ranks) == 0


async def test_load_per_rank_is_one_rank(serve: Serve) -> None:
    served = await serve()
    load = await served.control.GetLoad(server_pb2.GetLoadRequest(include_per_rank=True))
    (rank,) = load.ranks
    assert rank.HasField("data_parallel_rank")
    assert (rank.data_parallel_rank, rank.used_kv_blocks, rank.total_kv_blocks) == (0, 3, 100)


@pytest.mark.parametrize(
    ("states", "worst"),
    [
        ([], HealthState.READY),
        ([HealthState.READY, HealthState.DEGRADED], HealthState.DEGRADED),
        ([HealthState.DEGRADED, HealthState.STARTING], HealthState.STARTING),
        ([HealthState.NOT_READY, HealthState.STARTING], HealthState.NOT_READY),
    ],
)
async def test_health_is_its_worst_check(serve: Serve, states: list[HealthState], worst: HealthState) -> None:
    checks = tuple(HealthCheck(f"part {number}", state, "why") for number, state in enumerate(states))
    served = await serve(ScriptedRole(checks=checks))
    health = await served.control.Health(lifecycle_pb2.HealthRequest())
    assert health.state == worst
    assert [(check.name, check.state) for check in health.checks[1:]] == [(check.name, check.state) for check in checks]
    assert health.checks[0].name == "grpc"


async def test_health_probes_on_request_only(serve: Serve) -> None:
    served = await serve()
    health = await served.control.Health(lifecycle_pb2.HealthRequest(include_inference_probe=True))
    assert "inference_probe" in [check.name for check in health.checks]
    health = await served.control.Health(lifecycle_pb2.HealthRequest())
    assert "inference_probe" not in [check.name for check in health.checks]


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"model": "scripted"}, lifecycle_pb2.HEALTH_STATE_READY),
        ({"model": "other"}, lifecycle_pb2.HEALTH_STATE_NOT_READY),
        ({"role": server_pb2.ENGINE_ROLE_AGGREGATED}, lifecycle_pb2.HEALTH_STATE_READY),
        ({"role": server_pb2.ENGINE_ROLE_PREFILL}, lifecycle_pb2.HEALTH_STATE_NOT_READY),
        ({"role": 77}, lifecycle_pb2.HEALTH_STATE_READY),
    ],
)
async def test_health_for_a_model_and_a_role(serve: Serve, fields: dict[str, Any], state: int) -> None:
    served = await serve()
    assert (await served.control.Health(lifecycle_pb2.HealthRequest(**fields))).state == state


async def test_abort_by_id(serve: Serve) -> None:
    served = await serve(ScriptedRole(live={"live"}, finished={"done"}))
    abort = served.control.Abort
    response = await abort(lifecycle_pb2.AbortRequest(request_id="live"))
    assert response.status == lifecycle_pb2.ABORT_STATUS_ABORTED
    response = await abort(lifecycle_pb2.AbortRequest(request_id="done"))
    assert response.status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
    assert await refused(abort(lifecycle_pb2.AbortRequest(request_id="unknown"))) is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("live", "status"),
    [(set(), lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED), ({"a", "b"}, lifecycle_pb2.ABORT_STATUS_ABORTED)],
)
async def test_abort_all(serve: Serve, live: set[str], status: int) -> None:
    served = await serve(ScriptedRole(live=live))
    response = await served.control.Abort(lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests()))
    assert response.status == status
    assert str(len(live)) in response.message


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ({}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"request_id": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"kv_session": kv_pb2.KvSessionRef()}, grpc.StatusCode.UNIMPLEMENTED),
        ({"encoder_cache": encoder_pb2.EncoderCacheRef()}, grpc.StatusCode.UNIMPLEMENTED),
    ],
)
async def test_abort_of_other_targets(serve: Serve, target: dict[str, Any], status: grpc.StatusCode) -> None:
    served = await serve(ScriptedRole(live={"live"}))
    assert await refused(served.control.Abort(lifecycle_pb2.AbortRequest(**target))) is status


UNOFFERED = {
    "LoadLora": lora_pb2.LoadLoraRequest(),
    "UnloadLora": lora_pb2.UnloadLoraRequest(),
    "ListLoras": lora_pb2.ListLorasRequest(),
    "GetKvEventSources": kv_pb2.GetKvEventSourcesRequest(),
    "SubscribeKvEvents": kv_pb2.SubscribeKvEventsRequest(),
    "TransferEncoderCache": encoder_pb2.TransferEncoderCacheRequest(),
    "Shutdown": lifecycle_pb2.ShutdownRequest(),
}


@pytest.mark.parametrize("rpc", sorted(UNOFFERED))
async def test_what_is_not_offered_is_unimplemented(serve: Serve, rpc: str) -> None:
    served = await serve()
    call = getattr(served.control, rpc)(UNOFFERED[rpc])
    assert await refused(call.read() if rpc == "SubscribeKvEvents" else call) is grpc.StatusCode.UNIMPLEMENTED


def test_every_rpc_of_the_contract_is_covered() -> None:
    methods = openengine_pb2.DESCRIPTOR.services_by_name["Control"].methods_by_name.keys()
    assert set(methods) == {"GetServerInfo", "GetModelInfo", "GetLoad", "Health", "Abort", *UNOFFERED}


async def test_an_unexpected_error_is_internal(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedRole):
        def load(self) -> Any:
            raise KeyError("secret")

    served = await serve(Broken())
    assert await refused(served.control.GetLoad(server_pb2.GetLoadRequest())) is grpc.StatusCode.INTERNAL
    assert "secret" in caplog.text


async def test_trace_context_is_checked_on_every_call_and_routing_keys_are_not(serve: Serve) -> None:
    served = await serve()
    request = lifecycle_pb2.HealthRequest()
    code = await refused(served.control.Health(request, metadata=(("traceparent", "x"),)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    await served.control.Health(request, metadata=(("openengine-priority", "5"),))


async def accepts(served: Served, **fields: Any) -> bool:
    """Whether a request with these fields is answered; refused means UNIMPLEMENTED and nothing else."""
    call = served.generate(**fields)
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    code = await call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED)
    return bool(code is grpc.StatusCode.OK)


async def test_every_flag_says_what_is_accepted(serve: Serve) -> None:
    served = await serve()
    info = await model_info(served)
    generation = info.generation
    multimodal = info.multimodal_capabilities
    options = generation_pb2.GenerateRequest().media_options
    options.update({"image": {"max_pixels": 1}})
    flags = {
        "text": (info.supports_text_input, {"prompt": "hi"}),
        "ids": (info.supports_token_ids_input, {"prompt": None, "token_ids": {"ids": [1]}}),
        "lora": (info.supports_lora, {"lora_name": "a"}),
        "prompt logprobs": (generation.prompt_logprobs.supported, {"response": {"return_prompt_logprobs": True}}),
        "output logprobs": (generation.output_logprobs.supported, {"response": {"return_output_logprobs": True}}),
        "guided": (generation.guided_decoding.supported, {"guided": {"json_object": {}}}),
        "priority": (generation.supports_priority, {"metadata": [("openengine-priority", "1")]}),
        "stop in output": (generation.supports_stop_in_output, {"stopping": {"include_stop_in_output": True}}),
        "salt": (generation.supports_cache_salt, {"kv": {"cache_salt": "s"}}),
        "bypass": (generation.supports_prefix_cache_bypass, {"kv": {"bypass_prefix_cache": True}}),
        "media": (info.supports_multimodal, {"media": [{"raw_bytes": b"x"}]}),
        "media options": (multimodal.supports_per_request_media_options, {"media_options": options}),
        "one sequence": (generation.max_num_sequences >= 1, {"sampling": {"num_sequences": 1}}),
        "two sequences": (generation.max_num_sequences >= 2, {"sampling": {"num_sequences": 2}}),
        "encoder": (info.HasField("encoder"), {"encoder": {}}),
    }
    outcomes = await asyncio.gather(
        *(accepts(served, request_id=name, **fields) for name, (_, fields) in flags.items())
    )
    assert dict(zip(flags, outcomes, strict=True)) == {name: flag for name, (flag, _) in flags.items()}


@pytest.mark.parametrize(
    ("modality", "number"),
    [
        (Modality.IMAGE, generation_pb2.MODALITY_IMAGE),
        (Modality.VIDEO, generation_pb2.MODALITY_VIDEO),
        (Modality.AUDIO, generation_pb2.MODALITY_AUDIO),
    ],
)
async def test_modalities_are_the_model_s(serve: Serve, modality: Modality, number: int) -> None:
    served = await serve(ScriptedRole(modalities=(modality,)))
    multimodal = (await model_info(served)).multimodal_capabilities
    assert list(multimodal.aggregate_modalities) == [number]
    assert list(multimodal.prefill_decode_modalities) == []
    assert list(multimodal.source_types) == [
        generation_pb2.MEDIA_SOURCE_TYPE_DATA_URI,
        generation_pb2.MEDIA_SOURCE_TYPE_RAW_BYTES,
    ]
