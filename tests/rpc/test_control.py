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
    assert info.capacity.max_loras == 2
    assert info.kv_connector.HasField("supports_abort_cleanup")
    assert not info.kv_connector.supports_abort_cleanup
    assert dict(info.extra) == {"device": "cpu", "dtype": "float32", "kv_event_heartbeat_interval_ms": 1500.0}


async def test_server_info_of_an_engine_without_adapters_and_events(serve: Serve) -> None:
    served = await serve(ScriptedRole(description={"max_loras": 0, "kv_event_buffer": 0}))
    info = await served.control.GetServerInfo(server_pb2.GetServerInfoRequest())
    assert info.capacity.HasField("max_loras")
    assert info.capacity.max_loras == 0
    assert dict(info.extra) == {"device": "cpu", "dtype": "float32"}
    assert not (await model_info(served)).supports_lora


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
    assert load.HasField("active_kv_sessions")
    assert load.active_kv_sessions == 0
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


@pytest.mark.parametrize(
    ("rpc", "request_"),
    [
        ("TransferEncoderCache", encoder_pb2.TransferEncoderCacheRequest(transfer_id="t", consumer_instance_id="c")),
        ("Shutdown", lifecycle_pb2.ShutdownRequest(expected_instance_id="instance-1")),  # nobody was given to be called
    ],
)
async def test_what_is_not_offered_is_unimplemented(serve: Serve, rpc: str, request_: Any) -> None:
    served = await serve()
    assert await refused(getattr(served.control, rpc)(request_)) is grpc.StatusCode.UNIMPLEMENTED


CALLS: dict[str, Any] = {
    "GetServerInfo": server_pb2.GetServerInfoRequest(),
    "GetModelInfo": model_pb2.GetModelInfoRequest(model="scripted"),
    "GetLoad": server_pb2.GetLoadRequest(),
    "Health": lifecycle_pb2.HealthRequest(),
    "Abort": lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests()),
    "LoadLora": lora_pb2.LoadLoraRequest(adapter={"lora_id": 1, "lora_name": "a", "source_path": "/a"}),
    "UnloadLora": lora_pb2.UnloadLoraRequest(lora_name="a"),
    "ListLoras": lora_pb2.ListLorasRequest(),
    "GetKvEventSources": kv_pb2.GetKvEventSourcesRequest(),
    "SubscribeKvEvents": kv_pb2.SubscribeKvEventsRequest(),
    "TransferEncoderCache": encoder_pb2.TransferEncoderCacheRequest(),
    "Shutdown": lifecycle_pb2.ShutdownRequest(expected_instance_id="instance-1"),
}


def test_every_rpc_of_the_contract_is_covered() -> None:
    methods = openengine_pb2.DESCRIPTOR.services_by_name["Control"].methods_by_name.keys()
    assert set(methods) == CALLS.keys()


async def test_trace_context_is_checked_on_every_call_and_routing_keys_are_not(serve: Serve) -> None:
    served = await serve(on_shutdown=lambda grace: True)
    for rpc, request in CALLS.items():
        call = getattr(served.control, rpc)(request, metadata=(("traceparent", "x"),))
        code = await refused(call.read() if rpc == "SubscribeKvEvents" else call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT, rpc
    await served.control.Health(CALLS["Health"], metadata=(("openengine-priority", "high"),))


NO_MESSAGE = [b"\xff\xff\xff", b"\x0a\x01\xff"]
"""The second is well-formed but for its text, which is no UTF-8."""


@pytest.mark.parametrize("rpc", sorted(CALLS))
async def test_bytes_that_are_no_message_are_refused(serve: Serve, rpc: str) -> None:
    served = await serve()
    async with grpc.aio.insecure_channel(served.address) as channel:
        if rpc == "SubscribeKvEvents":
            call = channel.unary_stream(f"/openengine.v1.Control/{rpc}")(NO_MESSAGE[0]).read()
        else:
            call = channel.unary_unary(f"/openengine.v1.Control/{rpc}")(NO_MESSAGE[0])
        assert await refused(call) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("data", NO_MESSAGE)
async def test_an_abort_that_is_no_message_is_refused(serve: Serve, data: bytes) -> None:
    served = await serve()
    async with grpc.aio.insecure_channel(served.address) as channel:
        call = channel.unary_unary("/openengine.v1.Control/Abort")(data)
        assert await refused(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_no_control_request_is_large(serve: Serve) -> None:
    served = await serve()
    call = served.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="m" * 20_000))
    assert await refused(call) is grpc.StatusCode.INVALID_ARGUMENT
    call = served.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="m" * 10_000))
    assert await refused(call) is grpc.StatusCode.NOT_FOUND


async def shutdown(served: Served, instance: str, **fields: Any) -> int:
    request = lifecycle_pb2.ShutdownRequest(expected_instance_id=instance, **fields)
    return int((await served.control.Shutdown(request)).status)


async def test_shutdown_of_this_instance_starts_once(serve: Serve) -> None:
    asked: list[float | None] = []

    def on_shutdown(grace: float | None) -> bool:
        asked.append(grace)
        return len(asked) == 1

    served = await serve(on_shutdown=on_shutdown)
    assert await shutdown(served, "instance-1", grace_period_ms=1500) == lifecycle_pb2.SHUTDOWN_STATUS_STARTED
    assert await shutdown(served, "instance-1") == lifecycle_pb2.SHUTDOWN_STATUS_ALREADY_IN_PROGRESS
    assert await shutdown(served, "instance-1", grace_period_ms=0) == lifecycle_pb2.SHUTDOWN_STATUS_ALREADY_IN_PROGRESS
    assert asked == [1.5, None, 0.0]


@pytest.mark.parametrize(
    ("instance", "status"),
    [("", grpc.StatusCode.INVALID_ARGUMENT), ("instance-0", grpc.StatusCode.FAILED_PRECONDITION)],
)
async def test_shutdown_of_another_instance_is_refused(serve: Serve, instance: str, status: grpc.StatusCode) -> None:
    asked: list[float | None] = []
    served = await serve(on_shutdown=lambda grace: bool(asked.append(grace)))  # type: ignore[func-returns-value]
    assert await refused(shutdown(served, instance)) is status
    assert asked == []


async def test_an_unexpected_error_is_internal(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedRole):
        def load(self) -> Any:
            raise KeyError("secret")

    served = await serve(Broken())
    assert await refused(served.control.GetLoad(server_pb2.GetLoadRequest())) is grpc.StatusCode.INTERNAL
    assert "secret" in caplog.text


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
        "several sequences": (generation.max_num_sequences >= 8, {"sampling": {"num_sequences": 8}}),
        "encoder": (info.HasField("encoder"), {"encoder": {}, "media": [{"raw_bytes": b"x"}]}),
    }
    outcomes = await asyncio.gather(
        *(accepts(served, request_id=name, **fields) for name, (_, fields) in flags.items())
    )
    assert dict(zip(flags, outcomes, strict=True)) == {name: flag for name, (flag, _) in flags.items()}


async def test_modes_and_limits_of_generation(serve: Serve) -> None:
    generation = (await model_info(await serve())).generation
    for capabilities in (generation.prompt_logprobs, generation.output_logprobs):
        assert sorted(capabilities.candidate_selection_modes) == [1, 2, 3]
        assert capabilities.max_top_n == 128
    assert sorted(generation.guided_decoding.modes) == [1, 2, 3, 4, 5, 6]
    assert generation.max_num_sequences == 8


async def test_without_its_library_guided_decoding_is_not_advertised(serve: Serve) -> None:
    served = await serve(ScriptedRole(description={"guided": False, "max_num_sequences": 1}))
    generation = (await model_info(served)).generation
    assert generation.guided_decoding.HasField("supported")
    assert not generation.guided_decoding.supported
    assert list(generation.guided_decoding.modes) == []
    assert generation.max_num_sequences == 1


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
