"""Builds an engine of a role out of its parts: the one place that knows them all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from blake3 import blake3

from triptych.core.errors import InvalidRequest, StartupError, WrongState
from triptych.engine.encode_runner import EncodeRunner
from triptych.engine.encode_scheduler import EncodeScheduler
from triptych.engine.grammar import GrammarCompiler, guided_available
from triptych.engine.kv_pool import allocate, transport_pool
from triptych.engine.loop import EncodeEngine, Engine
from triptych.engine.row_arena import ROW_LAYOUT, allocate_rows, count_row_blocks
from triptych.engine.runner import Runner
from triptych.engine.scheduler import Scheduler
from triptych.engine.transfers import Transfers
from triptych.media.fetch import Fetcher as UrlFetcher
from triptych.media.network import SystemNetwork
from triptych.media.workers import process_pool
from triptych.roles.adapters import Adapters
from triptych.roles.aggregated import Aggregated
from triptych.roles.contract import EngineDescription, RoleName
from triptych.roles.decode import Decode
from triptych.roles.desk import Desk
from triptych.roles.encoder import Encoder, RowFormat
from triptych.roles.intake import Intake
from triptych.roles.known_items import KnownItems
from triptych.roles.leases import Leases
from triptych.roles.live import LiveRequests
from triptych.roles.media_intake import MediaIntake
from triptych.roles.prefill import Prefill
from triptych.roles.reference_checks import RowTerms
from triptych.roles.row_intake import Landing, RowIntake

if TYPE_CHECKING:
    import torch

    from triptych.cli.loaded import LoadedModel, LoadedTower
    from triptych.cli.media import MediaFlags
    from triptych.cli.transports import Transport
    from triptych.core.adapter import Adapter, AdapterInfo
    from triptych.roles.desk import Service
    from triptych.roles.frontend import Frontend
    from triptych.transport.contract import BlockMemory, Fetcher, Publisher, SessionEvent

End = TypeVar("End", "Publisher", "Fetcher")

MAX_NUM_SEQUENCES = 16
"""Outputs of one request, where as many may wait and run at once. They begin together, so all of their places must
become free first, and the queue waits behind them."""
KV_EVENT_BUFFER = 4096
"""Batches of KV events that a subscriber may ask for again; there is at most one a step."""
KV_EVENT_HEARTBEAT = 2.0
"""Seconds."""
TRANSFER_SECONDS = 60.0
"""How long one prompt's KV may take to arrive."""


def aggregated(
    loaded: LoadedModel, instance_id: str, moves: Moves | None = None, rows: Rows | None = None, *, check: bool = False
) -> Desk:
    """The aggregated role over a loaded model, its engine running. Call it on the event loop that serves.

    With ``moves`` it also computes prompts for other engines, and goes on from theirs; with ``rows`` it takes what
    encoders have encoded. With ``check`` the engine compares its ledgers whenever it falls idle.

    Raises:
        StartupError: the KV pool cannot be had, or a transport.
    """
    parts = _Parts(loaded, instance_id, RoleName.AGGREGATED, moves, rows, check=check)
    if parts.leases is None:
        return parts.desk(Aggregated(parts.intake, parts.engine, parts.live))
    prefill = Prefill(parts.intake, parts.engine, parts.live, parts.leases, parts.model)
    whole = Aggregated(parts.intake, parts.engine, parts.live)
    decode = Decode(parts.intake, parts.engine, parts.live, whole, parts.layout, parts.model)
    return parts.desk(Aggregated(parts.intake, parts.engine, parts.live, prefill, decode))


def prefill(
    loaded: LoadedModel, instance_id: str, moves: Moves | None = None, rows: Rows | None = None, *, check: bool = False
) -> Desk:
    """The prefill role; see ``aggregated``."""
    parts = _Parts(loaded, instance_id, RoleName.PREFILL, moves, rows, check=check)
    if parts.leases is None:
        raise StartupError("a prefill engine needs a KV transport")
    return parts.desk(Prefill(parts.intake, parts.engine, parts.live, parts.leases, parts.model))


def decode(
    loaded: LoadedModel, instance_id: str, moves: Moves | None = None, rows: Rows | None = None, *, check: bool = False
) -> Desk:
    """The decode role, for a model that was loaded without its encoder; see ``aggregated``. It takes no ``rows``."""
    if moves is None or rows is not None:
        raise StartupError("a decode engine needs a KV transport, and no other")
    parts = _Parts(loaded, instance_id, RoleName.DECODE, moves, check=check)
    whole = Aggregated(parts.intake, parts.engine, parts.live)
    return parts.desk(Decode(parts.intake, parts.engine, parts.live, whole, parts.layout, parts.model))


class Moves:
    """Blocks that move between this engine and others.

    Args:
        transport: makes this engine's ends of it.
        ttl: seconds for which what is handed over waits to be taken.
    """

    def __init__(self, transport: Transport, ttl: float) -> None:
        self.transport = transport
        self.ttl = ttl
        self._ends: list[Publisher | Fetcher] = []

    def keep(self, end: End) -> End:
        """Have an end closed with the others."""
        self._ends.append(end)
        return end

    def close(self) -> None:
        """Once the engine has stopped: end what is under way, remove what nobody will take. May wait for threads."""
        while self._ends:
            self._ends.pop().close()


class Rows(NamedTuple):
    """Encoder rows that move between this engine and others."""

    moves: Moves
    quota: int
    """Bytes of memory for those on their way."""
    required: bool = False
    """Whether media come in no other way: the engine was loaded without its tower."""


class _Parts:
    """What every role that computes prompts or answers is built of, with the ends of transports that it has."""

    def __init__(
        self,
        loaded: LoadedModel,
        instance_id: str,
        role: RoleName,
        moves: Moves | None,
        rows: Rows | None = None,
        *,
        check: bool,
    ) -> None:
        spec, config, options = loaded.model.text.spec, loaded.config, loaded.options
        kv = allocate(spec, config.num_blocks, config.block_size)
        scheduler = Scheduler(config, row_bytes=spec.rows.row_bytes, kv_changes=options.kv_events)
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
        media = None if rows is not None and rows.required else _media_intake(loaded.frontend, loaded.media)
        fetches = media is not None and media.fetches
        self._description = replace(_describe(loaded, instance_id, role, moves, rows), fetches=fetches)
        adapters = Adapters(
            lambda info: loaded.model.text.load_adapter(info, max_rank=options.max_lora_rank), options.max_loras
        )
        compiler = _grammar_compiler(loaded.frontend) if self._description.guided else None
        taken = None if rows is None else _row_intake(loaded, instance_id, rows)
        required = self._description.requires_rows
        self.intake = Intake(loaded.frontend, adapters, compiler, media, taken, requires_rows=required)
        self.live = LiveRequests(self.engine, loaded.frontend.tokenizer, self._description.max_num_sequences)

    def _transfers(self, moves: Moves, pool: BlockMemory, instance_id: str, role: RoleName) -> Transfers:
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


def _media_intake(front: Frontend, flags: MediaFlags) -> MediaIntake | None:
    """Where media are opened; None for a model that reads text only.

    Raises:
        StartupError: the certificates cannot be read, the proxy cannot be used, or options contradict the model's.
    """
    if not front.model.modalities:
        return None
    limits, settings = front.limits, flags.fetch()
    fetcher = None
    if settings.fetch_hosts != ():
        fetcher = UrlFetcher(settings, limits, SystemNetwork(settings.fetch_at_once))
    try:
        return MediaIntake(front, process_pool(limits, flags.decode()), fetcher, flags.layer())
    except InvalidRequest as error:
        raise StartupError(f"--media-options: {error}") from error


def _row_intake(loaded: LoadedModel, instance_id: str, rows: Rows) -> RowIntake:
    """Where the rows of encoders come in."""
    front, spec = loaded.frontend, loaded.model.text.spec.rows
    if not front.model.modalities:
        raise StartupError(f"--encoder-transport: {front.model.served_name} reads text only")
    count_row_blocks(ROW_LAYOUT, rows.quota)
    landing = Landing.of(rows.quota, ROW_LAYOUT)
    terms = RowTerms(
        fingerprint=front.processor.fingerprint,
        dtype=_word(spec.dtype),
        row_bytes=spec.row_bytes,
        backend=rows.moves.transport.backend,
        layout=ROW_LAYOUT,
        arena_blocks=landing.blocks.total,
        cache_bytes=loaded.config.encoder_cache_bytes,
    )
    return RowIntake(terms, landing, rows.moves.keep(rows.moves.transport.fetcher(landing.memory, instance_id)))


def encoder(loaded: LoadedTower, instance_id: str, rows: Rows, *, check: bool = False) -> Desk:
    """The encoder role over a loaded tower; see ``aggregated``.

    Raises:
        StartupError: the memory for rows cannot be had, or the transport.
    """
    model, front, config = loaded.model, loaded.frontend, loaded.config
    blocks = count_row_blocks(ROW_LAYOUT, rows.quota)
    scheduler = EncodeScheduler(config, model.spec.row_bytes, ROW_LAYOUT, blocks)
    memory = allocate_rows(ROW_LAYOUT, scheduler.generations)
    transport = rows.moves.transport
    # It tells leases that are made after it, but only of what a running engine has begun.
    publisher = rows.moves.keep(
        transport.publisher(memory, instance_id, lambda session_id, event: leases.tell(session_id, event))
    )
    engine = EncodeEngine(scheduler, EncodeRunner(model, memory, publisher), check=check)
    leases = Leases(engine, rows.moves.ttl, publisher.state)
    media = _media_intake(front, loaded.media)
    if media is None:
        raise StartupError(f"{front.model.served_name} reads text only, and has nothing to encode")
    description = EngineDescription(
        role=RoleName.ENCODER,
        instance_id=instance_id,
        device=str(model.spec.device),
        dtype=_word(model.spec.dtype),
        block_size=0,
        num_blocks=0,
        max_running_requests=config.encoder_items,
        max_batched_tokens=config.encoder_tokens,
        max_num_sequences=1,
        guided=False,
        max_loras=0,
        kv_event_buffer=0,
        kv_event_heartbeat=0.0,
        row_backend=transport.backend,
        encodes=True,
        fingerprint=front.processor.fingerprint,
        fetches=media.fetches,
    )
    intake = Intake(front, Adapters(_no_adapter, 0), media=media)
    live = LiveRequests(engine, front.tokenizer, description.max_num_sequences)
    known = KnownItems()
    row_format = RowFormat(transport.backend, model.spec.row_bytes, description.dtype)
    service = Encoder(intake, media, engine, live, leases, known, row_format)
    return Desk(description, intake, engine, live, service, leases, known)


def _no_adapter(info: AdapterInfo) -> Adapter:
    raise WrongState(f"adapter {info.name!r}: an encoder engine has none")


def _describe(
    loaded: LoadedModel, instance_id: str, role: RoleName, moves: Moves | None, rows: Rows | None
) -> EngineDescription:
    spec, config, options = loaded.model.text.spec, loaded.config, loaded.options
    return EngineDescription(
        role=role,
        instance_id=instance_id,
        device=str(spec.device),
        dtype=_word(spec.dtype),
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_running_requests=config.max_running_requests,
        max_batched_tokens=config.max_batched_tokens,
        max_num_sequences=min(MAX_NUM_SEQUENCES, config.max_running_requests, config.max_waiting_requests),
        guided=guided_available() and bool(loaded.frontend.eos_token_ids),
        max_loras=options.max_loras,
        kv_event_buffer=KV_EVENT_BUFFER if options.kv_events else 0,
        kv_event_heartbeat=KV_EVENT_HEARTBEAT,
        kv_backend="" if moves is None else moves.transport.backend,
        hands_over=moves is not None and role is not RoleName.DECODE,
        takes_over=moves is not None and role is not RoleName.PREFILL,
        row_backend="" if rows is None else rows.moves.transport.backend,
        takes_rows=rows is not None,
        requires_rows=rows is not None and rows.required,
        fingerprint=b"" if rows is None else loaded.frontend.processor.fingerprint,
    )


def _word(dtype: torch.dtype) -> str:
    """As torch spells it, without its prefix."""
    return str(dtype).removeprefix("torch.")


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
