"""From a client's request to one the engine can run: tokens, pictures, plan, positions.

``validate`` is everything that can be refused before acceptance, ``prepare`` everything that opens
media. Neither blocks the event loop: text of any length worth a millisecond and all picture work go
to a bounded pool, and a permit is held until that work has ended, whoever still waits for it.

Of a request with encoder outputs (``consume``) everything but the rows is known before acceptance, and
nothing is opened: the prompt is planned from the layouts that came with them.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np

from triptych.core.encoder_input import EncodedInput
from triptych.core.errors import (
    Cancelled,
    Internal,
    InvalidRequest,
    PromptTooLong,
    RoleMismatch,
    UnsupportedFeature,
)
from triptych.core.events import Span
from triptych.core.media import DataUri, Url
from triptych.core.request import Request
from triptych.media.admission import Admission
from triptych.media.data_uri import decode_data_uri
from triptych.media.decode import decode_picture
from triptych.media.limits import RequestBudget, check_item_bytes, check_item_count
from triptych.processors.identity import content_key
from triptych.roles.logprob_bounds import (
    check_candidate_ids,
    check_output_entries,
    check_prompt_entries,
    check_prompt_start,
)
from triptych.roles.row_ticket import RowTicket
from triptych.roles.session_checks import check_plan, check_prompt
from triptych.roles.tokenising import Tokenising, window

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from triptych.core.adapter import Adapter
    from triptych.core.config import MediaLimits
    from triptych.core.encoder_input import EncoderInput, ItemInput
    from triptych.core.guide import Grammar, Guide
    from triptych.core.media import MediaItem
    from triptych.core.plan import PromptPlan
    from triptych.core.request import GenerateRequest
    from triptych.media.admission import Ticket
    from triptych.processors.contract import Processor
    from triptych.roles.adapters import Adapters
    from triptych.roles.contract import ModelDescription
    from triptych.roles.row_intake import RowIntake
    from triptych.text.tokenizer import Tokenizer

T = TypeVar("T")

_NO_ROWS = np.empty((0, 0), np.uint8)


@dataclass(frozen=True, slots=True)
class Frontend:
    """The parts of a model that read prompts and pictures; no tensors."""

    model: ModelDescription
    tokenizer: Tokenizer
    processor: Processor
    eos_token_ids: frozenset[int]
    vocab_size: int
    limits: MediaLimits


class GrammarCompiler(Protocol):
    """Turns guides into grammars, off the event loop and off the engine thread."""

    async def compile(self, guide: Guide) -> Grammar:
        """A grammar for the served model's tokens.

        Raises:
            InvalidRequest: the guide cannot be compiled; says why.
            Overloaded: too many guides wait.
        """
        ...

    def statistics(self) -> dict[str, float]:
        """Counts as of now."""
        ...

    async def close(self) -> None:
        """End what compiles and what follows grammars."""
        ...


class Draft(NamedTuple):
    """A valid request whose media are not yet open."""

    request: GenerateRequest
    token_ids: npt.NDArray[np.int32]
    adapter: Adapter | None
    grammar: Grammar | None
    arrival: float
    """Monotonic seconds."""
    plan: PromptPlan | None = None
    """What is expanded already, by another engine or with the layouts of its encoder outputs."""


class _Tally:
    """How often the costly things were done, on whatever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("image_loads", "preprocess_calls"), 0)

    def count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def statistics(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)


class ItemBytes(NamedTuple):
    """One media item, read and not yet decoded."""

    data: bytes
    """The encoded file."""
    key: bytes
    """Its content key."""


class _Planned(NamedTuple):
    """A plan with its encoder inputs."""

    plan: PromptPlan
    inputs: tuple[ItemInput, ...]


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
        rows: where the rows of encoder outputs come in; None where none do.
        requires_rows: there is no encoder here: media are taken by their encoder outputs only.
    """

    def __init__(
        self,
        frontend: Frontend,
        adapters: Adapters,
        compiler: GrammarCompiler | None = None,
        rows: RowIntake | None = None,
        *,
        requires_rows: bool = False,
    ) -> None:
        self._front = frontend
        self.adapters = adapters
        self.compiler = compiler
        self.rows = rows
        self._requires_rows = requires_rows
        limit = frontend.limits.media_preparation_limit
        self.admission = Admission(limit, max_waiting=frontend.limits.max_waiting_preparations)
        self._media_pool = ThreadPoolExecutor(max_workers=limit, thread_name_prefix="media")
        self._tokenising = Tokenising(frontend.model, frontend.tokenizer, frontend.vocab_size)
        self._tally = _Tally()

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
        for index, item in enumerate(request.media):
            if isinstance(item.source, Url):
                raise UnsupportedFeature(f"media item {index}: URLs are not fetched; send a data: URI or raw bytes")
        check_item_count(len(request.media), front.limits)
        token_ids = await self._tokenising.ids(request.prompt)
        self._check_length(len(token_ids), request.stopping.min_tokens)
        front.processor.check_counts(token_ids, [item.modality for item in request.media])
        self._check_logprobs(request, len(token_ids), expanded=not request.media)
        return Draft(request, token_ids, adapter, await self._compile(request.guide), arrival)

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
        expanded = len(token_ids) + sum(layout.span - 1 for layout in layouts)
        self._check_length(expanded, request.stopping.min_tokens)  # before there is anything of this size
        self._check_logprobs(request, expanded, expanded=True)
        plan, _ = front.processor.plan(token_ids, [EncodedInput(layout, _NO_ROWS) for layout in layouts])
        return Draft(request, token_ids, adapter, await self._compile(request.guide), arrival, plan)

    async def attach(self, request: GenerateRequest, plan: PromptPlan, arrival: float) -> Draft:
        """Check a request of which another engine has prepared the prompt; nothing of it is tokenised or opened.

        Raises:
            TriptychError: the request is refused and nothing is held.
        """
        front = self._front
        adapter = self._check_model(request)
        self._check_length(len(plan), request.stopping.min_tokens)
        check_plan(plan, front.processor, front.vocab_size)
        check_prompt(request, plan)
        self._check_logprobs(request, len(plan), expanded=True)
        grammar = await self._compile(request.guide)
        bare = replace(request, media=(), references=())
        return Draft(bare, plan.token_ids, adapter, grammar, arrival, plan)

    def _check_model(self, request: GenerateRequest) -> Adapter | None:
        """What only needs to know the model; returns the adapter."""
        front = self._front
        front.model.check_name(request.model)
        adapter = self.adapters.resolve(request.lora_name)
        if request.stopping.min_tokens >= front.model.max_context:
            raise InvalidRequest(f"min_tokens is {request.stopping.min_tokens}; {window(front.model)}")
        check_candidate_ids(request.logprobs, front.vocab_size)
        return adapter

    def line_up(self, request: GenerateRequest) -> Ticket | RowTicket | None:
        """A place in line for the preparation of the media, or for their rows; None where there are none.

        Whoever takes it prepares the request, or gives it up and leaves. Ask last before a request is accepted: rows
        begin to be taken at once.

        Raises:
            Overloaded: the line is full.
        """
        if request.references and self.rows is not None:
            return self.rows.line_up(request.references)
        return self.admission.enter() if request.media else None

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

    def _check_length(self, tokens: int, min_tokens: int) -> None:
        """An answer needs room for one token, and for as many as it must have."""
        if tokens + max(min_tokens, 1) > self._front.model.max_context:
            answer = f" and min_tokens asks for {min_tokens} more" if min_tokens else ""
            raise PromptTooLong(f"the prompt has {tokens} tokens{answer}; {window(self._front.model)}")

    async def prepare(self, draft: Draft, ticket: Ticket | RowTicket | None, wanted: Callable[[], bool]) -> Prepared:
        """Open the media, or wait for their rows; expand the prompt and position it.

        Run it in a task of its own and let that task end: cancelling it would give the permit back while a
        worker still runs. ``wanted`` is asked, also from the worker, before each item is opened.

        Raises:
            Cancelled: nobody wants it any more.
            TriptychError: this request fails; the message names the item.
        """
        if isinstance(ticket, RowTicket):
            return await self._take_rows(draft, ticket)
        if ticket is None:
            request = self._request(draft, self._plan(draft, []))
        else:
            request = await self.on_worker(ticket, partial(self._prepare_media, draft, wanted))
        return Prepared(request, (Span("prepare", draft.arrival, time.monotonic()),))

    async def _take_rows(self, draft: Draft, ticket: RowTicket) -> Prepared:
        """Position the prompt while the rows are on their way; the request holds them from then on."""
        request = self._request(draft, self._plan(draft, []))
        rows = await ticket.take()
        inputs = tuple(EncodedInput(layout, own) for layout, own in zip(request.plan.items, rows, strict=True))
        stages = Span("prepare", draft.arrival, ticket.begun), Span("rows", ticket.begun, time.monotonic())
        return Prepared(replace(request, inputs=inputs), stages)

    async def on_worker(self, ticket: Ticket, work: Callable[[], T]) -> T:
        """Do ``work`` on a media worker once the ticket's turn has come; the permit is given back when it has ended.

        Run it in a task of its own and let that task end, as ``prepare``.

        Raises:
            Cancelled: the place in line was given up.
        """
        try:
            if not await ticket.wait():
                raise Cancelled("ended while waiting for media preparation")
            return await asyncio.get_running_loop().run_in_executor(self._media_pool, work)
        finally:
            ticket.leave()

    def _prepare_media(self, draft: Draft, wanted: Callable[[], bool]) -> Request:
        budget = RequestBudget(self._front.limits)
        inputs = []
        for index, item in enumerate(draft.request.media):
            if not wanted():
                raise Cancelled("ended during media preparation")
            inputs.append(self._open(index, item, draft, budget))
        return self._request(draft, self._plan(draft, inputs))

    def _open(self, index: int, item: MediaItem, draft: Draft, budget: RequestBudget) -> EncoderInput:
        """Decode one item and patch it; runs on a media worker."""
        data, key = self.read(index, item, draft.request.cache.salt)
        return self.decode(index, data, key, budget)

    def read(self, index: int, item: MediaItem, salt: str) -> ItemBytes:
        """An item's bytes, and who it is; costs CPU, so call it on a media worker.

        Raises:
            MediaError: the data URI cannot be read, or the item has too many bytes; ``index`` names it.
        """
        front, source = self._front, item.source
        if isinstance(source, Url):
            raise Internal(f"media item {index}: a URL passed validation")
        data = decode_data_uri(index, source.uri, front.limits) if isinstance(source, DataUri) else source.data
        check_item_bytes(index, len(data), front.limits)
        return ItemBytes(data, content_key(data, fingerprint=front.processor.fingerprint, salt=salt, uuid=item.uuid))

    def decode(self, index: int, data: bytes, key: bytes, budget: RequestBudget) -> EncoderInput:
        """Decode what was read, and patch it; costs CPU and memory, so call it on a media worker.

        Raises:
            MediaError: it cannot be used, or is over a limit; ``index`` names it.
        """
        self._tally.count("image_loads")
        picture = decode_picture(index, data, budget)
        self._tally.count("preprocess_calls")
        return self._front.processor.encoder_input(index, picture, key)

    def _plan(self, draft: Draft, inputs: list[EncoderInput]) -> _Planned:
        if draft.plan is not None:
            return _Planned(draft.plan, ())
        plan, placed = self._front.processor.plan(draft.token_ids, inputs)
        self._check_length(len(plan), draft.request.stopping.min_tokens)
        self._check_logprobs(draft.request, len(plan), expanded=True)
        return _Planned(plan, placed)

    def _request(self, draft: Draft, planned: _Planned) -> Request:
        asked = draft.request
        room = self._front.model.max_context - len(planned.plan)
        stopping = asked.stopping
        sampling = asked.sampling
        return Request(
            request_id=asked.request_id,
            plan=planned.plan,
            positions=self._front.processor.positions(planned.plan),
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

    def statistics(self) -> dict[str, float]:
        """Counts as of now."""
        return {**self._tally.statistics(), "tokenisations": self._tokenising.texts}

    async def close(self) -> None:
        """Wait for the workers and for what waits for them: the queues are bounded."""
        await asyncio.to_thread(self._media_pool.shutdown, wait=True)
        await self._tokenising.close()
        if self.rows is not None:
            await self.rows.close()
        await self.adapters.close()
        if self.compiler is not None:
            await self.compiler.close()
