"""The Inference service.

    refuse     metadata, message, role.accept    -> a gRPC status, nothing is held
               the message is asked for when there is room for it (message_bytes.py), and let go once it is read
    accept     initial metadata                  -> the caller knows
    stream     events as they come
    end        exactly one terminal event        -> trailing metadata (spans, or the error's class), OK

A call is served by a task of its own, which its handler only waits for, and an answer is closed by another one: however
often and whenever gRPC cancels the handler, the role sees one cancellation and its cleanup is never interrupted.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import grpc

from triptych.core.config import KIB, MIB
from triptych.core.encoded import EncoderReference
from triptych.core.errors import Internal, Overloaded, PromptTooLong, Status, TriptychError, UnsupportedFeature
from triptych.core.events import EncoderReady, Event, Failed, Finished, PrefillReady, is_terminal
from triptych.core.session import KvSession
from triptych.rpc.describe import opens_media
from triptych.rpc.metadata import CallMetadata, read_metadata
from triptych.rpc.parse import parse
from triptych.rpc.refuse import refuse, typed
from triptych.rpc.watchdog import STALL_SECONDS, Watchdog, give_up
from triptych.wire.codec import decode_request
from triptych.wire.codec_events import (
    LARGE_EVENT,
    SPANS_TRAILER,
    encode_spans,
    event_entries,
    split_event,
    write_event,
)
from triptych.wire.codec_reference import MAX_REFERENCE_BYTES
from triptych.wire.gen import generation_pb2 as pb
from triptych.wire.limits import LARGE_MESSAGE, MAX_MESSAGE
from triptych.wire.scan import Limits
from triptych.wire.status import as_typed, kind_trailers

if TYPE_CHECKING:
    from triptych.core.request import GenerateRequest
    from triptych.roles.contract import Answer, Role
    from triptych.rpc.message_bytes import Message, MessageBytes
    from triptych.wire.codec_reference import ReferenceCodec
    from triptych.wire.codec_session import SessionCodec

log = logging.getLogger(__name__)

_ID_BYTES = 10
"""The most that one packed token id takes."""


class Accepted(NamedTuple):
    """A request that the role has taken on."""

    request_id: str
    answer: Answer


class Written(NamedTuple):
    """An event on its way out."""

    event: Event
    data: bytes


class Inference:
    """Serves Generate over any role."""

    def __init__(
        self,
        role: Role,
        sessions: SessionCodec,
        references: ReferenceCodec,
        messages: MessageBytes,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """``stall_seconds`` bounds the time blocked in handing one event over; a slow engine does not count."""
        self._role = role
        self._sessions = sessions
        self._references = references
        self._messages = messages
        self._stall_seconds = stall_seconds
        self._calls: set[asyncio.Task[None]] = set()
        # One thread each way: protobuf holds the interpreter's lock, and several threads that want it would make the
        # event loop wait for all of them.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write")

    def add_to(self, server: grpc.aio.Server) -> None:
        """Have a server hand its calls over, as bytes both ways: reading and writing what is large takes a while.

        For gRPC the message is the first of a stream. It would receive the only one of a call before it calls us,
        however many there are, and keep it until the call is over.
        """
        handler = grpc.stream_stream_rpc_method_handler(self.generate)
        methods = grpc.method_handlers_generic_handler("openengine.v1.Inference", {"Generate": handler})
        server.add_generic_rpc_handlers((methods,))

    async def generate(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """One request from refusal or acceptance to its end; its message is read from ``context``."""
        call = asyncio.create_task(self._serve(context))
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
        self._reader.shutdown()
        self._writer.shutdown()

    async def _serve(self, context: grpc.aio.ServicerContext) -> None:
        try:
            accepted = await self._accept(context)
        except Exception as error:
            refusal = typed(error)
        else:
            await self._stream(accepted.request_id, accepted.answer, context)
            return
        if refusal.status in (Status.UNIMPLEMENTED, Status.INTERNAL):
            # Headers first: there are clients that take a refusal without headers, unless it calls the request itself
            # wrong, for a server that is ill, and send nobody's requests there for a while. An engine that really is
            # ill says UNAVAILABLE.
            await context.send_initial_metadata(())
        await refuse(context, refusal)

    async def _accept(self, context: grpc.aio.ServicerContext) -> Accepted:
        metadata = read_metadata(context.invocation_metadata() or ())
        async with self._messages.receive(context) as message:
            request = await self._read(message, metadata)
            return Accepted(request.request_id, await self._role.accept(request))

    async def _read(self, message: Message, metadata: CallMetadata) -> GenerateRequest:
        """The request; nothing of the message is left. It is always read to its end: a thread cannot be stopped."""
        limit = self._role.model.max_context
        if message.size < LARGE_MESSAGE:
            return self._decode(message, metadata, limit)
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._reader, self._decode, message, metadata, limit)
        try:
            return await asyncio.shield(reading)
        finally:
            while not reading.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({reading})

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
            await give_up(context, self._stalled())
        finally:
            await asyncio.shield(self._close(request_id, answer))

    async def _send_all(
        self, request_id: str, answer: Answer, context: grpc.aio.ServicerContext, watchdog: Watchdog
    ) -> None:
        while True:
            for part in await _next(request_id, answer):
                written = await self._write(part, answer)
                if _leaving():
                    await self._take_back(part)
                # From here on nobody knows whether the client has read it: many leave as soon as they have. A session
                # that it has read of must stay; its lease ends by itself.
                await watchdog.watch(context.write(written.data))
                if is_terminal(written.event):
                    _set_trailers(written.event, context)
                    return
                if watchdog.stalled:
                    stalled = Failed(request_id, self._stalled())
                    await watchdog.watch(context.write(write_event(stalled)))
                    _set_trailers(stalled, context)
                    return

    async def _write(self, event: Event, answer: Answer) -> Written:
        """The event as a message; where that cannot be had, the failure that ends the request instead."""
        sent = (event, answer.token_text, self._sessions, self._references)
        try:
            if event_entries(event) < LARGE_EVENT:
                return Written(event, write_event(*sent))
            loop = asyncio.get_running_loop()
            return Written(event, await loop.run_in_executor(self._writer, write_event, *sent))
        except Exception as error:
            failed = Failed(event.request_id, typed(error))
            await self._take_back(event)
        except BaseException:
            await self._take_back(event)
            raise
        return Written(failed, write_event(failed))

    async def _take_back(self, event: Event) -> None:
        """Nobody has read of what the event hands over, if it does: nobody will take it. Never waits."""
        match event:
            case PrefillReady(session=KvSession(handle=handle)):
                with suppress(TriptychError):
                    await self._role.abort_session(handle.session_id)
            case EncoderReady(references=references):
                for one in references:
                    if isinstance(one, EncoderReference):
                        with suppress(TriptychError):
                            await self._role.abort_rows(one.item.handle.session_id)

    def _decode(self, sent: Message, metadata: CallMetadata, max_context: int) -> GenerateRequest:
        message = parse(pb.GenerateRequest, sent.take(), _limits(max_context))
        # Expansion only adds tokens; checked here so that millions of ids are not turned into objects first.
        tokens = len(message.token_ids.ids)
        if tokens > max_context:
            raise PromptTooLong(f"the prompt has {tokens} tokens; the context window has {max_context}")
        engine = self._role.engine
        if message.HasField("encoder") and not (engine.encodes or engine.takes_rows):
            raise UnsupportedFeature("encoder is not supported by this engine")
        opened = message.kv.HasField("session") or message.encoder_cache  # by whoever read the options then
        if message.media_options.fields and not opened and not opens_media(engine, self._role.model):
            raise UnsupportedFeature("media_options: this engine opens no media, so there is nothing that they change")
        # An engine that takes no sessions, or no references, says so, whatever is in one.
        sessions = self._sessions if engine.takes_over else None
        references = self._references if engine.takes_rows else None
        return decode_request(message, priority=metadata.priority, sessions=sessions, references=references)

    def _stalled(self) -> Overloaded:
        return Overloaded(f"the answer was not read for {self._stall_seconds:g} s, so the request was ended")

    def _close(self, request_id: str, answer: Answer) -> asyncio.Task[None]:
        """Clean up in a task of its own, which nothing cancels."""
        closing = asyncio.create_task(_close(request_id, answer))
        self._calls.add(closing)
        closing.add_done_callback(self._calls.discard)
        return closing


def _limits(max_context: int) -> Limits:
    """Sizes of a request's fields, all before one object is made of them."""
    return Limits(
        MIB,
        {
            "media": MAX_MESSAGE,
            # A token is seldom more than a few characters; whoever sends many more is told by the tokenizer's bound.
            "prompt": 64 * max_context + MIB,
            "token_ids": _ID_BYTES * max_context + KIB,
            "kv": 4 * MIB,
            "encoder": KIB,
            "media_options": 16 * KIB,
            "encoder_cache": MAX_REFERENCE_BYTES,  # each of them
        },
    )


async def _next(request_id: str, answer: Answer) -> tuple[Event, ...]:
    """The next event, in parts that fit a message; whatever else the role does becomes a terminal one."""
    try:
        return split_event(await anext(answer))
    except StopAsyncIteration:
        error: TriptychError = Internal("the engine ended the answer without a terminal event")
        log.error("request %r: %s", request_id, error)
    except asyncio.CancelledError as cancelled:
        if _leaving():
            raise
        error = as_typed(cancelled)
    except Exception as failure:
        error = typed(failure)
    return (Failed(request_id, error),)


def _leaving() -> bool:
    """Whether this task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _set_trailers(event: Event, context: grpc.aio.ServicerContext) -> None:
    match event:
        case Finished(spans=spans) | PrefillReady(spans=spans) | EncoderReady(spans=spans):
            context.set_trailing_metadata(((SPANS_TRAILER, encode_spans(spans)),))
        case Failed(error=error):
            context.set_trailing_metadata(kind_trailers(error))


async def _close(request_id: str, answer: Answer) -> None:
    try:
        await answer.aclose()
    except Exception:
        log.exception("closing request %r failed", request_id)
