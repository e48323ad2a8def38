"""What an engine says of itself. Every flag says exactly what Generate accepts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import triptych
from triptych.core.guide import GuideKind
from triptych.core.logprobs import MAX_TOP_N
from triptych.roles.contract import RoleName
from triptych.wire.codec_session import HANDOFF_PROFILE
from triptych.wire.gen import generation_pb2, kv_pb2, model_pb2, server_pb2, version_pb2
from triptych.wire.modality import NUMBERS, VIDEO_MARKER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.roles.contract import EngineDescription, Load, ModelDescription, Role
    from triptych.wire.codec_session import Endpoint

ENGINE_NAME = "triptych"
SCHEMA_RELEASE = "768a93c7b44e40f28c692ad0b471a8f2"
HEARTBEAT_KEY = "kv_event_heartbeat_interval_ms"

ROLES = {
    RoleName.AGGREGATED: server_pb2.ENGINE_ROLE_AGGREGATED,
    RoleName.PREFILL: server_pb2.ENGINE_ROLE_PREFILL,
    RoleName.DECODE: server_pb2.ENGINE_ROLE_DECODE,
    RoleName.ENCODER: server_pb2.ENGINE_ROLE_ENCODER,
}
_SELECTIONS = (
    model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N,
    model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_TOKEN_IDS,
    model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_ALL,
)
_GUIDES = {
    GuideKind.JSON_SCHEMA: model_pb2.GUIDED_DECODING_MODE_JSON_SCHEMA,
    GuideKind.REGEX: model_pb2.GUIDED_DECODING_MODE_REGEX,
    GuideKind.EBNF_GRAMMAR: model_pb2.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
    GuideKind.STRUCTURAL_TAG: model_pb2.GUIDED_DECODING_MODE_STRUCTURAL_TAG,
    GuideKind.CHOICE: model_pb2.GUIDED_DECODING_MODE_CHOICE,
    GuideKind.JSON_OBJECT: model_pb2.GUIDED_DECODING_MODE_JSON_OBJECT,
}


def server_info(
    engine: EngineDescription, model: ModelDescription, endpoints: Sequence[Endpoint] = ()
) -> server_pb2.ServerInfo:
    """The process; fixed for its lifetime. ``endpoints``: where it answers for what it hands over."""
    info = server_pb2.ServerInfo(
        engine_name=ENGINE_NAME,
        engine_version=triptych.__version__,
        engine_role=ROLES[engine.role],
        instance_id=engine.instance_id,
        supported_models=[model.served_name],
        parallelism=server_pb2.ParallelismInfo(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
            data_parallel_start_rank=0,
            decode_context_parallel_size=1,
        ),
        kv_connector=_kv_connector(engine, endpoints),
        schema_revision=version_pb2.SCHEMA_REVISION_1,
        minimum_client_revision=version_pb2.SCHEMA_REVISION_1,
        schema_release=SCHEMA_RELEASE,
        capacity=_capacity(engine),
    )
    info.extra.update({"device": engine.device, "dtype": engine.dtype})
    if engine.kv_event_buffer:
        info.extra.update({HEARTBEAT_KEY: engine.kv_event_heartbeat * 1000})
    return info


def _capacity(engine: EngineDescription) -> server_pb2.DeploymentCapacity:
    """An encoder has no KV; its tokens are those that its tower reads."""
    capacity = server_pb2.DeploymentCapacity(
        max_running_requests=engine.max_running_requests,
        max_batched_tokens=engine.max_batched_tokens,
        max_loras=engine.max_loras,
    )
    if engine.role is not RoleName.ENCODER:
        capacity.kv_block_size, capacity.total_kv_blocks = engine.block_size, engine.num_blocks
    return capacity


def _kv_connector(engine: EngineDescription, endpoints: Sequence[Endpoint]) -> kv_pb2.KvConnectorInfo:
    if not engine.kv_backend:
        return kv_pb2.KvConnectorInfo(enabled=False, supports_abort_cleanup=False)
    return kv_pb2.KvConnectorInfo(
        enabled=True,
        transfer_backend=engine.kv_backend,
        local_endpoints=[kv_pb2.KvEndpoint(host=e.host, port=e.port, protocol=e.protocol) for e in endpoints],
        supported_protocols=[engine.kv_backend],
        supports_remote_prefill=engine.takes_over,
        supports_decode_pull=True,  # whoever decodes fetches; nothing is pushed
        supports_abort_cleanup=engine.hands_over,
        handoff_profile=HANDOFF_PROFILE,
    )


def model_info(engine: EngineDescription, model: ModelDescription) -> model_pb2.ModelInfo:
    """The model and what a request for it may ask for."""
    answers = engine.role is not RoleName.ENCODER
    info = model_pb2.ModelInfo(
        model_id=model.model_id,
        served_model_name=model.served_name,
        max_context_length=model.max_context if answers else None,
        tokenizer_modes=["auto"],
        supports_text_input=answers,
        supports_token_ids_input=answers,
        generation=_generation(engine) if answers else None,
        supports_lora=engine.max_loras > 0,
        supports_multimodal=bool(model.modalities),
        tokenizer=model_pb2.TokenizerInfo(source=model.tokenizer_source, mode="auto"),
    )
    if engine.encodes or engine.takes_rows:
        info.encoder.CopyFrom(_encoder(engine, model))
    if model.model_id != model.served_name:
        info.served_model_aliases.append(model.model_id)
    if model.modalities:
        info.multimodal_capabilities.CopyFrom(_multimodal(engine, model))
    if model.video_token_id is not None:
        info.extra.update({VIDEO_MARKER: model.video_token_id})
    return info


def opens_media(engine: EngineDescription, model: ModelDescription) -> bool:
    """Whether media are opened here: not where somebody else has done it, or where there is nothing to read them."""
    return bool(model.modalities) and engine.role is not RoleName.DECODE and not engine.requires_rows


def _multimodal(engine: EngineDescription, model: ModelDescription) -> model_pb2.MultimodalCapabilities:
    """Media of whole requests, and of those whose prompt is computed by one engine and gone on from by another.

    An engine without a tower takes none itself; what encoders read for it is in ``ModelInfo.encoder``.
    """
    modalities = [NUMBERS[modality] for modality in model.modalities]
    opens = opens_media(engine, model)
    sources = [generation_pb2.MEDIA_SOURCE_TYPE_DATA_URI, generation_pb2.MEDIA_SOURCE_TYPE_RAW_BYTES]
    if engine.fetches:
        sources.append(generation_pb2.MEDIA_SOURCE_TYPE_URL)
    whole = engine.role is RoleName.AGGREGATED and not engine.requires_rows
    return model_pb2.MultimodalCapabilities(
        aggregate_modalities=modalities if whole else [],
        prefill_decode_modalities=modalities if engine.kv_backend else [],
        source_types=sources if opens else [],
        supports_per_request_media_options=opens,
        routing_image_token_id=model.image_token_id,
    )


def _encoder(engine: EngineDescription, model: ModelDescription) -> model_pb2.EncoderCapabilities:
    capabilities = model_pb2.EncoderCapabilities(
        producer=engine.encodes,
        consumer=engine.takes_rows,
        transfer_backends=[engine.row_backend],
        modalities=[NUMBERS[modality] for modality in model.modalities],
        fingerprint=engine.fingerprint.hex(),
    )
    if engine.encodes:
        capabilities.supports_abort_cleanup = True
    if engine.takes_rows:
        capabilities.requires_handoff = engine.requires_rows
    return capabilities


def _generation(engine: EngineDescription) -> model_pb2.GenerationCapabilities:
    logprobs = model_pb2.LogprobCapabilities(supported=True, candidate_selection_modes=_SELECTIONS, max_top_n=MAX_TOP_N)
    guides = [_GUIDES[kind] for kind in GuideKind] if engine.guided else []
    return model_pb2.GenerationCapabilities(
        prompt_logprobs=logprobs,
        output_logprobs=logprobs,
        guided_decoding=model_pb2.GuidedDecodingCapabilities(supported=engine.guided, modes=guides),
        max_num_sequences=engine.max_num_sequences,
        supports_priority=True,
        supports_stop_in_output=True,
        supports_cache_salt=True,
        supports_prefix_cache_bypass=True,
    )


def load_info(role: Role, *, per_rank: bool) -> server_pb2.LoadInfo:
    """A snapshot of the load, taken now. Of an encoder it has no KV, and no batches of prompts and answers."""
    load = role.load()
    info = server_pb2.LoadInfo(
        instance_id=role.engine.instance_id,
        timestamp_unix_nanos=time.time_ns(),
        running_requests=load.running_requests,
        queued_requests=load.queued_requests,
        running_tokens=load.running_tokens,
        waiting_tokens=load.waiting_tokens,
    )
    if per_rank:
        info.ranks.add(
            data_parallel_rank=0, running_requests=load.running_requests, queued_requests=load.queued_requests
        )
    if role.engine.role is not RoleName.ENCODER:
        info.active_kv_sessions = int(role.statistics().get("kv_sessions", {}).get("waiting", 0))  # 0 is a fact, too
        _add_kv(info, load)
        for rank in info.ranks:
            _add_kv(rank, load)
    return info


def _add_kv(info: server_pb2.LoadInfo | server_pb2.RankLoadInfo, load: Load) -> None:
    info.used_kv_blocks, info.total_kv_blocks = load.used_blocks, load.total_blocks
    info.prefill_batch_size, info.decode_batch_size = load.prefill_batch, load.decode_batch
