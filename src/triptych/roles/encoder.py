"""The encoder role: one process turns media into rows, and others compute prompts with them.

    accept     validate, take the id and a place in line for media, hand back an Answer
    open       read all items; one that was encoded before is not opened, any other is decoded and patched
    submit     into the engine's queue, one request an item, each under the name of a new output
               (the engine encodes what it has no rows of, and publishes the rows)
    push       where each item's rows lie; or that rows are gone which were to be there: open all, submit once more
    lease      from then on their time runs, whoever has read of them      -> EncoderReady
               (until they are over they count against the memory for rows, wherever the transport has them)

There is no language model here, and rows are the same whatever is asked about a picture. So a request may be the very
one that the other engines get: how it shall be answered, in how many outputs, with which adapter, is not looked at. Of
its prompt only the markers are. ``priority`` and ``cache.salt`` mean here what they mean there.

All items are handed over together or none is.
"""

from __future__ import annotations

import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.encoded import EncodedItem, EncoderReference
from triptych.core.encoder_input import EncoderInput
from triptych.core.errors import Internal, InvalidRequest, RoleMismatch
from triptych.core.events import Encoded, EncoderReady, Span
from triptych.core.logprobs import LogprobOptions
from triptych.core.request import EncodeRequest, Sampling, Stopping
from triptych.roles.handover_answer import HandoverAnswer
from triptych.roles.timeline import in_unix_seconds

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    from triptych.core.errors import TriptychError
    from triptych.core.events import Failed
    from triptych.core.layout import ItemLayout
    from triptych.core.request import GenerateRequest
    from triptych.engine.loop import EncodeEngine
    from triptych.media.admission import Ticket
    from triptych.media.jobs import Job
    from triptych.roles.handover_answer import Part
    from triptych.roles.intake import Intake
    from triptych.roles.known_items import KnownItems
    from triptych.roles.leases import Leases
    from triptych.roles.live import LiveRequests
    from triptych.roles.media_intake import MediaIntake


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What an engine's rows are like, and how they are handed over."""

    backend: str
    """The transport's name."""
    row_bytes: int
    """Of one row, all deepstack levels included."""
    dtype: str
    """Of the numbers in a row, as torch spells it, without its prefix."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes media for other engines. Implements ``roles.desk.Service``."""

    intake: Intake
    media: MediaIntake
    """Opens media; it is the intake's."""
    engine: EncodeEngine
    """Encodes them; it has a publisher."""
    live: LiveRequests
    """Its requests."""
    leases: Leases
    """The outputs that are handed over."""
    known: KnownItems
    """What was encoded before."""
    rows: RowFormat

    async def accept(self, request: GenerateRequest) -> HandoverAnswer:
        """Validate and admit; see ``Role.accept``."""
        self._check(request)
        begun = time.monotonic()
        asked = _unanswered(request)
        with self.live.arriving(asked, items=len(request.media)) as arrival:
            await self.intake.validate(asked, begun)
            arrival.go_on()
            ticket = self.media.enter(request.media)
            way = _Way(self, request, begun)
            self.live.begin(way.answer, ticket, way.submit(ticket, way.open(request, ticket)))
        return way.answer

    def _check(self, request: GenerateRequest) -> None:
        if request.encode is None:
            raise RoleMismatch(
                "this engine encodes media for others and answers nothing itself: it has no language model; send the "
                "request to an engine that computes prompts, and here only what asks for its media to be encoded "
                "(encoder)"
            )
        if request.encode.backend not in ("", self.rows.backend):
            raise InvalidRequest(
                f"encoder.transfer_backend is {request.encode.backend[:80]!r}; this engine hands its outputs over by "
                f"{self.rows.backend!r}"
            )
        if not request.media:
            raise InvalidRequest(
                "encoder asks for media to be encoded and the request has none; a prompt without media needs no encoder"
            )


class _Known(NamedTuple):
    """An item that was encoded before: its rows are perhaps still cached."""

    job: Job
    """To be opened if they are not."""
    layout: ItemLayout


_Found = _Known | EncoderInput
"""An item as the engine gets it."""


class _Way:
    """One request's way to other engines. Implements ``roles.handover_answer.Handover``."""

    def __init__(self, role: Encoder, request: GenerateRequest, begun: float) -> None:
        self._role = role
        self._priority = request.priority
        self._begun = begun
        """When the request came, in monotonic seconds."""
        self._layouts: tuple[ItemLayout, ...] = ()
        """Of the items that the engine has."""
        self._names: tuple[str, ...] = ()
        """Of their outputs, each of which no other of any engine has."""
        self._unsure: tuple[_Found, ...] = ()
        """The items, as long as the engine may need more of them: there is a known one among them."""
        self._kept = ExitStack()
        """The encoded bytes of these are counted until it is closed."""
        self._prepared: Span | None = None
        """The time before the engine had the items, in monotonic seconds."""
        self.answer = HandoverAnswer(
            request.request_id,
            role.live.serials(len(request.media)),
            self,
            outputs=1,
            token_text=None,
            abort=role.engine.abort,
            on_close=role.live.close,
        )

    async def submit(self, ticket: Ticket, opening: Coroutine[object, object, tuple[_Found, ...]]) -> None:
        """Have the items encoded that ``opening`` gives, which runs at the ticket's turn."""
        role, answer = self._role, self.answer
        found = await ticket.run(opening)
        if not answer.wanted():
            return
        self._prepared = Span("prepare", self._begun, time.monotonic())
        names = tuple(uuid.uuid4().hex for _ in found)
        role.engine.submit(
            [
                EncodeRequest(
                    request_id=serial,
                    layout=one.layout,
                    input=one if isinstance(one, EncoderInput) else None,
                    export=name,
                    arrival=self._prepared.end,
                    priority=self._priority,
                )
                for serial, one, name in zip(answer.serials, found, names, strict=True)
            ]
        )
        self._layouts, self._names = tuple(one.layout for one in found), names
        self._keep(found)
        for layout, name in zip(self._layouts, names, strict=True):
            role.leases.keep(name)
            role.known.remember(layout)

    def _keep(self, found: tuple[_Found, ...]) -> None:
        """The encoded bytes of what is not open, until it is known whether the engine needs more."""
        known = [one.job.item for one in found if isinstance(one, _Known)]
        if known:
            self._unsure = found
            holding = self._kept.enter_context(self._role.media.holding())
            for item in known:
                holding.keep(item.index, len(item.data))

    async def open(self, request: GenerateRequest, ticket: Ticket) -> tuple[_Found, ...]:
        """All items, looked at, and opened where they are not known."""
        media, known = self._role.media, self._role.known
        with media.holding() as holding:
            jobs = await media.look(await media.read(request, ticket, holding))
            layouts = {job.item.key: known.find(job.item.key) for job in jobs}
            opened = await _by_key(media, ticket, [job for job in jobs if layouts[job.item.key] is None])
        found: list[_Found] = []
        for job in jobs:
            layout = layouts[job.item.key]
            found.append(opened[job.item.key] if layout is None else _Known(job, layout))
        return tuple(found)

    async def reopen(self, found: tuple[_Found, ...], ticket: Ticket) -> tuple[_Found, ...]:
        """The same items, all open."""
        closed = [one.job for one in found if isinstance(one, _Known)]
        with self._kept.pop_all():  # the work's until it has ended, whoever leaves
            opened = await _by_key(self._role.media, ticket, closed)
        return tuple(opened[one.job.item.key] if isinstance(one, _Known) else one for one in found)

    def hand_over(self, parts: tuple[Part, ...]) -> EncoderReady | None:
        """The references, one for each item in order; their leases begin. None while an item must be opened."""
        role, request_id = self._role, self.answer.request_id
        encoded = tuple(part for part in parts if isinstance(part, Encoded))
        if len(encoded) < len(parts):
            self._submit_open()
            return None
        fingerprint = role.intake.frontend.processor.fingerprint
        references = tuple(
            EncoderReference(
                EncodedItem(layout, part.handle, role.rows.row_bytes, role.rows.dtype),
                fingerprint,
                role.leases.grant(name, request_id),
            )
            for layout, part, name in zip(self._layouts, encoded, self._names, strict=True)
        )
        self._forget_items()
        spans = _together(span for part in encoded for span in part.spans)
        return EncoderReady(
            request_id, references, in_unix_seconds(spans if self._prepared is None else (self._prepared, *spans))
        )

    def _submit_open(self) -> None:
        """Once more, and this time the engine needs nothing that it may not have any more."""
        role, found = self._role, self._unsure
        if not found:
            raise Internal("the engine was given all media items to encode, and asks for them again")
        self._withdraw_outputs()
        self._unsure = ()
        ticket = role.media.re_enter(holds_prepared=any(isinstance(one, EncoderInput) for one in found))
        role.live.prepare(self.answer, ticket, self.submit(ticket, self.reopen(found, ticket)))

    def withdraw(self) -> None:
        """Nobody shall take any of the outputs, whether there are any by now or not."""
        self._withdraw_outputs()
        self._forget_items()

    def _withdraw_outputs(self) -> None:
        for name in self._names:
            self._role.leases.withdraw(name)
        self._names = ()

    def _forget_items(self) -> None:
        self._unsure = ()
        self._kept.close()

    def reason(self, failed: Failed) -> TriptychError:
        """Why an item has failed; which of the request's it is, is not known in the engine."""
        error = failed.error
        if error is self._role.engine.failure:
            return error  # of the engine as a whole
        return type(error)(f"media item {self.answer.serials.index(failed.request_id)}: {error}")


async def _by_key(media: MediaIntake, ticket: Ticket, jobs: Sequence[Job]) -> dict[bytes, EncoderInput]:
    return {one.layout.content_key: one for one in await media.open(ticket, jobs)}


def _unanswered(request: GenerateRequest) -> GenerateRequest:
    """The request without what is said about answers: other engines see to that."""
    return replace(
        request,
        sampling=Sampling(),
        stopping=Stopping(),
        detokenize=False,
        num_sequences=1,
        logprobs=LogprobOptions(),
        guide=None,
        lora_name="",
    )


def _together(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The stages of several items as those of one: each from its first beginning to its last end."""
    whole: dict[str, Span] = {}
    for span in spans:
        first = whole.setdefault(span.name, span)
        whole[span.name] = Span(span.name, min(first.start, span.start), max(first.end, span.end))
    return tuple(whole.values())
