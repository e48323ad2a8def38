"""The Inference service.

    refuse     metadata, message, role.accept    -> a gRPC status, nothing is held
    accept     initial metadata                  -> the caller knows
    stream     events as they come
    end        exactly one terminal event        -> trailing metadata (spans, or the error's class), OK

A call is served by a task of its own, which its handler only waits for, and an answer is closed by another one: however
often and whenever gRPC cancels the handler, the role sees one cancellation and its cleanup is never interrupted.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from triptych.core.errors import Internal, InvalidRequest, Overloaded, PromptTooLong, TriptychError
from triptych.core.events import Event, Failed, Finished, Tokens
from triptych.rpc.metadata import check_metadata
from triptych.rpc.refuse import refuse, typed
from triptych.wire.channel import LARGE_REQUEST
from triptych.wire.codec import decode_request
from triptych.wire.codec_events import SPANS_TRAILER, encode_event, encode_spans
from triptych.wire.gen import generation_pb2 as pb
from triptych.wire.status import as_typed, kind_trailers, to_status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from triptych.core.request import GenerateRequest
    from triptych.roles.contract import Answer, Role

log = logging.getLogger(__name__)

STALL_SECONDS = 30.0
"""How long a consumer may leave one event unread."""
ABORT_SECONDS = 1.0
"""How long to wait for the status of a lost consumer to leave."""


class Accepted(NamedTuple):
    """A request that the role has taken on."""

    request_id: str
    answer: Answer


class Inference:
    """Serves Generate over any role."""

    def __init__(self, role: Role, stall_seconds: float = STALL_SECONDS) -> None:
        """``stall_seconds`` bounds the time blocked in handing one event over; a slow engine does not count."""
        self._role = role
        self._stall_seconds = stall_seconds
        self._calls: set[asyncio.Task[None]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Have a server hand its calls over; the request comes as bytes, since reading a large one takes a while."""
        handler = grpc.unary_stream_rpc_method_handler(
            self.generate, response_serializer=pb.GenerateResponse.SerializeToString
        )
        methods = grpc.method_handlers_generic_handler("openengine.v1.Inference", {"Generate": handler})
        server.add_generic_rpc_handlers((methods,))

    async def generate(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        """One request from refusal or acceptance to its end."""
        call = asyncio.create_task(self._serve(request, context))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            call.cancel()
            raise

    async def settled(self) -> None:
        """Wait until every call that was cancelled is over and cleaned up."""
        while self._calls:
            await asyncio.wait(self._calls)

    async def _serve(self, data: bytes, context: grpc.aio.ServicerContext) -> None:
        try:
            accepted = await self._accept(data, context)
        except Exception as error:
            refusal = typed(error)
        else:
            await self._stream(accepted.request_id, accepted.answer, context)
            return
        await refuse(context, refusal)

    async def _accept(self, data: bytes, context: grpc.aio.ServicerContext) -> Accepted:
        check_metadata(context.invocation_metadata() or (), inference=True)
        limit = self._role.model.max_context
        large = len(data) >= LARGE_REQUEST
        request = await asyncio.to_thread(_read, data, limit) if large else _read(data, limit)
        return Accepted(request.request_id, await self._role.accept(request))

    async def _stream(self, request_id: str, answer: Answer, context: grpc.aio.ServicerContext) -> None:
        try:
            await context.send_initial_metadata(())
            async with asyncio.timeout(None) as scope:
                watchdog = Watchdog(
                    self._stall_seconds,
                    on_stall=lambda: self._close(request_id, answer),
                    on_loss=lambda: scope.reschedule(asyncio.get_running_loop().time()),
                )
                try:
                    await self._send_all(request_id, answer, context, watchdog)
                finally:
                    watchdog.stop()
        except TimeoutError:
            await _abort(context, self._stalled())
        finally:
            await asyncio.shield(self._close(request_id, answer))

    async def _send_all(
        self, request_id: str, answer: Answer, context: grpc.aio.ServicerContext, watchdog: Watchdog
    ) -> None:
        while True:
            event = await _next(request_id, answer)
            await watchdog.watch(context.write(encode_event(event)))
            if not isinstance(event, Tokens):
                break
            if watchdog.stalled:
                await watchdog.watch(context.write(encode_event(Failed(request_id, self._stalled()))))
                break
        match event:
            case Finished(spans=spans):
                context.set_trailing_metadata(((SPANS_TRAILER, encode_spans(spans)),))
            case Failed(error=error):
                context.set_trailing_metadata(kind_trailers(error))

    def _stalled(self) -> Overloaded:
        return Overloaded(f"the answer was not read for {self._stall_seconds:g} s, so the request was ended")

    def _close(self, request_id: str, answer: Answer) -> asyncio.Task[None]:
        """Clean up in a task of its own, which nothing cancels."""
        closing = asyncio.create_task(_close(request_id, answer))
        self._calls.add(closing)
        closing.add_done_callback(self._calls.discard)
        return closing


class Watchdog:
    """Sees how long one event stays unread: one timer for a stream, nothing for an event.

    gRPC takes one message at a time, so after a stall the error event can follow only once the unread one is read.
    The stall therefore comes in two steps: the limit passes and the request is ended; it passes again with nothing
    read and the consumer is lost.
    """

    def __init__(self, seconds: float, *, on_stall: Callable[[], object], on_loss: Callable[[], object]) -> None:
        self._seconds = seconds
        self._on_stall = on_stall
        self._on_loss = on_loss
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self.stalled = False
        """Whether the limit has passed once."""
        self._timer = self._loop.call_later(seconds, self._look)

    async def watch(self, write: Awaitable[None]) -> None:
        """Wait for one event to be handed over."""
        self._since = self._loop.time()
        await write
        self._since = None

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if self._since is not None and now >= self._since + self._seconds:
            if self.stalled:
                self._on_loss()
                return
            self.stalled = True
            self._on_stall()
            self._since = now
        self._timer = self._loop.call_at((self._since or now) + self._seconds, self._look)


def _read(data: bytes, max_context: int) -> GenerateRequest:
    try:
        message = pb.GenerateRequest.FromString(data)
    except DecodeError:
        raise InvalidRequest("the bytes are no GenerateRequest") from None
    # Expansion only adds tokens; checked here so that millions of ids are not turned into objects first.
    tokens = len(message.token_ids.ids)
    if tokens > max_context:
        raise PromptTooLong(f"the prompt has {tokens} tokens; the context window has {max_context}")
    return decode_request(message)


async def _next(request_id: str, answer: Answer) -> Event:
    """The next event; whatever else the role does instead becomes a terminal one."""
    try:
        event: Event = await anext(answer)
    except StopAsyncIteration:
        error: TriptychError = Internal("the engine ended the answer without a terminal event")
        log.error("request %r: %s", request_id, error)
    except asyncio.CancelledError as cancelled:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        error = as_typed(cancelled)
    except Exception as failure:
        error = typed(failure)
    else:
        return event
    return Failed(request_id, error)


async def _abort(context: grpc.aio.ServicerContext, error: TriptychError) -> None:
    """End a call whose consumer does not read; the status leaves by itself once it does."""
    code, message, trailers = to_status(error)
    abort = asyncio.create_task(context.abort(code, message, trailers))
    done, _ = await asyncio.wait({abort}, timeout=ABORT_SECONDS)
    if done:
        await abort
    abort.add_done_callback(_retrieve)


def _retrieve(abort: asyncio.Task[None]) -> None:
    # context.abort always raises; by now nobody waits for it.
    if not abort.cancelled():
        abort.exception()


async def _close(request_id: str, answer: Answer) -> None:
    try:
        await answer.aclose()
    except Exception:
        log.exception("closing request %r failed", request_id)
