"""One request's media, turned into rows by encoder engines; what is left of them are references.

    items      shared out: each to the encoder that had it before, unless that one is too busy
    encoders   one Generate each with its items: all at the same time if nobody else is there, else one after the other
    patience   one has answered, another has not for long: all is let go, and they are asked one after the other
    refused    by one of them: its items go to others
    there      of all items: references in the request's order, whoever came first
    let go     when the request ends before somebody has used them, where they were made

Each Generate has an id of its own, so that ending one, however late, never ends another.

An encoder that has answered keeps the rows in memory of which it has only so much, and another one may wait for just
such memory: two requests could wait for what the other one holds, for as long as references last. Who asks one encoder
after the other, all in the same order, cannot be part of such a ring.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.encoded import SealedReference
from triptych.core.errors import Cancelled, Draining, Internal, MediaError, TriptychError
from triptych.core.events import EncoderReady, Failed, Finished, FinishReason
from triptych.core.request import EncodeOptions, GenerateRequest
from triptych.gateway.abilities import Part, RowEnd
from triptych.gateway.affinity import choose, digest, source_bytes
from triptych.gateway.engine import Measured
from triptych.wire.limits import LARGE_MESSAGE
from triptych.wire.status import item_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.media import MediaItem
    from triptych.gateway.aborts import Aborts
    from triptych.gateway.engine import Engine
    from triptych.gateway.pool import Errand, Pool
    from triptych.gateway.workers import Workers


PATIENCE_SECONDS = 1.0
"""How long outputs that are there wait for the others, if those that came first did not take longer themselves."""


class Output(NamedTuple):
    """One item, encoded."""

    engine: Engine
    """Who keeps it."""
    end: RowEnd
    """What whoever takes it must have in common with that engine."""
    reference: SealedReference


class Encoded(NamedTuple):
    """All items of a request."""

    outputs: tuple[Output, ...]
    """In the request's order."""
    measured: tuple[Measured, ...]

    def fits(self, reader: Engine) -> bool:
        """Whether an engine can take all of them."""
        end = reader.abilities.rows if reader.abilities else None
        return end is not None and not any(one.end.misfit(end) for one in self.outputs)


class Encoders(NamedTuple):
    """What encoding needs of the gateway."""

    pool: Pool
    aborts: Aborts
    workers: Workers
    seconds: float
    """How long one encoder may take with the items of one request."""

    def left(self, errand: Errand, reader: Engine) -> list[Engine]:
        """The encoders that can still be asked to encode a request for an engine."""
        return self.pool.left(errand, Part.ENCODE, lambda encoder: errand.wanted <= encoder.rows_for(reader))

    def let_go(self, outputs: Sequence[Output]) -> None:
        """Have outputs released that nobody will use."""
        for one in outputs:
            self.aborts.tell(one.engine.channel.abort_reference(one.reference))


class Encoding:
    """Encodes one request, as often as that is needed."""

    def __init__(self, encoders: Encoders, errand: Errand) -> None:
        self.encoders = encoders
        self.errand = errand
        self._asked = 0
        """Generates so far."""
        self._digests: tuple[bytes, ...] = ()
        """Of the items; computed when there is a choice."""
        self._in_turn = False
        """Whether encoders are asked one after the other."""

    async def run(self, reader: Engine) -> Encoded | None:
        """Encode all items for an engine; None when no encoder is left, and nothing is held then.

        Raises:
            TriptychError: an item cannot be used, or another failure that would come again; nothing is held.
        """
        items = range(len(self.errand.request.media))
        way = _Way(reader, {}, [], _Patience(asyncio.timeout(None), asyncio.get_running_loop().time()))
        done = False
        try:
            async with way.patience.scope:
                done = await self._share_out(items, way)
        except TimeoutError:
            self._in_turn = True
        finally:
            if not done:
                self.encoders.let_go(tuple(way.outputs.values()))
        if done:
            return Encoded(tuple(way.outputs[item] for item in items), tuple(way.measured))
        return await self.run(reader) if way.patience.scope.expired() else None

    async def _share_out(self, items: Sequence[int], way: _Way) -> bool:
        """Encode some items; returns whether they are there."""
        shares = await self._shares(items, way.reader)
        if not shares:
            return False
        in_turn = self._in_turn or any(engine.in_flight for engine, _ in shares)
        with ExitStack() as charges:  # from now on, and for a task that is cancelled before it begins
            asks = [_Ask(engine, share, charges.enter_context(_charge(engine, share))) for engine, share in shares]
            if in_turn:
                for ask in asks:
                    if not await self._encode(ask, way):
                        return False
                return True
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._encode(ask, way)) for ask in asks]
            except BaseExceptionGroup as failures:  # the others were cancelled with the first that failed
                raise failures.exceptions[0] from None
        return all(task.result() for task in tasks)

    async def _shares(self, items: Sequence[int], reader: Engine) -> list[tuple[Engine, Sequence[int]]]:
        """Who gets which items, in the order of all requests; nobody, when no encoder is left."""
        left = self.encoders.left(self.errand, reader)
        if len(left) > 1 and not self._digests:
            self._digests = await self._digest()
            left = self.encoders.left(self.errand, reader)
        if len(left) < 2:
            return [(engine, items) for engine in left]
        fewest = self.errand.strikes(left[0])
        by_address = {engine.address: engine for engine in left if self.errand.strikes(engine) == fewest}
        loads = {address: engine.in_flight for address, engine in by_address.items()}
        shares: dict[str, list[int]] = {}
        for item in items:
            address = choose(self._digests[item], loads)
            loads[address] += 1
            shares.setdefault(address, []).append(item)
        return [(by_address[address], share) for address, share in sorted(shares.items())]

    async def _digest(self) -> tuple[bytes, ...]:
        media = self.errand.request.media
        if sum(map(source_bytes, media)) < LARGE_MESSAGE:
            return _digests(media)
        return await self.encoders.workers.run(_digests, media)

    async def _encode(self, ask: _Ask, way: _Way) -> bool:
        """Have one encoder encode some items, or others when it cannot; returns whether they are there."""
        try:
            with ask.charge:
                async with asyncio.timeout(self.encoders.seconds):
                    await self._ask(ask.engine, ask.items, way)
        except TimeoutError:
            failure: TriptychError = Draining(
                f"{ask.engine.address}: the media were not encoded within {self.encoders.seconds:g} s"
            )
        except TriptychError as error:
            failure = error
        else:
            return True
        self.errand.failed(_named(failure, ask.items))
        self.errand.give_up(ask.engine)
        return await self._share_out(ask.items, way)

    async def _ask(self, engine: Engine, items: Sequence[int], way: _Way) -> None:
        """Take what one encoder makes of some items.

        Raises:
            TriptychError: it makes nothing, or not what was asked for.
        """
        end = _end(engine, way.reader)
        asked = self._request(items, engine, end)
        try:
            ready = await _ready(engine, asked)
        except (asyncio.CancelledError, Draining, Internal):
            self.encoders.aborts.tell(engine.channel.abort(asked.request_id))  # outputs may be on their way here
            raise
        references = [reference for reference in ready.references if isinstance(reference, SealedReference)]
        outputs = [Output(engine, end, reference) for reference in references]
        if len(outputs) != len(items):
            self.encoders.let_go(outputs)
            raise Internal(f"{engine.address} encoded {len(items)} media item(s) and handed {len(outputs)} over")
        way.outputs.update(zip(items, outputs, strict=True))
        way.measured.append(Measured(f"encoder {engine.address}", ready.spans))
        if not self._in_turn and len(way.outputs) < len(self.errand.request.media):
            way.patience.begin()

    def _request(self, items: Sequence[int], engine: Engine, end: RowEnd) -> GenerateRequest:
        """The request's items, and for each the marker that stands for it, as in a prompt."""
        whole = self.errand.request
        media = tuple(whole.media[item] for item in items)
        markers = engine.model.markers if engine.model is not None else {}
        if not all(item.modality in markers for item in media):
            raise Draining(f"{engine.address} was started anew and names no token for such media any more")
        self._asked += 1
        return GenerateRequest(
            request_id=f"{whole.request_id}/encode-{self._asked}",
            model=whole.model,
            prompt=tuple(markers[item.modality] for item in media),
            media=media,
            media_options=whole.media_options,
            cache=whole.cache,
            priority=whole.priority,
            encode=EncodeOptions(min(end.backends)),
        )


class _Way(NamedTuple):
    """Where what is made of one request's items goes."""

    reader: Engine
    """Whom they are made for."""
    outputs: dict[int, Output]
    """Those that are there, by the item's index."""
    measured: list[Measured]
    patience: _Patience


class _Patience(NamedTuple):
    """How long outputs that are there wait for others."""

    scope: asyncio.Timeout
    start: float
    """When the encoders were asked, in the loop's seconds."""

    def begin(self) -> None:
        """Some outputs are there, but not all; the first time counts."""
        if self.scope.when() is None:
            now = asyncio.get_running_loop().time()
            self.scope.reschedule(now + max(PATIENCE_SECONDS, now - self.start))


class _Ask(NamedTuple):
    """What one encoder is asked for."""

    engine: Engine
    items: Sequence[int]
    """Indices in the request."""
    charge: ExitStack
    """Counts them as being there until it is closed."""


def _charge(engine: Engine, items: Sequence[int]) -> ExitStack:
    """Count items as being at an encoder, before anybody else chooses one."""
    engine.in_flight += len(items)
    charge = ExitStack()
    charge.callback(engine.left, len(items))
    return charge


def _digests(media: Sequence[MediaItem]) -> tuple[bytes, ...]:
    return tuple(map(digest, media))


def _end(engine: Engine, reader: Engine) -> RowEnd:
    """What an encoder's rows for an engine need at their other end: one of the transports that the two share.

    Raises:
        Draining: one of the two was started anew meanwhile, with other settings.
    """
    made, taken = engine.abilities and engine.abilities.rows, reader.abilities and reader.abilities.rows
    if not made or not taken or made.misfit(taken):
        raise Draining(f"{engine.address} and {reader.address} do not fit together any more")
    return replace(made, backends=frozenset({min(made.backends & taken.backends)}))


async def _ready(engine: Engine, asked: GenerateRequest) -> EncoderReady:
    """What an encoder answers.

    Raises:
        TriptychError: it does not encode.
    """
    events = await engine.generate(asked)
    try:
        async for event in events:
            match event:
                case EncoderReady():
                    return event
                case Failed(error=error):
                    raise error
                case Finished(reason=FinishReason.CANCELLED):
                    raise Cancelled("the encoder engine was told to end this request")
                case Finished():
                    break
        raise Internal(f"{engine.address} encoded nothing and says that it has finished")
    finally:
        await events.aclose()


def _named(error: TriptychError, items: Sequence[int]) -> TriptychError:
    """The error with the index that its item has in the whole request; with those of all, if it may be about any."""
    about = item_message(str(error))
    if about is None:
        which = f"item {items[0]}" if len(items) == 1 else f"items {', '.join(map(str, items))}"
        return type(error)(f"media {which}: {error}") if error.retryable else error
    if about.item >= len(items):
        return error
    item = items[about.item]
    if isinstance(error, MediaError):
        return type(error)(item, error.reason, error.stage)
    return type(error)(f"media item {item}: {about.reason}")
