"""The Control service: what the engine is, how it does, and how to end a request or the whole of it.

RPCs of parts of the contract that are not offered answer UNIMPLEMENTED and are not advertised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import grpc

from triptych.core.adapter import check_adapter_name
from triptych.core.errors import InvalidRequest, ModelNotFound, TriptychError, UnsupportedFeature, WrongState
from triptych.roles.contract import AbortOutcome, HealthCheck, HealthState, TransferOutcome
from triptych.rpc.describe import ROLES, load_info, model_info, server_info
from triptych.rpc.metadata import check_trace
from triptych.rpc.parse import parse
from triptych.rpc.refuse import refuse, typed
from triptych.wire.codec_adapter import decode_adapter, encode_adapter
from triptych.wire.codec_session import MAX_NAME_BYTES
from triptych.wire.gen import encoder_pb2, kv_pb2, lifecycle_pb2, lora_pb2, model_pb2, server_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from google.protobuf.message import Message

    from triptych.roles.contract import Role
    from triptych.rpc.kv_events import KvEvents
    from triptych.wire.codec_reference import ReferenceCodec
    from triptych.wire.codec_session import SessionCodec

Question = TypeVar("Question", bound="Message")

OnShutdown = Callable[[float | None], bool]
"""Begins to end the process: how many seconds live requests may go on, None for as long as usual. Returns whether this
was the first time."""

_ABORT_STATUSES = {
    AbortOutcome.ABORTED: lifecycle_pb2.ABORT_STATUS_ABORTED,
    AbortOutcome.ALREADY_FINISHED: lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED,
}
_OUTCOME_MESSAGES = {
    TransferOutcome.FINISHED: "a consumer has all of it",
    TransferOutcome.NOT_STARTED: "it waits, and can be taken",
    TransferOutcome.IN_PROGRESS: "a consumer is taking it",
    TransferOutcome.FAILED: "it was released, has expired or could not be kept; nobody can take it any more",
}
_SEVERITY = (HealthState.READY, HealthState.DEGRADED, HealthState.STARTING, HealthState.NOT_READY)


class Control:
    """Serves the Control service over any role, but for the stream of KV events."""

    def __init__(
        self,
        role: Role,
        kv_events: KvEvents,
        sessions: SessionCodec,
        references: ReferenceCodec,
        on_shutdown: OnShutdown | None,
    ) -> None:
        """Without ``on_shutdown`` the process is not to be ended by a call."""
        self._role = role
        self._kv_events = kv_events
        self._sessions = sessions
        self._references = references
        self._on_shutdown = on_shutdown

    def add_to(self, server: grpc.aio.Server) -> None:
        """Have a server hand its calls over."""
        methods = {
            "GetServerInfo": _handler(server_pb2.GetServerInfoRequest, self._server_info),
            "GetModelInfo": _handler(model_pb2.GetModelInfoRequest, self._model_info),
            "GetLoad": _handler(server_pb2.GetLoadRequest, self._load_info),
            "Health": _handler(lifecycle_pb2.HealthRequest, self._health),
            "Abort": _handler(lifecycle_pb2.AbortRequest, self._abort),
            "LoadLora": _handler(lora_pb2.LoadLoraRequest, self._load_lora),
            "UnloadLora": _handler(lora_pb2.UnloadLoraRequest, self._unload_lora),
            "ListLoras": _handler(lora_pb2.ListLorasRequest, self._list_loras),
            "GetKvEventSources": _handler(kv_pb2.GetKvEventSourcesRequest, self._sources),
            "TransferEncoderCache": _handler(encoder_pb2.TransferEncoderCacheRequest, self._transfer),
            "Shutdown": _handler(lifecycle_pb2.ShutdownRequest, self._shutdown),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("openengine.v1.Control", methods),))

    async def _server_info(self, _: server_pb2.GetServerInfoRequest) -> server_pb2.ServerInfo:
        """The process; fixed for its lifetime."""
        return server_info(self._role.engine, self._role.model, self._sessions.endpoints)

    async def _model_info(self, request: model_pb2.GetModelInfoRequest) -> model_pb2.ModelInfo:
        """The model and what it accepts; its served name and its canonical id both find it."""
        model = self._role.model
        if not request.model:
            raise InvalidRequest("model must not be empty")
        model.check_name(request.model)
        return model_info(self._role.engine, model)

    async def _load_info(self, request: server_pb2.GetLoadRequest) -> server_pb2.LoadInfo:
        """A snapshot at most one step old."""
        return load_info(self._role, per_rank=request.include_per_rank)

    async def _sources(self, request: kv_pb2.GetKvEventSourcesRequest) -> kv_pb2.GetKvEventSourcesResponse:
        return self._kv_events.sources(request)

    async def _health(self, request: lifecycle_pb2.HealthRequest) -> lifecycle_pb2.HealthResponse:
        """The worst of the checks, and the checks."""
        model, role = self._role.model, ROLES[self._role.engine.role]
        checks = [HealthCheck("grpc", HealthState.READY)]
        checks += await self._role.health(probe=request.include_inference_probe)
        if self._role.engine.kv_backend:
            checks.append(HealthCheck("kv_connector", HealthState.READY, self._role.engine.kv_backend))
        if request.model:
            try:
                model.check_name(request.model)
            except ModelNotFound as error:
                checks = [check for check in checks if check.name != "model"]
                checks.append(HealthCheck("model", HealthState.NOT_READY, str(error)))
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
        """End one request, one session or one encoder output that waits for another engine, or all of them."""
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
            case "kv_session" if self._role.engine.hands_over:
                outcome = await self._role.abort_session(self._sessions.session_id(request.kv_session))
                return lifecycle_pb2.AbortResponse(status=_ABORT_STATUSES[outcome])
            case "encoder_cache" if self._role.engine.encodes:
                # Read whole, also where nothing is signed: what is malformed lets go of nothing.
                reference = self._references.decode(request.encoder_cache)
                outcome = await self._role.abort_rows(reference.item.handle.session_id)
                return lifecycle_pb2.AbortResponse(status=_ABORT_STATUSES[outcome])
            case None:
                raise InvalidRequest("the target is absent: set request_id, kv_session, encoder_cache or all_requests")
            case target:
                raise UnsupportedFeature(f"Abort({target}) is not supported by this engine")

    async def _load_lora(self, request: lora_pb2.LoadLoraRequest) -> lora_pb2.LoadLoraResponse:
        self._refuse_without_adapters()
        if not request.HasField("adapter"):
            raise InvalidRequest("adapter is absent")
        info = decode_adapter(request.adapter)
        already = await self._role.load_adapter(info)
        return lora_pb2.LoadLoraResponse(adapter=encode_adapter(info), already_loaded=already)

    async def _unload_lora(self, request: lora_pb2.UnloadLoraRequest) -> lora_pb2.UnloadLoraResponse:
        self._refuse_without_adapters()
        check_adapter_name("lora_name", request.lora_name)
        info = await self._role.unload_adapter(request.lora_name)
        return lora_pb2.UnloadLoraResponse(adapter=encode_adapter(info))

    async def _list_loras(self, _: lora_pb2.ListLorasRequest) -> lora_pb2.ListLorasResponse:
        self._refuse_without_adapters()
        return lora_pb2.ListLorasResponse(adapters=[encode_adapter(info) for info in self._role.adapters()])

    def _refuse_without_adapters(self) -> None:
        if not self._role.engine.max_loras:
            raise WrongState("LoRA adapters are switched off; start the engine with --max-loras")

    async def _transfer(
        self, request: encoder_pb2.TransferEncoderCacheRequest
    ) -> encoder_pb2.TransferEncoderCacheResponse:
        """What has become of an encoder output. Nothing moves by asking, so it can be asked again."""
        engine = self._role.engine
        if not engine.encodes:
            raise UnsupportedFeature("Control.TransferEncoderCache is not supported by this engine")
        for field, value in (
            ("transfer_id", request.transfer_id),
            ("consumer_instance_id", request.consumer_instance_id),
        ):
            size = len(value.encode())
            if not 1 <= size <= MAX_NAME_BYTES:
                raise InvalidRequest(f"{field} has {size} bytes; it must have between 1 and {MAX_NAME_BYTES}")
        if request.receiver:
            raise InvalidRequest(
                f"receiver has {len(request.receiver)} bytes and must be empty: rows are read by their consumer"
            )
        handle = self._references.decode(request.encoder_cache).item.handle
        if handle.instance_id != engine.instance_id:
            raise WrongState(
                f"encoder_cache is of instance {handle.instance_id[:80]!r}; this is {engine.instance_id!r}"
            )
        outcome = self._role.transfer_outcome(handle.session_id)
        return encoder_pb2.TransferEncoderCacheResponse(
            outcome=encoder_pb2.TransferOutcome.ValueType(outcome), message=_OUTCOME_MESSAGES[outcome]
        )

    async def _shutdown(self, request: lifecycle_pb2.ShutdownRequest) -> lifecycle_pb2.ShutdownResponse:
        """Begin to end the process, if it is the one that is meant."""
        if self._on_shutdown is None:
            raise UnsupportedFeature("Control.Shutdown is not supported by this engine")
        wanted, own = request.expected_instance_id, self._role.engine.instance_id
        if not wanted:
            raise InvalidRequest("expected_instance_id must not be empty; GetServerInfo has it")
        if wanted != own:
            raise WrongState(f"instance {wanted[:80]!r} is meant; this is {own!r}")
        grace = request.grace_period_ms / 1000 if request.HasField("grace_period_ms") else None
        if self._on_shutdown(grace):
            return lifecycle_pb2.ShutdownResponse(status=lifecycle_pb2.SHUTDOWN_STATUS_STARTED)
        return lifecycle_pb2.ShutdownResponse(status=lifecycle_pb2.SHUTDOWN_STATUS_ALREADY_IN_PROGRESS)


def _health_state(state: HealthState) -> lifecycle_pb2.HealthState.ValueType:
    return lifecycle_pb2.HealthState.ValueType(state)


def _handler(kind: type[Question], work: Callable[[Question], Awaitable[Message]]) -> grpc.RpcMethodHandler:
    """Answers with the result of the work, or with the status of its error; bytes that are no message are one, too."""

    async def handle(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            check_trace(context.invocation_metadata() or ())
            return (await work(parse(kind, data))).SerializeToString()
        except Exception as error:
            refusal: TriptychError = typed(error)
        await refuse(context, refusal)

    return grpc.unary_unary_rpc_method_handler(handle)
