"""From a client's request to one the engine can run: tokens, pictures, plan, positions.

``validate`` is everything that can be refused before acceptance, ``prepare`` everything that opens
media. Neither blocks the event loop: text of any length worth a millisecond and all picture work go
to a bounded pool, and a permit is held until that work has ended, whoever still waits for it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from triptych.core.errors import (
    Cancelled,
    Internal,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    UnsupportedFeature,
)
from triptych.core.media import DataUri, Url
from triptych.core.request import Request
from triptych.media.admission import Admission
from triptych.media.data_uri import decode_data_uri
from triptych.media.decode import decode_picture
from triptych.media.limits import RequestBudget, check_item_count
from triptych.processors.identity import content_key
from triptych.roles.logprob_bounds import (
    check_candidate_ids,
    check_output_entries,
    check_prompt_entries,
    check_prompt_start,
)
from triptych.roles.session_checks import check_plan, check_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from triptych.core.adapter import Adapter
    from triptych.core.config import MediaLimits
    from triptych.core.encoder_input import EncoderInput
    from triptych.core.guide import Grammar, Guide
    from triptych.core.media import MediaItem
    from triptych.core.plan import PromptPlan
    from triptych.core.request import GenerateRequest
    from triptych.media.admission import Ticket
    from triptych.processors.contract import Processor
    from triptych.roles.adapters import Adapters
    from triptych.roles.contract import ModelDescription
    from triptych.text.tokenizer import Tokenizer

LONG_TEXT = 2048
"""Characters of prompt text from which tokenising leaves the event loop."""
MAX_TOKENISING = 64
"""Long texts that are being tokenised or wait for it; one more is refused as overloaded."""


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
    """What another engine has prepared."""


class _Tally:
    """How often the costly things were done, on whatever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("image_loads", "preprocess_calls", "tokenisations"), 0)

    def count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def statistics(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)


class Prepared(NamedTuple):
    """A plan with its encoder inputs."""

    plan: PromptPlan
    inputs: tuple[EncoderInput, ...]


class Intake:
    """Prepares requests for one engine. Belongs to one event loop.

    Args:
        frontend: what reads prompts and pictures.
        adapters: what requests may name.
        compiler: None where answers cannot be bound by a grammar.
    """

    def __init__(self, frontend: Frontend, adapters: Adapters, compiler: GrammarCompiler | None = None) -> None:
        self._front = frontend
        self.adapters = adapters
        self.compiler = compiler
        limit = frontend.limits.media_preparation_limit
        self.admission = Admission(limit, max_waiting=frontend.limits.max_waiting_preparations)
        self._media_pool = ThreadPoolExecutor(max_workers=limit, thread_name_prefix="media")
        self._tokenising = 0
        self._text_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")
        self._tally = _Tally()

    @property
    def frontend(self) -> Frontend:
        """What reads prompts and pictures."""
        return self._front

    async def validate(self, request: GenerateRequest, arrival: float) -> Draft:
        """Check everything that needs no media.

        Raises:
            TriptychError: the request is refused and nothing is held.
        """
        front = self._front
        adapter = self._check_model(request)
        for index, item in enumerate(request.media):
            if isinstance(item.source, Url):
                raise UnsupportedFeature(f"media item {index}: URLs are not fetched; send a data: URI or raw bytes")
        check_item_count(len(request.media), front.limits)
        token_ids = await self._tokenise(request.prompt)
        self._check_length(len(token_ids), request.stopping.min_tokens)
        front.processor.check_counts(token_ids, [item.modality for item in request.media])
        self._check_logprobs(request, len(token_ids), expanded=not request.media)
        return Draft(request, token_ids, adapter, await self._compile(request.guide), arrival)

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
        return Draft(replace(request, media=()), plan.token_ids, adapter, grammar, arrival, plan)

    def _check_model(self, request: GenerateRequest) -> Adapter | None:
        """What only needs to know the model; returns the adapter."""
        front = self._front
        front.model.check_name(request.model)
        adapter = self.adapters.resolve(request.lora_name)
        if request.stopping.min_tokens >= front.model.max_context:
            raise InvalidRequest(f"min_tokens is {request.stopping.min_tokens}; {self._window()}")
        check_candidate_ids(request.logprobs, front.vocab_size)
        return adapter

    def line_up(self, request: GenerateRequest) -> Ticket | None:
        """A place in line for the preparation of the media; None where there are none.

        Whoever takes it prepares the request, or gives it up and leaves.

        Raises:
            Overloaded: the line is full.
        """
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

    def _window(self) -> str:
        model = self._front.model
        return f"the context window is {model.max_context} tokens, answer included (set by {model.context_limit})"

    def _check_length(self, tokens: int, min_tokens: int) -> None:
        """An answer needs room for one token, and for as many as it must have."""
        if tokens + max(min_tokens, 1) > self._front.model.max_context:
            answer = f" and min_tokens asks for {min_tokens} more" if min_tokens else ""
            raise PromptTooLong(f"the prompt has {tokens} tokens{answer}; {self._window()}")

    async def _tokenise(self, prompt: str | tuple[int, ...]) -> npt.NDArray[np.int32]:
        if not isinstance(prompt, str):
            token_ids = np.asarray(prompt, dtype=np.int64)
            outside = token_ids[(token_ids < 0) | (token_ids >= self._front.vocab_size)]
            if outside.size:
                raise InvalidRequest(f"token id {outside[0]} is outside the vocabulary of {self._front.vocab_size}")
            return token_ids.astype(np.int32)
        fewest = self._front.tokenizer.fewest_tokens(prompt)
        if fewest >= self._front.model.max_context:
            raise PromptTooLong(f"the prompt has at least {fewest} tokens; {self._window()}")
        self._tally.count("tokenisations")
        if len(prompt) < LONG_TEXT:
            ids = self._front.tokenizer.encode(prompt)
        elif self._tokenising >= MAX_TOKENISING:
            raise Overloaded(f"{self._tokenising} long texts already wait to be tokenised; retry later")
        else:
            loop = asyncio.get_running_loop()
            self._tokenising += 1
            try:
                ids = await loop.run_in_executor(self._text_pool, self._front.tokenizer.encode, prompt)
            finally:
                self._tokenising -= 1
        if not ids:
            raise InvalidRequest("the prompt has no tokens")
        return np.asarray(ids, dtype=np.int32)

    async def prepare(self, draft: Draft, ticket: Ticket | None, wanted: Callable[[], bool]) -> Request:
        """Open the media, expand the prompt and position it.

        Run it in a task of its own and let that task end: cancelling it would give the permit back while a
        worker still runs. ``wanted`` is asked, also from the worker, before each item is opened.

        Raises:
            Cancelled: nobody wants it any more.
            TriptychError: this request fails; the message names the item.
        """
        if ticket is None:
            return self._request(draft, self._plan(draft, []))
        try:
            if not await ticket.wait():
                raise Cancelled("ended while waiting for media preparation")
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._media_pool, self._prepare_media, draft, wanted)
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
        front = self._front
        source = item.source
        if isinstance(source, Url):
            raise Internal(f"media item {index}: a URL passed validation")
        data = decode_data_uri(index, source.uri, front.limits) if isinstance(source, DataUri) else source.data
        key = content_key(data, fingerprint=front.processor.fingerprint, salt=draft.request.cache.salt, uuid=item.uuid)
        self._tally.count("image_loads")
        picture = decode_picture(index, data, budget)
        self._tally.count("preprocess_calls")
        return front.processor.encoder_input(index, picture, key)

    def _plan(self, draft: Draft, inputs: list[EncoderInput]) -> Prepared:
        if draft.plan is not None:
            return Prepared(draft.plan, ())
        plan, placed = self._front.processor.plan(draft.token_ids, inputs)
        self._check_length(len(plan), draft.request.stopping.min_tokens)
        self._check_logprobs(draft.request, len(plan), expanded=True)
        return Prepared(plan, placed)

    def _request(self, draft: Draft, prepared: Prepared) -> Request:
        asked = draft.request
        room = self._front.model.max_context - len(prepared.plan)
        stopping = asked.stopping
        sampling = asked.sampling
        return Request(
            request_id=asked.request_id,
            plan=prepared.plan,
            positions=self._front.processor.positions(prepared.plan),
            inputs=prepared.inputs,
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
        return self._tally.statistics()

    async def close(self) -> None:
        """Wait for the workers and for what waits for them: the queues are bounded."""
        await asyncio.to_thread(self._media_pool.shutdown, wait=True)
        await asyncio.to_thread(self._text_pool.shutdown, wait=True)
        await self.adapters.close()
        if self.compiler is not None:
            await self.compiler.close()
