"""From a client's request to one the engine can run: tokens, pictures, plan, positions.

``validate`` is everything that can be refused before acceptance, ``prepare`` everything that opens
media (``media_intake.py``). Neither blocks the event loop: prompts of any length worth a millisecond and all work on
media go to bounded pools. Where no media are to be opened, the prompt is planned and positioned before acceptance.

Of a request with encoder outputs (``consume``) everything but the rows is known before acceptance, and
nothing is opened: the prompt is planned from the layouts that came with them.
"""

from __future__ import annotations

import os
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from triptych.core.encoder_input import EncodedInput
from triptych.core.errors import (
    Internal,
    InvalidRequest,
    PromptTooLong,
    RoleMismatch,
    UnsupportedFeature,
)
from triptych.core.events import Span
from triptych.core.request import Request
from triptych.media.jobs import PictureJob
from triptych.media.limits import check_item_count
from triptych.roles.logprob_bounds import (
    check_candidate_ids,
    check_output_entries,
    check_prompt_entries,
    check_prompt_start,
)
from triptych.roles.media_intake import OPENINGS
from triptych.roles.prompt_thread import PromptThread, is_long
from triptych.roles.row_ticket import RowTicket
from triptych.roles.session_checks import check_digest, check_plan, check_prompt
from triptych.roles.tokenising import Tokenising, window

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from triptych.core.adapter import Adapter
    from triptych.core.encoder_input import ItemInput
    from triptych.core.guide import Grammar, Guide
    from triptych.core.layout import Positions
    from triptych.core.media import MediaItem
    from triptych.core.plan import PromptPlan
    from triptych.core.request import GenerateRequest
    from triptych.media.admission import Ticket
    from triptych.media.holding import Holding
    from triptych.media.jobs import Job
    from triptych.roles.adapters import Adapters
    from triptych.roles.frontend import Frontend, GrammarCompiler
    from triptych.roles.media_intake import MediaIntake
    from triptych.roles.row_intake import RowIntake

_NO_ROWS = np.empty((0, 0), np.uint8)


class Planned(NamedTuple):
    """An expanded prompt, by whoever expanded it."""

    plan: PromptPlan
    positions: Positions
    inputs: tuple[ItemInput, ...] = ()
    """Of its items, where they are opened; without rows where these are on their way."""


class Draft(NamedTuple):
    """A valid request whose media are not yet open."""

    request: GenerateRequest
    """Without the media that are to be opened."""
    unread: list[MediaItem]
    """These. Taken out when they are read: nobody keeps what was encoded longer than it takes."""
    token_ids: npt.NDArray[np.int32]
    adapter: Adapter | None
    grammar: Grammar | None
    arrival: float
    """Monotonic seconds."""
    planned: Planned | None
    """None where media are to be opened first."""


class Prepared(NamedTuple):
    """A request that the engine can run, and what happened before it could, in monotonic seconds."""

    request: Request
    stages: tuple[Span, ...]

    @property
    def end(self) -> float:
        """Of the last stage."""
        return self.stages[-1].end


class Intake:
    """Prepares requests for one engine. Belongs to one event loop.

    Args:
        frontend: what reads prompts and pictures.
        adapters: what requests may name.
        compiler: None where answers cannot be bound by a grammar.
        media: opens media; None where the model reads text only.
        rows: where the rows of encoder outputs come in; None where none do.
        requires_rows: there is no encoder here: media are taken by their encoder outputs only.
    """

    def __init__(
        self,
        frontend: Frontend,
        adapters: Adapters,
        compiler: GrammarCompiler | None = None,
        media: MediaIntake | None = None,
        rows: RowIntake | None = None,
        *,
        requires_rows: bool = False,
    ) -> None:
        self._front = frontend
        self.adapters = adapters
        self.compiler = compiler
        self.media = media
        self.rows = rows
        self._requires_rows = requires_rows
        self._thread = PromptThread()
        self._tokenising = Tokenising(frontend.model, frontend.tokenizer, frontend.vocab_size, self._thread)

    @property
    def frontend(self) -> Frontend:
        """What reads prompts and pictures."""
        return self._front

    async def draft(self, request: GenerateRequest, arrival: float) -> Draft:
        """Check a request of which the prompt is to be computed here: ``consume`` or ``validate``.

        Raises:
            TriptychError: the request is refused and nothing is held.
        """
        if request.references:
            return await self.consume(request, arrival)
        return await self.validate(request, arrival)

    async def validate(self, request: GenerateRequest, arrival: float) -> Draft:
        """Check everything that needs no media.

        Raises:
            TriptychError: the request is refused and nothing is held.
        """
        front = self._front
        if request.media and self._requires_rows:
            raise RoleMismatch(
                f"{len(request.media)} media item(s) without encoder_cache: this engine has no encoder; send the media "
                "to an encoder engine first, and its references here"
            )
        adapter = self._check_model(request)
        if request.media:
            self._media_intake().check(request)
        token_ids = await self._tokenising.ids(request.prompt)
        self._check_length(len(token_ids), request.stopping.min_tokens)
        front.processor.check_counts(token_ids, [item.modality for item in request.media])
        self._check_logprobs(request, len(token_ids), expanded=not request.media)
        planned = None
        if not request.media:
            planned = await self._thread.run(lambda: self._plan(request, token_ids, ()), long=is_long(len(token_ids)))
        bare, unread = replace(request, media=()), list(request.media)
        return Draft(bare, unread, token_ids, adapter, await self._compile(request.guide), arrival, planned)

    async def consume(self, request: GenerateRequest, arrival: float) -> Draft:
        """Check a request with encoder outputs, and plan its prompt; nothing is opened, and no rows are taken yet.

        Raises:
            TriptychError: the request is refused, nothing is held, and its references wait as before.
        """
        front = self._front
        if self.rows is None:
            raise UnsupportedFeature("encoder_cache: this engine takes no encoder outputs; send the media themselves")
        adapter = self._check_model(request)
        check_item_count(len(request.references), front.limits)
        layouts = [item.layout for item in self.rows.check(request.references, front.processor, time.time_ns())]
        token_ids = await self._tokenising.ids(request.prompt)
        front.processor.check_counts(token_ids, [layout.modality for layout in layouts])
        fewest = len(token_ids) + sum(front.processor.fewest_tokens(layout) - 1 for layout in layouts)
        exact = not any(layout.times for layout in layouts)
        self._check_length(fewest, request.stopping.min_tokens, exact=exact)  # before there is anything of this size
        self._check_logprobs(request, fewest, expanded=False)
        inputs = [EncodedInput(layout, _NO_ROWS) for layout in layouts]
        planned = await self._thread.run(lambda: self._plan(request, token_ids, inputs), long=is_long(fewest, layouts))
        return Draft(request, [], token_ids, adapter, await self._compile(request.guide), arrival, planned)

    async def attach(self, request: GenerateRequest, plan: PromptPlan, digest: bytes, arrival: float) -> Draft:
        """Check a request of which another engine has prepared the prompt; nothing of it is tokenised or opened.

        Args:
            request: the client's.
            plan: the other engine's.
            digest: what it said that the plan's is.
            arrival: monotonic seconds.

        Raises:
            TriptychError: the request is refused and nothing is held.
        """
        adapter = self._check_model(request)
        self._check_length(len(plan), request.stopping.min_tokens)
        positions = await self._thread.run(
            lambda: self._positions(request, plan, digest), long=is_long(len(plan), plan.items)
        )
        self._check_logprobs(request, len(plan), expanded=True)
        grammar = await self._compile(request.guide)
        bare = replace(request, media=(), references=())
        return Draft(bare, [], plan.token_ids, adapter, grammar, arrival, Planned(plan, positions))

    def _positions(self, request: GenerateRequest, plan: PromptPlan, digest: bytes) -> Positions:
        """Of another engine's plan, once it is looked through. On any thread."""
        front = self._front
        check_plan(plan, front.processor, front.vocab_size)
        check_prompt(request, plan, front.processor)
        check_digest(plan, digest)
        return front.processor.positions(plan)

    def _check_model(self, request: GenerateRequest) -> Adapter | None:
        """What only needs to know the model; returns the adapter."""
        front = self._front
        front.model.check_name(request.model)
        adapter = self.adapters.resolve(request.lora_name)
        if request.stopping.min_tokens >= front.model.max_context:
            raise InvalidRequest(f"min_tokens is {request.stopping.min_tokens}; {window(front.model)}")
        check_candidate_ids(request.logprobs, front.vocab_size)
        return adapter

    def line_up(self, draft: Draft) -> Ticket | RowTicket | None:
        """A place in line for the preparation of the media, or for their rows; None where there are none.

        Whoever takes it prepares the request, or gives it up and leaves. Ask last before a request is accepted: rows
        begin to be taken at once.

        Raises:
            Overloaded: the line is full.
        """
        references = draft.request.references
        if references and self.rows is not None:
            return self.rows.line_up(references)
        return self._media_intake().enter(draft.unread) if draft.unread else None

    def _media_intake(self) -> MediaIntake:
        if self.media is None:
            raise UnsupportedFeature(f"the model {self._front.model.served_name!r} reads text only")
        return self.media

    async def _compile(self, guide: Guide | None) -> Grammar | None:
        if guide is None:
            return None
        if self.compiler is None:
            raise UnsupportedFeature(
                f"guided.{guide.kind.value}: this engine cannot bind answers: "
                + (
                    "its grammar library is not installed (pip install 'triptych[guided]')"
                    if self._front.eos_token_ids
                    else "its model names no token that ends an answer"
                )
            )
        return await self.compiler.compile(guide)

    def _check_logprobs(self, request: GenerateRequest, prompt_tokens: int, *, expanded: bool) -> None:
        front = self._front
        check_prompt_entries(request.logprobs, prompt_tokens, front.vocab_size)
        check_output_entries(request, front.model.max_context - prompt_tokens, front.vocab_size)
        if expanded:
            check_prompt_start(request.logprobs, prompt_tokens)

    def _check_length(self, tokens: int, min_tokens: int, *, exact: bool = True) -> None:
        """An answer needs room for one token, and for as many as it must have."""
        if tokens + max(min_tokens, 1) > self._front.model.max_context:
            answer = f" and min_tokens asks for {min_tokens} more" if min_tokens else ""
            raise PromptTooLong(
                f"the prompt has {'' if exact else 'at least '}{tokens} tokens{answer}; {window(self._front.model)}"
            )

    async def prepare(self, draft: Draft, ticket: Ticket | RowTicket | None) -> Prepared:
        """Open the media, or wait for their rows; expand the prompt and position it.

        Run it in a task of its own and let that task end: who wants it no more gives its ticket up.

        Raises:
            Cancelled: nobody wants it any more.
            TriptychError: this request fails; the message names the item.
        """
        if isinstance(ticket, RowTicket):
            return await self._take_rows(draft, ticket)
        planned = draft.planned
        if planned is None:
            if ticket is None:
                raise Internal("a request with media was accepted without a place in line for them")
            planned = await ticket.run(self._open(draft, ticket))
        return Prepared(self._request(draft, planned), (Span("prepare", draft.arrival, time.monotonic()),))

    async def _take_rows(self, draft: Draft, ticket: RowTicket) -> Prepared:
        """Wait for the rows; the request holds them from then on."""
        rows = await ticket.take()
        planned = draft.planned
        if planned is None:
            raise Internal("a request with encoder outputs was accepted without a plan")
        inputs = tuple(EncodedInput(layout, own) for layout, own in zip(planned.plan.items, rows, strict=True))
        stages = Span("prepare", draft.arrival, ticket.begun), Span("rows", ticket.begun, time.monotonic())
        return Prepared(self._request(draft, planned._replace(inputs=inputs)), stages)

    async def _open(self, draft: Draft, ticket: Ticket) -> Planned:
        media = self._media_intake()
        with media.holding() as holding:
            jobs = await self._look(draft, ticket, holding)
            fewest = len(draft.token_ids) + media.fewest_tokens(jobs) - len(jobs)
            exact = all(isinstance(job, PictureJob) for job in jobs)
            self._check_length(fewest, draft.request.stopping.min_tokens, exact=exact)  # before anything is decoded
            inputs = await media.open(ticket, jobs)
            del jobs  # what was encoded is not counted from here on
        return await media.on_thread(lambda: self._plan(draft.request, draft.token_ids, inputs))

    async def _look(self, draft: Draft, ticket: Ticket, holding: Holding) -> tuple[Job, ...]:
        """Read the media and look at them; from here on only who opens them has them."""
        media = self._media_intake()
        request = replace(draft.request, media=tuple(draft.unread))
        draft.unread.clear()
        return await media.look(await media.read(request, ticket, holding))

    def _plan(self, request: GenerateRequest, token_ids: npt.NDArray[np.int32], inputs: Sequence[ItemInput]) -> Planned:
        """Expand the prompt and position it. On any thread."""
        processor = self._front.processor
        plan, placed = processor.plan(token_ids, inputs)
        self._check_length(len(plan), request.stopping.min_tokens)
        self._check_logprobs(request, len(plan), expanded=True)
        return Planned(plan, processor.positions(plan), placed)

    def _request(self, draft: Draft, planned: Planned) -> Request:
        asked = draft.request
        room = self._front.model.max_context - len(planned.plan)
        stopping = asked.stopping
        sampling = asked.sampling
        return Request(
            request_id=asked.request_id,
            plan=planned.plan,
            positions=planned.positions,
            inputs=planned.inputs,
            sampling=sampling
            if sampling.seed is not None
            else replace(sampling, seed=int.from_bytes(os.urandom(8), "little")),
            stopping=replace(stopping, max_tokens=min(stopping.max_tokens or room, room)),
            eos_token_ids=self._front.eos_token_ids,
            cache=asked.cache,
            arrival=draft.arrival,
            logprobs=asked.logprobs,
            grammar=draft.grammar,
            adapter=draft.adapter,
            priority=asked.priority,
        )

    def statistics(self) -> dict[str, dict[str, float]]:
        """Every ledger's counts as of now."""
        opened = {} if self.media is None else self.media.statistics()
        counts = dict.fromkeys(OPENINGS, 0.0) if self.media is None else self.media.counts
        return {"intake": {**counts, "tokenisations": self._tokenising.texts}, **opened}

    async def close(self) -> None:
        """Wait for what works and for what waits for it: the queues are bounded. All is closed, whatever goes wrong.

        Raises:
            Exception: the first thing that went wrong.
        """
        async with AsyncExitStack() as ends:
            ends.push_async_callback(self.adapters.close)
            for part in (self.compiler, self.rows, self._thread, self.media):
                if part is not None:
                    ends.push_async_callback(part.close)
