"""The Control service: what the engine is, how it does, and how to end a request.

Every flag of ModelInfo says exactly what Generate accepts. RPCs of parts of the contract that are not offered answer
UNIMPLEMENTED and are not advertised.
"""
# ruff: noqa: N802 - methods are named by the contract

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NoReturn, TypeVar

import triptych
from triptych.core.errors import InvalidRequest, ModelNotFound, TriptychError, UnsupportedFeature
from triptych.roles.contract import AbortOutcome, HealthCheck, HealthState, RoleName
from triptych.rpc.metadata import check_metadata
from triptych.rpc.refuse import refuse, typed
from triptych.wire.gen import (
    encoder_pb2,
    generation_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    openengine_pb2_grpc,
    server_pb2,
    version_pb2,
)
from triptych.wire.modality import NUMBERS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import grpc

    from triptych.roles.contract import Load, ModelDescription, Role

Question = TypeVar("Question")
Answer = TypeVar("Answer")

ENGINE_NAME = "triptych"
SCHEMA_RELEASE = "768a93c7b44e40f28c692ad0b471a8f2"

_ROLES = {RoleName.AGGREGATED: server_pb2.ENGINE_ROLE_AGGREGATED}
_ABORT_STATUSES = {
    AbortOutcome.ABORTED: lifecycle_pb2.ABORT_STATUS_ABORTED,
    AbortOutcome.ALREADY_FINISHED: lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED,
}
_SEVERITY = (HealthState.READY, HealthState.DEGRADED, HealthState.STARTING, HealthState.NOT_READY)


class Control(openengine_pb2_grpc.ControlServicer):
    """Serves the Control service over any role."""

    def __init__(self, role: Role) -> None:
        self._role = role

    async def GetServerInfo(
        self, request: server_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> server_pb2.ServerInfo:
        """The process; fixed for its lifetime."""
        return await _answer(context, self._server_info, request)

    async def GetModelInfo(
        self, request: model_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> model_pb2.ModelInfo:
        """The model and what it accepts; its served name and its canonical id both find it."""
        return await _answer(context, self._model_info, request)

    async def GetLoad(
        self, request: server_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> server_pb2.LoadInfo:
        """A snapshot at most one step old."""
        return await _answer(context, self._load_info, request)

    async def Health(
        self, request: lifecycle_pb2.HealthRequest, context: grpc.aio.ServicerContext
    ) -> lifecycle_pb2.HealthResponse:
        """The worst of the checks, and the checks."""
        return await _answer(context, self._health, request)

    async def Abort(
        self, request: lifecycle_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> lifecycle_pb2.AbortResponse:
        """End one request or all of them."""
        return await _answer(context, self._abort, request)

    async def LoadLora(
        self, request: lora_pb2.LoadLoraRequest, context: grpc.aio.ServicerContext
    ) -> lora_pb2.LoadLoraResponse:
        """Not offered."""
        await _not_offered(context, "LoadLora")

    async def UnloadLora(
        self, request: lora_pb2.UnloadLoraRequest, context: grpc.aio.ServicerContext
    ) -> lora_pb2.UnloadLoraResponse:
        """Not offered."""
        await _not_offered(context, "UnloadLora")

    async def ListLoras(
        self, request: lora_pb2.ListLorasRequest, context: grpc.aio.ServicerContext
    ) -> lora_pb2.ListLorasResponse:
        """Not offered."""
        await _not_offered(context, "ListLoras")

    async def GetKvEventSources(
        self, request: kv_pb2.GetKvEventSourcesRequest, context: grpc.aio.ServicerContext
    ) -> kv_pb2.GetKvEventSourcesResponse:
        """Not offered."""
        await _not_offered(context, "GetKvEventSources")

    async def SubscribeKvEvents(  # type: ignore[override]
        self, request: kv_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Not offered."""
        await _not_offered(context, "SubscribeKvEvents")

    async def TransferEncoderCache(
        self, request: encoder_pb2.TransferEncoderCacheRequest, context: grpc.aio.ServicerContext
    ) -> encoder_pb2.TransferEncoderCacheResponse:
        """Not offered."""
        await _not_offered(context, "TransferEncoderCache")

    async def Shutdown(
        self, request: lifecycle_pb2.ShutdownRequest, context: grpc.aio.ServicerContext
    ) -> lifecycle_pb2.ShutdownResponse:
        """Not offered."""
        await _not_offered(context, "Shutdown")

    async def _server_info(self, _: server_pb2.GetServerInfoRequest) -> server_pb2.ServerInfo:
        engine = self._role.engine
        info = server_pb2.ServerInfo(
            engine_name=ENGINE_NAME,
            engine_version=triptych.__version__,
            engine_role=_ROLES[engine.role],
            instance_id=engine.instance_id,
            supported_models=[self._role.model.served_name],
            parallelism=server_pb2.ParallelismInfo(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                data_parallel_rank=0,
                data_parallel_start_rank=0,
                decode_context_parallel_size=1,
            ),
            kv_connector=kv_pb2.KvConnectorInfo(enabled=False),
            schema_revision=version_pb2.SCHEMA_REVISION_1,
            minimum_client_revision=version_pb2.SCHEMA_REVISION_1,
            schema_release=SCHEMA_RELEASE,
            capacity=server_pb2.DeploymentCapacity(
                kv_block_size=engine.block_size,
                total_kv_blocks=engine.num_blocks,
                max_running_requests=engine.max_running_requests,
                max_batched_tokens=engine.max_batched_tokens,
                max_loras=0,
            ),
        )
        info.extra.update({"device": engine.device, "dtype": engine.dtype})
        return info

    async def _model_info(self, request: model_pb2.GetModelInfoRequest) -> model_pb2.ModelInfo:
        model = self._role.model
        if not request.model:
            raise InvalidRequest("model must not be empty")
        if request.model not in (model.served_name, model.model_id):
            raise ModelNotFound(f"model {request.model!r} is not served here; {model.served_name!r} is")
        return _describe(model)

    async def _load_info(self, request: server_pb2.GetLoadRequest) -> server_pb2.LoadInfo:
        load = self._role.load()
        info = server_pb2.LoadInfo(
            instance_id=self._role.engine.instance_id,
            timestamp_unix_nanos=time.time_ns(),
            running_requests=load.running_requests,
            queued_requests=load.queued_requests,
            used_kv_blocks=load.used_blocks,
            total_kv_blocks=load.total_blocks,
            running_tokens=load.running_tokens,
            waiting_tokens=load.waiting_tokens,
            prefill_batch_size=load.prefill_batch,
            decode_batch_size=load.decode_batch,
        )
        if request.include_per_rank:
            info.ranks.append(_only_rank(load))
        return info

    async def _health(self, request: lifecycle_pb2.HealthRequest) -> lifecycle_pb2.HealthResponse:
        model, role = self._role.model, _ROLES[self._role.engine.role]
        checks = [HealthCheck("grpc", HealthState.READY)]
        checks += await self._role.health(probe=request.include_inference_probe)
        if request.model and request.model not in (model.served_name, model.model_id):
            message = f"model {request.model!r} is not served here; {model.served_name!r} is"
            checks.append(HealthCheck("model", HealthState.NOT_READY, message))
        if request.role in server_pb2.EngineRole.values() and request.role not in (0, role):
            name = server_pb2.EngineRole.Name(role)
            checks.append(HealthCheck("role", HealthState.NOT_READY, f"this engine is {name}"))
        worst = max((check.state for check in checks), key=_SEVERITY.index)
        return lifecycle_pb2.HealthResponse(
            state=_health_state(worst),
            checks=[
                lifecycle_pb2.HealthCheck(name=check.name, state=_health_state(check.state), message=check.message)
                for check in checks
            ],
        )

    async def _abort(self, request: lifecycle_pb2.AbortRequest) -> lifecycle_pb2.AbortResponse:
        match request.WhichOneof("target"):
            case "request_id":
                if not request.request_id:
                    raise InvalidRequest("request_id must not be empty")
                outcome = await self._role.abort(request.request_id)
                return lifecycle_pb2.AbortResponse(status=_ABORT_STATUSES[outcome])
            case "all_requests":
                count = await self._role.abort_all()
                outcome = AbortOutcome.ABORTED if count else AbortOutcome.ALREADY_FINISHED
                return lifecycle_pb2.AbortResponse(
                    status=_ABORT_STATUSES[outcome], message=f"{count} request(s) were ended"
                )
            case None:
                raise InvalidRequest("the target is absent: set request_id or all_requests")
            case target:
                raise UnsupportedFeature(f"Abort({target}) is not supported by this engine")


def _describe(model: ModelDescription) -> model_pb2.ModelInfo:
    not_offered = model_pb2.LogprobCapabilities(supported=False)
    info = model_pb2.ModelInfo(
        model_id=model.model_id,
        served_model_name=model.served_name,
        max_context_length=model.max_context,
        tokenizer_modes=["auto"],
        supports_text_input=True,
        supports_token_ids_input=True,
        generation=model_pb2.GenerationCapabilities(
            prompt_logprobs=not_offered,
            output_logprobs=not_offered,
            guided_decoding=model_pb2.GuidedDecodingCapabilities(supported=False),
            max_num_sequences=1,
            supports_priority=False,
            supports_stop_in_output=True,
            supports_cache_salt=True,
            supports_prefix_cache_bypass=True,
        ),
        supports_lora=False,
        supports_multimodal=bool(model.modalities),
        tokenizer=model_pb2.TokenizerInfo(source=model.tokenizer_source, mode="auto"),
    )
    if model.model_id != model.served_name:
        info.served_model_aliases.append(model.model_id)
    if model.modalities:
        info.multimodal_capabilities.CopyFrom(
            model_pb2.MultimodalCapabilities(
                aggregate_modalities=[NUMBERS[modality] for modality in model.modalities],
                source_types=[
                    generation_pb2.MEDIA_SOURCE_TYPE_DATA_URI,
                    generation_pb2.MEDIA_SOURCE_TYPE_RAW_BYTES,
                ],
                supports_per_request_media_options=False,
                routing_image_token_id=model.image_token_id,
            )
        )
    return info


def _only_rank(load: Load) -> server_pb2.RankLoadInfo:
    return server_pb2.RankLoadInfo(
        data_parallel_rank=0,
        running_requests=load.running_requests,
        queued_requests=load.queued_requests,
        used_kv_blocks=load.used_blocks,
        total_kv_blocks=load.total_blocks,
        prefill_batch_size=load.prefill_batch,
        decode_batch_size=load.decode_batch,
    )


def _health_state(state: HealthState) -> lifecycle_pb2.HealthState.ValueType:
    return lifecycle_pb2.HealthState.ValueType(state)


async def _answer(
    context: grpc.aio.ServicerContext, work: Callable[[Question], Awaitable[Answer]], request: Question
) -> Answer:
    """The result of the work, or the status of its error."""
    try:
        check_metadata(context.invocation_metadata() or (), inference=False)
        return await work(request)
    except Exception as error:
        refusal: TriptychError = typed(error)
    await refuse(context, refusal)


async def _not_offered(context: grpc.aio.ServicerContext, rpc: str) -> NoReturn:
    await refuse(context, UnsupportedFeature(f"Control.{rpc} is not supported by this engine"))
