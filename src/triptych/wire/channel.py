"""The client side of one engine: typed requests in, typed events out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from triptych.core.errors import Cancelled, Draining, InvalidRequest, TriptychError
from triptych.core.events import Event, Failed, Finished, Tokens
from triptych.core.media import DataUri, RawBytes, Url
from triptych.wire.codec import encode_request
from triptych.wire.codec_events import decode_event, spans_in
from triptych.wire.gen import generation_pb2, lifecycle_pb2, model_pb2, openengine_pb2_grpc, server_pb2
from triptych.wire.status import from_status, refined

if TYPE_CHECKING:
    from triptych.core.media import MediaSource
    from triptych.core.request import GenerateRequest

MAX_MESSAGE = 64 * 1024 * 1024
"""Bytes of one message, each way, on both sides."""
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Engines come and go; the default backoff of up to two minutes would keep a new one waiting.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Engines are named by address; a proxy in the environment is meant for other traffic.
    ("grpc.enable_http_proxy", 0),
)
LARGE_REQUEST = 1024 * 1024
"""Bytes from which a request is written and read on a thread; smaller ones take the event loop a few milliseconds."""
UNARY_SECONDS = 5.0
TRAILER_SECONDS = 1.0
"""How long a stream may stay open behind its terminal event."""


class EngineChannel:
    """Belongs to one event loop. Every method raises ``TriptychError`` and nothing else of the network's."""

    def __init__(self, address: str) -> None:
        """``address`` is HOST:PORT. Nothing is connected before the first call."""
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        # Takes requests that are bytes already: a large one is written once, and not on the event loop.
        self._generate = self._channel.unary_stream(
            "/openengine.v1.Inference/Generate",
            response_deserializer=generation_pb2.GenerateResponse.FromString,
        )
        self._control = openengine_pb2_grpc.ControlStub(self._channel)

    async def generate(self, request: GenerateRequest) -> RemoteAnswer:
        """Start a request; returns once its first event is there.

        Returns its events: deltas, then exactly one Finished or Failed, a broken connection included. Close it when
        done with it; closing early cancels the request.

        Raises:
            TriptychError: the request was refused, or failed before its first delta: nothing is lost by trying
                elsewhere what is retryable.
        """
        large = _size(request) >= LARGE_REQUEST
        data = await asyncio.to_thread(_write, request) if large else _write(request)
        if len(data) > MAX_MESSAGE:
            raise InvalidRequest(f"the request has {len(data)} bytes with its media; at most {MAX_MESSAGE}")
        call = self._generate(data)
        try:
            first = await _read(call, self.address)
        except BaseException:
            call.cancel()
            raise
        if isinstance(first, Failed):
            call.cancel()
            raise first.error
        return RemoteAnswer(call, self.address, request.request_id, first)

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

    async def close(self) -> None:
        """Cancel what is running and disconnect."""
        await self._channel.close()

    async def _call(self, method: Any, request: Any, seconds: float) -> Any:
        try:
            return await method(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise _typed(error, self.address) from None


class RemoteAnswer:
    """The events of one request."""

    def __init__(self, call: Any, address: str, request_id: str, first: Event) -> None:
        self._call = call
        self._address = address
        self._request_id = request_id
        self._next: Event | None = first
        self._ended = False

    def __aiter__(self) -> RemoteAnswer:
        """Itself."""
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event."""
        if self._ended:
            raise StopAsyncIteration
        event, self._next = self._next, None
        if event is None:
            try:
                event = await _read(self._call, self._address)
            except TriptychError as error:
                event = Failed(self._request_id, error)
        if not isinstance(event, Tokens):
            await self.aclose()
        return event

    async def aclose(self) -> None:
        """Cancel the request unless it has ended. Never waits, so it cannot be cancelled half-way."""
        self._ended = True
        self._call.cancel()


async def _read(call: Any, address: str) -> Event:
    try:
        message = await call.read()
    except grpc.aio.AioRpcError as error:
        raise _typed(error, address) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Cancelled(f"the connection to {address} was closed") from None
    if message is grpc.aio.EOF:
        raise Draining(f"{address} ended the answer without a terminal event")
    match event := decode_event(message):
        case Finished():
            return replace(event, spans=spans_in(await _trailers(call)))
        case Failed(error=failure):
            return replace(event, error=refined(failure, await _trailers(call)))
    return event


async def _trailers(call: Any) -> tuple[tuple[str, str | bytes], ...]:
    """What follows the terminal event; nothing where it does not come in time."""
    try:
        async with asyncio.timeout(TRAILER_SECONDS):
            return tuple(await call.trailing_metadata() or ())
    except TimeoutError:
        return ()


def _size(request: GenerateRequest) -> int:
    """About how many bytes of the message are text and media."""
    text = len(request.prompt) if isinstance(request.prompt, str) else 0
    return text + sum(_source_size(item.source) for item in request.media)


def _source_size(source: MediaSource) -> int:
    match source:
        case Url(text) | DataUri(text):
            return len(text)
        case RawBytes(data):
            return len(data)


def _write(request: GenerateRequest) -> bytes:
    return encode_request(request).SerializeToString()


def _typed(error: grpc.aio.AioRpcError, address: str) -> TriptychError:
    return from_status(error.code(), f"{address}: {error.details()}", error.trailing_metadata() or ())
