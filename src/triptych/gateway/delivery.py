"""One request's way to the engine that reads its prompt: which one it is, and in what form its media go there.

    no media       any of them; encoders have no part in it
    media          encoded first, where there are encoders whose rows somebody takes
                   as they are, where nobody encodes and somebody takes them so
    references     to one reader after the other until one has taken them; nobody needs them afterwards
    gone, or lost  the media are encoded again; twice at the same engines at most
    not taken      when the request ends: let go

Two readers may differ: one takes media as they are, another only what a certain encoder made of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import (
    Draining,
    KvSessionNotFound,
    KvTransferFailed,
    ReferenceNotFound,
    RowTransferFailed,
    TriptychError,
)
from triptych.core.media_options import OptionLayer
from triptych.gateway.encode import Encoders, Encoding
from triptych.gateway.pool import no_encoder, not_ready, reason
from triptych.wire.status import item_message

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.core.request import GenerateRequest
    from triptych.gateway.abilities import Part
    from triptych.gateway.encode import Encoded
    from triptych.gateway.engine import Engine, Measured
    from triptych.gateway.pool import Errand

_GONE = (ReferenceNotFound, RowTransferFailed, KvSessionNotFound, KvTransferFailed)
"""Of references that were offered. The latter two have the same codes, and a word beside them may have been lost."""


class Leg(NamedTuple):
    """What is to be tried next."""

    reader: Engine
    request: GenerateRequest
    """As that engine gets it."""


class Delivery:
    """Belongs to the event loop. Use it as a context: what nobody has taken is let go when it is left."""

    def __init__(
        self, encoders: Encoders, errand: Errand, part: Part, able: Callable[[Engine], bool] | None = None
    ) -> None:
        """``part`` reads the prompt; ``able`` says what else is asked of an engine."""
        self._encoders = encoders
        self._encoding = Encoding(encoders, errand)
        self._errand = errand
        self._part = part
        self._able = able or _anybody
        self._encoded: Encoded | None = None

    def __enter__(self) -> Delivery:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of what nobody has taken."""
        self._let_go()

    async def next(self) -> Leg:
        """Whom to try now.

        Raises:
            TriptychError: nobody is left, or the media cannot be encoded.
        """
        request = self._errand.request
        while True:
            if self._encoded is not None:
                if takers := self._left(self._takes_rows):
                    references = tuple(one.reference for one in self._encoded.outputs)
                    rest = replace(request, media=(), media_options=OptionLayer(), references=references)
                    return self._leg(takers[0], rest)
                self._let_go()
            readers = self._left(self._can_read)
            if not readers:
                raise self._nobody()
            if self._encodable(readers[0]):
                self._encoded = await self._encoding.run(readers[0])
                if self._encoded is not None and not self._left(self._takes_rows):
                    self._errand.strike(readers[0])  # it went meanwhile; so that this ends if it comes and goes
            elif takers := self._left(self._takes_media):
                return self._leg(takers[0], request)

    def _left(self, able: Callable[[Engine], bool]) -> list[Engine]:
        """The readers that can still be tried, the best first."""
        return self._encoders.pool.left(self._errand, self._part, able)

    def _leg(self, reader: Engine, request: GenerateRequest) -> Leg:
        return Leg(self._encoders.pool.chosen(reader), request)

    def failed(self, reader: Engine, error: TriptychError) -> None:
        """Take note of what has become of a leg.

        Raises:
            TriptychError: it, when no other engine would do better.
        """
        self._errand.failed(error)
        if self._encoded is None or not isinstance(error, _GONE):
            self._errand.give_up(reader)
            return
        about = item_message(str(error))
        outputs = self._encoded.outputs
        blamed = outputs[about.item : about.item + 1] if about and about.item < len(outputs) else outputs
        self._errand.strike(*dict.fromkeys((reader, *(one.engine for one in blamed))))
        self._let_go()

    def taken(self) -> tuple[Measured, ...]:
        """The reader has all that it needs: references are spent. Returns what encoding took."""
        encoded, self._encoded = self._encoded, None
        return encoded.measured if encoded is not None else ()

    def _let_go(self) -> None:
        if self._encoded is not None:
            self._encoders.let_go(self._encoded.outputs)
            self._encoded = None

    def _encodable(self, reader: Engine) -> bool:
        return bool(self._errand.request.media and self._encoders.left(self._errand, reader))

    def _takes_rows(self, reader: Engine) -> bool:
        return self._able(reader) and self._encoded is not None and self._encoded.fits(reader)

    def _takes_media(self, reader: Engine) -> bool:
        return self._able(reader) and _reads(reader, self._errand)

    def _can_read(self, reader: Engine) -> bool:
        return self._takes_media(reader) or (self._able(reader) and self._encodable(reader))

    def _nobody(self) -> TriptychError:
        """Why the request cannot go on."""
        errand = self._errand
        serving = self._encoders.pool.serving(errand.model)
        if not errand.request.media or not self._left(self._able):
            return errand.failure or Draining(reason(serving))
        if takers := [engine for engine in serving if engine.part is self._part and _reads(engine, errand)]:
            return errand.failure or Draining(not_ready(errand.model, takers))
        if isinstance(errand.failure, Draining):
            return Draining(f"no encoder engine for {errand.model.served_name!r} is left: {errand.failure}")
        return errand.failure or Draining(no_encoder(errand.model, serving))


def _reads(reader: Engine, errand: Errand) -> bool:
    """Whether an engine takes the media of a request as they are."""
    return reader.abilities is not None and errand.wanted <= reader.abilities.media


def _anybody(_: Engine) -> bool:
    return True
