"""Builds an engine of a role out of its parts: the one place that knows them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from blake3 import blake3

from triptych.cli.flags import model_directory, served_name
from triptych.core.config import SchedulerConfig
from triptych.core.errors import CheckpointError, StartupError
from triptych.core.media import Modality
from triptych.engine.grammar import GrammarCompiler, guided_available
from triptych.engine.kv_pool import allocate, count_blocks, transport_pool
from triptych.engine.loop import Engine
from triptych.engine.runner import Runner
from triptych.engine.scheduler import Scheduler
from triptych.engine.transfers import Transfers
from triptych.models.registry import describe, load_model
from triptych.processors.registry import load_processor
from triptych.roles.adapters import Adapters
from triptych.roles.aggregated import Aggregated
from triptych.roles.contract import EngineDescription, ModelDescription, RoleName
from triptych.roles.decode import Decode
from triptych.roles.desk import Desk
from triptych.roles.intake import Frontend, Intake
from triptych.roles.leases import Leases
from triptych.roles.live import LiveRequests
from triptych.roles.prefill import Prefill
from triptych.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from triptych.cli.options import EngineOptions
    from triptych.cli.transports import Transport
    from triptych.models.contract import Model
    from triptych.models.registry import Description
    from triptych.roles.desk import Service
    from triptych.transport.contract import KvFetcher, KvPool, KvPublisher, SessionEvent

End = TypeVar("End", "KvPublisher", "KvFetcher")

MAX_NUM_SEQUENCES = 16
"""Outputs of one request, where as many may wait and run at once. They begin together, so all of their places must
become free first, and the queue waits behind them."""
KV_EVENT_BUFFER = 4096
"""Batches of KV events that a subscriber may ask for again; there is at most one a step."""
KV_EVENT_HEARTBEAT = 2.0
"""Seconds."""
TRANSFER_SECONDS = 60.0
"""How long one prompt's KV may take to arrive."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint in memory, with what reads its prompts."""

    directory: Path
    model: Model
    config: SchedulerConfig
    frontend: Frontend
    options: EngineOptions


def load(
    model: str, options: EngineOptions, progress: Callable[[int, int], None], *, tower: bool = True
) -> LoadedModel:
    """Read the model that ``MODEL`` names. Whatever can be wrong without the tensors is said before they are read.

    Without ``tower`` it has no encoder: prompts with media can then only be gone on from.

    Raises:
        StartupError: one line that names the file, the tensor or the flag.
    """
    directory = model_directory(model)
    found = describe(directory, options.device, options.dtype, tower=tower)
    processor = load_processor(directory)
    tokenizer = Tokenizer.load(directory, required=tuple(processor.special_words))
    for word, index in processor.special_words.items():
        if tokenizer.added_tokens[word] != index:
            raise CheckpointError(
                f"{directory}: {word} has the id {tokenizer.added_tokens[word]} in tokenizer.json "
                f"but {index} in config.json"
            )
    config = _scheduler_config(options, found)
    description = ModelDescription(
        model_id=str(directory),
        served_name=served_name(model, options.served_name),
        tokenizer_source=str(directory),
        max_context=config.max_context,
        context_limit=_context_limit(options, found, config),
        modalities=tuple(processor.placeholders),
        image_token_id=processor.placeholders.get(Modality.IMAGE),
    )
    frontend = Frontend(
        model=description,
        tokenizer=tokenizer,
        processor=processor,
        eos_token_ids=tokenizer.eos_token_ids,
        vocab_size=found.spec.vocab_size,
        limits=options.limits(),
    )
    loaded = load_model(directory, options.device, options.dtype, progress, tower=tower)
    return LoadedModel(directory, loaded, config, frontend, options)


def _scheduler_config(options: EngineOptions, found: Description) -> SchedulerConfig:
    window = found.spec.max_context
    if options.max_context is not None and options.max_context > window:
        raise StartupError(
            f"--max-context {options.max_context} is more than the model's own window of {window} tokens"
        )
    block_size = SchedulerConfig().block_size
    blocks = count_blocks(found.spec, options.kv_cache_bytes, block_size, found.weight_bytes)
    return SchedulerConfig(
        max_batched_tokens=options.max_batched_tokens,
        max_running_requests=options.max_running_requests,
        max_waiting_requests=options.max_waiting_requests,
        encoder_cache_bytes=options.encoder_cache_bytes,
        max_context=min(options.max_context or window, blocks * block_size),
        block_size=block_size,
        num_blocks=blocks,
    )


def _context_limit(options: EngineOptions, found: Description, config: SchedulerConfig) -> str:
    """What would have to change for a longer context."""
    if config.max_context == found.spec.max_context:
        return "the model's own window"
    return "--max-context" if config.max_context == options.max_context else "--kv-cache-bytes"


def aggregated(loaded: LoadedModel, instance_id: str, moves: Moves | None = None, *, check: bool = False) -> Desk:
    """The aggregated role over a loaded model, its engine running. Call it on the event loop that serves.

    With ``moves`` it also computes prompts for other engines, and goes on from theirs. With ``check`` the engine
    compares its ledgers whenever it falls idle.

    Raises:
        StartupError: the KV pool cannot be had, or the transport.
    """
    parts = _Parts(loaded, instance_id, RoleName.AGGREGATED, moves, check=check)
    if parts.leases is None:
        return parts.desk(Aggregated(parts.intake, parts.engine, parts.live))
    prefill = Prefill(parts.intake, parts.engine, parts.live, parts.leases, parts.model)
    whole = Aggregated(parts.intake, parts.engine, parts.live)
    decode = Decode(parts.intake, parts.engine, parts.live, whole, parts.layout, parts.model)
    return parts.desk(Aggregated(parts.intake, parts.engine, parts.live, prefill, decode))


def prefill(loaded: LoadedModel, instance_id: str, moves: Moves | None = None, *, check: bool = False) -> Desk:
    """The prefill role; see ``aggregated``."""
    parts = _Parts(loaded, instance_id, RoleName.PREFILL, moves, check=check)
    if parts.leases is None:
        raise StartupError("a prefill engine needs a KV transport")
    return parts.desk(Prefill(parts.intake, parts.engine, parts.live, parts.leases, parts.model))


def decode(loaded: LoadedModel, instance_id: str, moves: Moves | None = None, *, check: bool = False) -> Desk:
    """The decode role, for a model that was loaded without its encoder; see ``aggregated``."""
    if moves is None:
        raise StartupError("a decode engine needs a KV transport")
    parts = _Parts(loaded, instance_id, RoleName.DECODE, moves, check=check)
    whole = Aggregated(parts.intake, parts.engine, parts.live)
    return parts.desk(Decode(parts.intake, parts.engine, parts.live, whole, parts.layout, parts.model))


class Moves:
    """KV that moves between this engine and others.

    Args:
        transport: makes this engine's ends of it.
        ttl: seconds for which a computed prompt waits to be taken.
    """

    def __init__(self, transport: Transport, ttl: float) -> None:
        self.transport = transport
        self.ttl = ttl
        self._ends: list[KvPublisher | KvFetcher] = []

    def keep(self, end: End) -> End:
        """Have an end closed with the others."""
        self._ends.append(end)
        return end

    def close(self) -> None:
        """Once the engine has stopped: end what is under way, remove what nobody will take. May wait for threads."""
        while self._ends:
            self._ends.pop().close()


class _Parts:
    """What every role is built of, with the ends of a transport where the role has them."""

    def __init__(
        self, loaded: LoadedModel, instance_id: str, role: RoleName, moves: Moves | None, *, check: bool
    ) -> None:
        spec, config, options = loaded.model.text.spec, loaded.config, loaded.options
        kv = allocate(spec, config.num_blocks, config.block_size)
        scheduler = Scheduler(config, row_bytes=spec.row_width * spec.dtype.itemsize, kv_changes=options.kv_events)
        self.leases: Leases | None = None
        """Where the role hands prompts over."""
        self.layout = kv.layout
        self.model = b""
        """The model's digest, where prompts move."""
        transfers = None
        if moves is not None:
            self.model = _model_digest(loaded)
            pool = transport_pool(kv, scheduler.generations)
            transfers = self._transfers(moves, pool, instance_id, role)
        self.engine = Engine(scheduler, Runner(loaded.model, kv, config, transfers), check=check)
        if moves is not None and role is not RoleName.DECODE:
            self.leases = Leases(self.engine, moves.ttl)
        self._description = _describe(loaded, instance_id, role, "" if moves is None else moves.transport.backend)
        adapters = Adapters(
            lambda info: loaded.model.text.load_adapter(info, max_rank=options.max_lora_rank), options.max_loras
        )
        compiler = _grammar_compiler(loaded.frontend) if self._description.guided else None
        self.intake = Intake(loaded.frontend, adapters, compiler)
        self.live = LiveRequests(self.engine, loaded.frontend.tokenizer, self._description.max_num_sequences)

    def _transfers(self, moves: Moves, pool: KvPool, instance_id: str, role: RoleName) -> Transfers:
        """The ends that the role has.

        They speak to an engine and to leases that are made after them, but only of what a running engine has begun.
        """
        publisher = fetcher = None
        if role is not RoleName.DECODE:
            publisher = moves.keep(moves.transport.publisher(pool, instance_id, self._tell))
        if role is not RoleName.PREFILL:
            fetcher = moves.keep(moves.transport.fetcher(pool, instance_id))
        return Transfers(publisher, fetcher, TRANSFER_SECONDS, lambda number, error: self.engine.loaded(number, error))

    def _tell(self, session_id: str, event: SessionEvent) -> None:
        if self.leases is not None:
            self.leases.tell(session_id, event)

    def desk(self, service: Service) -> Desk:
        """The role, its engine started."""
        return Desk(self._description, self.intake, self.engine, self.live, service, self.leases)


def _describe(loaded: LoadedModel, instance_id: str, role: RoleName, backend: str) -> EngineDescription:
    spec, config, options = loaded.model.text.spec, loaded.config, loaded.options
    return EngineDescription(
        role=role,
        instance_id=instance_id,
        device=str(spec.device),
        dtype=str(spec.dtype).removeprefix("torch."),
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_running_requests=config.max_running_requests,
        max_batched_tokens=config.max_batched_tokens,
        max_num_sequences=min(MAX_NUM_SEQUENCES, config.max_running_requests, config.max_waiting_requests),
        guided=guided_available() and bool(loaded.frontend.eos_token_ids),
        max_loras=options.max_loras,
        kv_event_buffer=KV_EVENT_BUFFER if options.kv_events else 0,
        kv_event_heartbeat=KV_EVENT_HEARTBEAT,
        kv_backend=backend,
        hands_over=bool(backend) and role is not RoleName.DECODE,
        takes_over=bool(backend) and role is not RoleName.PREFILL,
    )


def _model_digest(loaded: LoadedModel) -> bytes:
    """32 bytes: weights and processor settings, which the processor's fingerprint covers, and the tokenizer."""
    front = loaded.frontend
    digest = blake3(b"triptych.model.v1")
    for part in (
        front.processor.fingerprint,
        (loaded.directory / "tokenizer.json").read_bytes(),
        repr(sorted(front.eos_token_ids)).encode(),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _grammar_compiler(frontend: Frontend) -> GrammarCompiler:
    tokenizer = frontend.tokenizer
    vocabulary = [
        b"" if index in tokenizer.special_ids else tokenizer.token_bytes(index) for index in range(frontend.vocab_size)
    ]
    return GrammarCompiler(vocabulary, frontend.eos_token_ids)


ROLES = {RoleName.AGGREGATED: aggregated, RoleName.PREFILL: prefill, RoleName.DECODE: decode}
"""How each role is built."""
