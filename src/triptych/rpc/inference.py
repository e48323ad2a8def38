"""The Inference service.

    refuse     metadata, message, role.accept    -> a gRPC status, nothing is held
    accept     initial metadata                  -> the caller knows
    stream     events as they come
    end        exactly one terminal event        -> trailing spans, OK

A call is served by a task of its own, which its handler only waits for: however often gRPC cancels the handler, the
task is cancelled once, so that the role's cleanup is never interrupted.
"""
# ruff: noqa: N802 - methods are named by the contract

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from triptych.core.errors import Internal, Overloaded, PromptTooLong, TriptychError
from triptych.core.events import Event, Failed, Finished, Tokens
from triptych.rpc.metadata import check_metadata
from triptych.rpc.refuse import refuse, typed
from triptych.wire.codec import decode_request
from triptych.wire.codec_events import SPANS_TRAILER, encode_event, encode_spans
from triptych.wire.gen import openengine_pb2_grpc
from triptych.wire.status import as_typed, to_status

if TYPE_CHECKING:
    import grpc

    from triptych.roles.contract import Answer, Role
    from triptych.wire.gen import generation_pb2 as pb

log = logging.getLogger(__name__)

STALL_SECONDS = 30.0
"""How long a consumer may leave one event unread."""
ABORT_SECONDS = 1.0
"""How long to wait for a status to leave; it leaves by itself once the consumer reads."""


class Inference(openengine_pb2_grpc.InferenceServicer):
    """Serves Generate over any role."""

    def __init__(self, role: Role, stall_seconds: float = STALL_SECONDS) -> None:
        """``stall_seconds`` bounds the time blocked in handing one event over; a slow engine does not count."""
        self._role = role
        self._stall_seconds = stall_seconds
        self._calls: set[asyncio.Task[None]] = set()

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:  # type: ignore[override]
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
        """Wait until every call that was cancelled has cleaned up."""
        while self._calls:
            await asyncio.wait(self._calls)

    async def _serve(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            answer = await self._accept(message, context)
        except Exception as error:
            refusal = typed(error)
        else:
            await self._stream(message.request_id, answer, context)
            return
        await refuse(context, refusal)

    async def _accept(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> Answer:
        check_metadata(context.invocation_metadata() or (), inference=True)
        # Expansion only adds tokens; checked here so that millions of ids are not turned into objects first.
        tokens, limit = len(message.token_ids.ids), self._role.model.max_context
        if tokens > limit:
            raise PromptTooLong(f"the prompt has {tokens} tokens; the context window has {limit}")
        return await self._role.accept(decode_request(message))

    async def _stream(self, request_id: str, answer: Answer, context: grpc.aio.ServicerContext) -> None:
        delivery = Delivery(context, self._stall_seconds)
        try:
            await context.send_initial_metadata(())
            while True:
                event = await _next(request_id, answer)
                if not await delivery.send(event):
                    break
                if not isinstance(event, Tokens):
                    if isinstance(event, Finished):
                        context.set_trailing_metadata(((SPANS_TRAILER, encode_spans(event.spans)),))
                    return
        finally:
            await _close(request_id, answer)
        await delivery.give_up(request_id)


class Delivery:
    """Hands events to gRPC and measures how long one stays unread."""

    def __init__(self, context: grpc.aio.ServicerContext, stall_seconds: float) -> None:
        self._context = context
        self._stall_seconds = stall_seconds
        self._stuck: asyncio.Task[None] | None = None

    async def send(self, event: Event) -> bool:
        """Hand one event over; False if the consumer did not read within the limit."""
        write = asyncio.create_task(self._context.write(encode_event(event)))
        return await self._finish(write)

    async def _finish(self, write: asyncio.Task[None]) -> bool:
        try:
            done, _ = await asyncio.wait({write}, timeout=self._stall_seconds)
        except asyncio.CancelledError:
            write.cancel()
            raise
        if not done:
            self._stuck = write
            return False
        self._stuck = None
        await write
        return True

    async def give_up(self, request_id: str) -> None:
        """End a stalled call, whose request is closed already.

        gRPC takes one message at a time, so the error event can follow only once the stuck one is read. If that
        does not happen within the limit either, the call ends with a status instead.
        """
        error = Overloaded(f"the answer was not read for {self._stall_seconds:g} s, so the request was ended")
        if self._stuck is not None and await self._finish(self._stuck) and await self.send(Failed(request_id, error)):
            return
        code, message, trailers = to_status(error)
        abort = asyncio.create_task(self._context.abort(code, message, trailers))
        done, _ = await asyncio.wait({abort}, timeout=ABORT_SECONDS)
        if done:
            await abort
        abort.add_done_callback(_retrieve)


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


def _retrieve(abort: asyncio.Task[None]) -> None:
    # context.abort always raises; by now nobody waits for it.
    if not abort.cancelled():
        abort.exception()


async def _close(request_id: str, answer: Answer) -> None:
    try:
        await answer.aclose()
    except Exception:
        log.exception("closing request %r failed", request_id)
