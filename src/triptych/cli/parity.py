"""One request answered by one engine, and by several, and what differs between the answers.

    whole    aggregated                                                                  -> Said
    p+d      prefill -> session -> decode                                                -> Said
    e+pd     encoder -> references -> an engine that prefills and decodes                -> Said
    e+p+d    encoder -> references -> prefill -> session -> decode                       -> Said

Sessions and references go through the wire's bytes. Nothing of one case is cached for another: each has a salt of its
own.
"""

from __future__ import annotations

import asyncio
import gc
import uuid
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from triptych.cli.assemble import Moves, Rows, aggregated, decode, encoder, prefill
from triptych.cli.loaded import LoadedTower
from triptych.core.config import MIB
from triptych.core.encoded import EncoderReference
from triptych.core.errors import Internal, StartupError, TriptychError
from triptych.core.events import EncoderReady, Failed, Finished, PrefillReady, Prompt, Tokens
from triptych.core.request import CacheOptions, EncodeOptions, GenerateRequest, Stopping
from triptych.core.session import KvSession
from triptych.models.contract import TowerModel
from triptych.wire.codec_reference import ReferenceCodec
from triptych.wire.codec_session import SessionCodec
from triptych.wire.gen import encoder_pb2, kv_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triptych.cli.loaded import LoadedModel
    from triptych.cli.parity_cases import Case
    from triptych.cli.transports import Transport
    from triptych.core.events import FinishReason, StopMatch, Usage
    from triptych.core.logprobs import TokenLogprob
    from triptych.roles.contract import Role
    from triptych.roles.desk import Desk

Topology = Literal["p+d", "e+pd", "e+p+d"]

TOLERANCE = 1e-4
"""Of log probabilities."""
HANDOFF_SECONDS = 60.0
ROW_BYTES = 64 * MIB
"""Memory for encoder rows on their way, on either side."""
SESSIONS = SessionCodec()
REFERENCES = ReferenceCodec()


@dataclass(slots=True)
class Output:
    """What came of one output."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    end: tuple[FinishReason, StopMatch | None] | None = None


@dataclass(slots=True)
class Said:
    """What came of one request."""

    outputs: defaultdict[int, Output] = field(default_factory=lambda: defaultdict(Output))
    prompt: Output = field(default_factory=Output)
    """The prompt's own tokens and log probabilities, where they were asked for."""
    usage: Usage | None = None
    session: KvSession | None = None
    references: tuple[EncoderReference, ...] = ()
    error: str = ""


class Compared(NamedTuple):
    """How one case went."""

    case: Case
    tokens: int
    """Of all outputs, on one side."""
    reused: int
    """Prompt tokens that the prefill engine had cached, or the decode engine, and that were not computed or moved."""
    differences: tuple[str, ...]


class Sides:
    """One engine, and several that do the same together. Enter it on an event loop.

    Args:
        loaded: the model, which all of them share.
        transport: between them.
        topology: which engines do it together.
        chunk: prompt tokens of one step; None leaves it as it was loaded.
    """

    def __init__(self, loaded: LoadedModel, transport: Transport, topology: Topology, chunk: int | None) -> None:
        if chunk is not None:
            loaded = replace(loaded, config=replace(loaded.config, max_batched_tokens=chunk))
        self._loaded = loaded
        self._topology = topology
        self._moves = Moves(transport, HANDOFF_SECONDS)
        self._encoder: Role | None = None
        self._decode: Role | None = None
        self._cleanup = AsyncExitStack()

    async def __aenter__(self) -> Sides:
        """Start the engines."""
        loaded, moves = self._loaded, self._moves
        rows = Rows(moves, ROW_BYTES, required=True) if self._topology.startswith("e") else None
        async with AsyncExitStack() as starting:

            def running(desk: Desk) -> Desk:
                starting.push_async_callback(desk.drain, 0)
                return desk

            starting.push_async_callback(asyncio.to_thread, moves.close)
            self._whole = running(aggregated(loaded, uuid.uuid4().hex, check=True))
            if rows is not None:
                self._encoder = running(encoder(_tower(loaded), uuid.uuid4().hex, rows, check=True))
            if self._topology.endswith("pd"):
                self._reader = running(aggregated(loaded, uuid.uuid4().hex, None, rows, check=True))
            else:
                self._reader = running(prefill(loaded, uuid.uuid4().hex, moves, rows, check=True))
                self._decode = running(decode(loaded, uuid.uuid4().hex, moves, check=True))
            self._cleanup = starting.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop them, and give their memory back: their parts know each other, and few objects hold much."""
        await self._cleanup.aclose()
        del self._whole, self._reader
        self._encoder = self._decode = None
        gc.collect()

    async def compare(self, case: Case, placeholder: int | None) -> Compared:
        """Answer one case both ways; errors are differences.

        Args:
            case: the request.
            placeholder: the token that stands for a picture.
        """
        salt = uuid.uuid4().hex
        request = self._request(case, salt)
        known = await self._warm(case, request, placeholder)
        reuses = case.reuse is not None and case.reuse.on_prefill
        fresh = replace(request, cache=CacheOptions(bypass_prefix_cache=not reuses, salt=salt))
        whole = await _ask(self._whole, fresh)
        moved = self._imported_blocks()
        first, rest = await self._ask_apart(fresh, request)
        moved = self._imported_blocks() - moved
        differences = [*_differences(whole, first, rest)]
        kept = 0
        if first.session is not None and rest.usage is not None and rest.usage.completion_tokens > case.outputs:
            # of answers that end with their first tokens nothing is fetched
            kept = first.session.handle.blocks - moved
            wanted = known if case.reuse is not None and case.reuse.on_decode else 0
            if kept != wanted:
                differences.append(f"the decode engine fetched {moved} blocks, and had {wanted} of {moved + kept}")
        tokens = sum(len(output.token_ids) for output in whole.outputs.values())
        cached = 0 if rest.usage is None else rest.usage.cached_prompt_tokens
        return Compared(case, tokens, cached + kept * self._whole.engine.block_size, tuple(differences))

    def _request(self, case: Case, salt: str) -> GenerateRequest:
        return GenerateRequest(
            request_id=uuid.uuid4().hex,
            model=self._whole.model.served_name,
            prompt=case.prompt,
            media=case.media,
            sampling=case.sampling,
            stopping=case.stopping,
            cache=CacheOptions(salt=salt),
            num_sequences=case.outputs,
            logprobs=case.logprobs,
            guide=case.guide,
        )

    async def _warm(self, case: Case, request: GenerateRequest, placeholder: int | None) -> int:
        """Have the beginning of the prompt computed where the case says; how many blocks it fills.

        Raises:
            TriptychError: that failed.
        """
        if case.reuse is None:
            return 0
        prompt = case.prompt[: case.reuse.tokens]
        pictures = sum(token == placeholder for token in prompt)
        warm = GenerateRequest(
            request_id=uuid.uuid4().hex,
            model=request.model,
            prompt=prompt,
            media=case.media[:pictures],
            stopping=Stopping(max_tokens=2, ignore_eos=True),  # of one token nothing would be fetched
            cache=request.cache,
        )
        said = await _ask(self._whole, warm)
        if case.reuse.on_decode:
            await self._ask_apart(warm, warm)
        else:
            session = (await self._read(warm)).session
            if session is not None:
                await self._reader.abort_session(session.handle.session_id)
        length = 0 if said.usage is None else said.usage.prompt_tokens
        return length // self._whole.engine.block_size

    async def _ask_apart(self, first: GenerateRequest, rest: GenerateRequest) -> tuple[Said, Said]:
        """What the engine says that reads the prompt, and the one that answers, which gets neither media nor text."""
        begun = await self._read(first)
        if self._decode is None:
            return begun, begun
        if begun.session is None:
            return begun, Said(error=begun.error or "there was no session")
        message = kv_pb2.KvSessionRef.FromString(SESSIONS.encode(begun.session).SerializeToString())
        return begun, await _ask(self._decode, replace(rest, session=SESSIONS.decode(message), media=()))

    async def _read(self, request: GenerateRequest) -> Said:
        """Have the prompt computed, with its media encoded elsewhere where there is an encoder."""
        request = replace(request, handoff=self._decode is not None)
        if self._encoder is None or not request.media:
            return await _ask(self._reader, request)
        encoded = await _ask(self._encoder, replace(request, handoff=False, encode=EncodeOptions()))
        if encoded.error:
            return encoded
        references = tuple(
            REFERENCES.decode(encoder_pb2.EncoderCacheRef.FromString(REFERENCES.encode(reference).SerializeToString()))
            for reference in encoded.references
        )
        return await _ask(self._reader, replace(request, media=(), references=references))

    def _imported_blocks(self) -> int:
        return 0 if self._decode is None else int(self._decode.statistics()["scheduler"]["imported_blocks"])


def _tower(loaded: LoadedModel) -> LoadedTower:
    """The same checkpoint as an encoder engine has it.

    Raises:
        StartupError: it has no tower.
    """
    if loaded.model.tower is None:
        raise StartupError(f"{loaded.directory}: the model has no tower, so there is nothing to encode")
    tower = TowerModel(loaded.model.tower, loaded.model.text.spec.rows)
    return LoadedTower(tower, loaded.config, loaded.frontend, loaded.media)


async def _ask(role: Role, request: GenerateRequest) -> Said:
    said = Said()
    try:
        answer = await role.accept(request)
    except TriptychError as error:
        said.error = f"{type(error).__name__}: {error}"
        return said
    try:
        async for event in answer:
            match event:
                case Prompt(token_ids=token_ids, logprobs=logprobs):
                    said.prompt = Output(list(token_ids), logprobs=list(logprobs))
                case Tokens():
                    output = said.outputs[event.output_index]
                    output.token_ids += event.token_ids
                    output.text += event.text
                    output.logprobs += event.logprobs
                case Finished():
                    said.outputs[event.output_index].end = (event.reason, event.stop)
                    said.usage = event.usage
                case PrefillReady(session=KvSession() as session):
                    said.session = session
                case EncoderReady(references=references):
                    said.references = tuple(each for each in references if isinstance(each, EncoderReference))
                case PrefillReady():
                    raise Internal("a role of this process sealed its session")
                case Failed(error=failure):
                    said.error = f"{type(failure).__name__}: {failure}"
    finally:
        await answer.aclose()
    return said


def _differences(whole: Said, first: Said, rest: Said) -> Iterable[str]:
    """What several engines said otherwise than one."""
    if whole.error or rest.error:
        yield f"one engine: {whole.error or 'an answer'}; several: {rest.error or 'an answer'}"
        return
    yield from _output_differences("the prompt", whole.prompt, first.prompt)
    if whole.outputs.keys() != rest.outputs.keys():
        yield f"outputs: {sorted(whole.outputs)} against {sorted(rest.outputs)}"
    for index in sorted(whole.outputs):
        yield from _output_differences(f"output {index}", whole.outputs[index], rest.outputs[index])
    if whole.usage != rest.usage or whole.usage is None:
        yield f"usage: {whole.usage} against {rest.usage}"


def _output_differences(name: str, whole: Output, apart: Output) -> Iterable[str]:
    for what in ("token_ids", "text", "end"):
        ours, theirs = getattr(whole, what), getattr(apart, what)
        if ours != theirs:
            yield f"{name}: {what}: {ours!r} against {theirs!r}"
    if len(whole.logprobs) != len(apart.logprobs):
        yield f"{name}: {len(whole.logprobs)} log probabilities against {len(apart.logprobs)}"
        return
    for index, (one, other) in enumerate(zip(whole.logprobs, apart.logprobs, strict=True)):
        gap = _gap(one, other)
        if gap > TOLERANCE:
            yield f"{name}: the log probabilities of token {index} differ by {gap:.1g}: {one} against {other}"


def _gap(one: TokenLogprob | None, other: TokenLogprob | None) -> float:
    """The largest difference of two tokens' numbers; infinite where one is absent.

    Of candidates as likely as each other either may come first, and the last may be another.
    """
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    gap = abs(one.logprob - other.logprob)
    if one.candidates is None or other.candidates is None:
        return gap if one.candidates is other.candidates else float("inf")
    if len(one.candidates.token_ids) != len(other.candidates.token_ids):
        return float("inf")
    ours: dict[int, float] = dict(zip(one.candidates.token_ids.tolist(), one.candidates.logprobs.tolist(), strict=True))
    theirs: dict[int, float] = dict(
        zip(other.candidates.token_ids.tolist(), other.candidates.logprobs.tolist(), strict=True)
    )
    last = min(*ours.values(), *theirs.values())
    gaps = (abs(ours.get(token_id, last) - theirs.get(token_id, last)) for token_id in ours.keys() | theirs.keys())
    return max(gap, *gaps)
