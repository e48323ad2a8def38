"""The client side of one engine: typed requests in, typed events out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from triptych.core.encoded import SealedReference
from triptych.core.errors import InvalidRequest
from triptych.core.media import DataUri, RawBytes, Url
from triptych.core.session import SealedSession
from triptych.wire.answer import RemoteAnswer, typed
from triptych.wire.codec import encode_request
from triptych.wire.codec_reference import unseal_reference
from triptych.wire.codec_session import unseal
from triptych.wire.gen import encoder_pb2, lifecycle_pb2, model_pb2, openengine_pb2_grpc, server_pb2
from triptych.wire.limits import LARGE_MESSAGE, MAX_MESSAGE

if TYPE_CHECKING:
    from triptych.core.media import MediaSource
    from triptych.core.request import GenerateRequest
    from triptych.wire.tls import ChannelTls

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Engines come and go; the default backoff of up to two minutes would keep a new one waiting.
    ("grpc.initial_reconnect_backoff_ms", 200),
    # What this one bounds is how long one attempt may take: a machine with more work than cores answers late.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Engines are named by address; a proxy in the environment is meant for other traffic.
    ("grpc.enable_http_proxy", 0),
)
UNARY_SECONDS = 5.0
PRIORITY_KEY = "openengine-priority"


class EngineChannel:
    """Belongs to one event loop. Every method raises ``TriptychError`` and nothing else of the network's."""

    def __init__(self, address: str, tls: ChannelTls | None = None) -> None:
        """``address`` is HOST:PORT. Nothing is connected before the first call.

        Raises:
            StartupError: a file of ``tls`` is not usable.
        """
        self.address = address
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, tls.credentials(), options=CHANNEL_OPTIONS)
        # Bytes both ways: a large message is written and read once, and not on the event loop.
        self._generate = self._channel.unary_stream("/openengine.v1.Inference/Generate")
        self._control = openengine_pb2_grpc.ControlStub(self._channel)

    async def generate(self, request: GenerateRequest) -> RemoteAnswer:
        """Start a request; returns once its first event is there.

        Returns its events: deltas, then exactly one terminal one, a broken connection included. Close it when done
        with it; closing early cancels the request.

        Raises:
            TriptychError: the request was refused, or failed before its first delta: nothing is lost by trying
                elsewhere what is retryable.
        """
        large = _size(request) >= LARGE_MESSAGE
        data = await asyncio.to_thread(_write, request) if large else _write(request)
        if len(data) > MAX_MESSAGE:
            raise InvalidRequest(f"the request has {len(data)} bytes with its media; at most {MAX_MESSAGE}")
        metadata = ((PRIORITY_KEY, f"{request.priority}"),) if request.priority else ()
        answer = RemoteAnswer(self._generate(data, metadata=metadata), self.address, request)
        await answer.start()
        return answer

    async def get_server_info(self) -> server_pb2.ServerInfo:
        """What the engine is."""
        request = server_pb2.GetServerInfoRequest()
        info: server_pb2.ServerInfo = await self._call(self._control.GetServerInfo, request, UNARY_SECONDS)
        return info

    async def get_model_info(self, model: str) -> model_pb2.ModelInfo:
        """What the model accepts.

        Raises:
            ModelNotFound: another model is served there.
        """
        request = model_pb2.GetModelInfoRequest(model=model)
        info: model_pb2.ModelInfo = await self._call(self._control.GetModelInfo, request, UNARY_SECONDS)
        return info

    async def get_load(self) -> server_pb2.LoadInfo:
        """How busy the engine is."""
        load: server_pb2.LoadInfo = await self._call(self._control.GetLoad, server_pb2.GetLoadRequest(), UNARY_SECONDS)
        return load

    async def health(self) -> lifecycle_pb2.HealthResponse:
        """Named checks."""
        request = lifecycle_pb2.HealthRequest()
        health: lifecycle_pb2.HealthResponse = await self._call(self._control.Health, request, UNARY_SECONDS)
        return health

    async def abort(self, request_id: str) -> lifecycle_pb2.AbortResponse:
        """End a request, and the session that it has left, if that still waits.

        Raises:
            RequestNotFound: the engine does not know it.
        """
        request = lifecycle_pb2.AbortRequest(request_id=request_id)
        response: lifecycle_pb2.AbortResponse = await self._call(self._control.Abort, request, UNARY_SECONDS)
        return response

    async def abort_session(self, session: SealedSession) -> lifecycle_pb2.AbortResponse:
        """Let go of a session that this engine keeps for a decode engine.

        Raises:
            KvSessionNotFound: the engine does not know it.
        """
        request = lifecycle_pb2.AbortRequest()
        unseal(session, request.kv_session)
        response: lifecycle_pb2.AbortResponse = await self._call(self._control.Abort, request, UNARY_SECONDS)
        return response

    async def abort_reference(self, reference: SealedReference) -> lifecycle_pb2.AbortResponse:
        """Let go of an encoder output that this engine keeps until somebody uses it.

        Raises:
            ReferenceNotFound: the engine does not know it.
        """
        request = lifecycle_pb2.AbortRequest()
        unseal_reference(reference, request.encoder_cache)
        response: lifecycle_pb2.AbortResponse = await self._call(self._control.Abort, request, UNARY_SECONDS)
        return response

    async def transfer_outcome(
        self, reference: SealedReference, transfer_id: str, consumer_instance_id: str
    ) -> encoder_pb2.TransferEncoderCacheResponse:
        """What has become of an encoder output of this engine's. Nothing moves by asking.

        Args:
            reference: its name.
            transfer_id: the asker's own name for its use of it.
            consumer_instance_id: who asks.

        Raises:
            ReferenceNotFound: the engine does not know it.
            WrongState: another engine, or an earlier start of this one, has made it.
        """
        request = encoder_pb2.TransferEncoderCacheRequest(
            transfer_id=transfer_id, consumer_instance_id=consumer_instance_id
        )
        unseal_reference(reference, request.encoder_cache)
        response: encoder_pb2.TransferEncoderCacheResponse = await self._call(
            self._control.TransferEncoderCache, request, UNARY_SECONDS
        )
        return response

    async def close(self) -> None:
        """Cancel what is running and disconnect."""
        await self._channel.close()

    async def _call(self, method: Any, request: Any, seconds: float) -> Any:
        try:
            return await method(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise typed(error, self.address) from None


def _size(request: GenerateRequest) -> int:
    """About how many bytes of the message are text, media, a session and references."""
    text = len(request.prompt) if isinstance(request.prompt, str) else 0
    session = len(request.session.data) if isinstance(request.session, SealedSession) else 0
    references = sum(len(one.data) for one in request.references if isinstance(one, SealedReference))
    return text + session + references + sum(_source_size(item.source) for item in request.media)


def _source_size(source: MediaSource) -> int:
    match source:
        case Url(text) | DataUri(text):
            return len(text)
        case RawBytes(data):
            return len(data)


def _write(request: GenerateRequest) -> bytes:
    return encode_request(request).SerializeToString()
