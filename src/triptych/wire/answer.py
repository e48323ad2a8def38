"""The answer of an engine elsewhere: its events in the order that the contract promises, whatever it sends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from triptych.core.errors import Cancelled, Draining, Internal, TriptychError
from triptych.core.events import (
    EncoderReady,
    Event,
    Failed,
    Finished,
    PrefillReady,
    Prompt,
    Tokens,
    Usage,
    is_terminal,
)
from triptych.wire.codec_events import decode_event, spans_in
from triptych.wire.gen import generation_pb2 as pb
from triptych.wire.limits import LARGE_MESSAGE
from triptych.wire.status import UNREADABLE, from_status, refined

if TYPE_CHECKING:
    from triptych.core.request import GenerateRequest

TRAILER_SECONDS = 1.0
"""How long a stream may stay open behind its terminal event."""


class RemoteAnswer:
    """The events of one request; ``EngineChannel.generate`` makes it."""

    def __init__(self, call: Any, address: str, request: GenerateRequest) -> None:
        """``call`` yields messages as bytes."""
        self._call = call
        self._address = address
        self._request_id = request.request_id
        self._order = _Order(request)
        self._next: Event | None = None
        self._ended = False

    async def start(self) -> None:
        """Wait for the first event.

        Raises:
            TriptychError: the request was refused, or that event is its failure.
        """
        try:
            first = await self._read()
            if isinstance(first, Failed):
                raise first.error
        except BaseException:
            await self.aclose()
            raise
        self._next = first

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
                event = await self._read()
            except TriptychError as error:
                event = Failed(self._request_id, error)
        if is_terminal(event):
            await self.aclose()
        return event

    async def aclose(self) -> None:
        """Cancel the request unless it has ended. Never waits, so it cannot be cancelled half-way."""
        self._ended = True
        self._call.cancel()

    async def _read(self) -> Event:
        data = await self._receive()
        # A delta takes microseconds; log probabilities of a whole vocabulary do not.
        large = len(data) >= LARGE_MESSAGE
        event = await asyncio.to_thread(self._order.read, data) if large else self._order.read(data)
        match event:
            case Finished(usage=Usage()) | PrefillReady() | EncoderReady():
                return replace(event, spans=spans_in(await self._trailers()))
            case Failed(error=failure):
                return replace(event, error=refined(failure, await self._trailers()))
        return event

    async def _receive(self) -> bytes:
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise typed(error, self._address) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Cancelled(f"the connection to {self._address} was closed") from None
        if data is grpc.aio.EOF:
            raise Draining(f"{self._address} ended the answer without a terminal event")
        message: bytes = data
        return message

    async def _trailers(self) -> tuple[tuple[str, str | bytes], ...]:
        """What follows the terminal event; nothing where it does not come in time."""
        try:
            async with asyncio.timeout(TRAILER_SECONDS):
                return tuple(await self._call.trailing_metadata() or ())
        except TimeoutError:
            return ()


class _Order:
    """Which events may still come."""

    def __init__(self, request: GenerateRequest) -> None:
        self._outputs = request.num_sequences
        self._prompt = request.logprobs.prompt
        self._handoff = request.handoff
        self._encoded = None if request.encode is None else len(request.media)
        self._finished: set[int] = set()

    def read(self, data: bytes) -> Event:
        """The next event. The end of the last output is terminal, also where its engine reports no usage.

        Raises:
            Internal: the engine broke the contract; the message says how.
        """
        try:
            message = pb.GenerateResponse.FromString(data)
        except UNREADABLE:
            raise Internal("the engine sent bytes that are no GenerateResponse") from None
        event = decode_event(message, self._outputs)
        if self._encoded is not None:
            self._refuse_other_than_encoded(event, self._encoded)
        match event:
            case Prompt():
                if not self._prompt:
                    raise Internal("the engine sent a prompt that was not asked for, or sent it late or twice")
                self._prompt = False
            case Tokens(output_index=index):
                self._prompt = False
                self._refuse_finished(index)
            case Finished(output_index=index, usage=usage):
                self._prompt = False
                self._refuse_finished(index)
                self._finished.add(index)
                last = len(self._finished) == self._outputs
                return replace(event, usage=(usage or Usage(0, 0, 0)) if last else None)
            case PrefillReady():
                if not self._handoff:
                    raise Internal("the engine handed the prompt over (prefill_ready), and an answer was asked for")
            case EncoderReady() if self._encoded is None:
                raise Internal("the engine encoded the media (encoder_ready), and that was not asked for")
        return event

    def _refuse_other_than_encoded(self, event: Event, items: int) -> None:
        match event:
            case EncoderReady(references=references) if len(references) != items:
                raise Internal(f"the engine sent {len(references)} encoder references for {items} media item(s)")
            case Prompt() | Tokens() | PrefillReady():
                raise Internal("the engine was asked to encode the media and did something else")

    def _refuse_finished(self, index: int) -> None:
        if index in self._finished:
            raise Internal(f"the engine went on with output {index} after its end")


def typed(error: grpc.aio.AioRpcError, address: str) -> TriptychError:
    """The error that ended a call."""
    return from_status(error.code(), f"{address}: {error.details()}", error.trailing_metadata() or ())
