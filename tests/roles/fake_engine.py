"""A role over an engine that does nothing by itself: the test says what it says."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.checkpoints import write_video_settings
from tests.roles.media_parts import media_intake
from triptych.cli.flags import DEMO, model_directory
from triptych.core.config import MediaLimits
from triptych.core.errors import Overloaded, TriptychError
from triptych.core.events import Encoded, Finished, FinishReason, Prefilled, RowsGone, Tokens, Usage
from triptych.core.handles import Handle, KvLayout, RowLayout
from triptych.core.load import Load
from triptych.core.session import FirstToken
from triptych.processors.registry import load_processor
from triptych.roles.adapters import Adapters
from triptych.roles.aggregated import Aggregated
from triptych.roles.contract import EngineDescription, ModelDescription, RoleName
from triptych.roles.decode import Decode
from triptych.roles.desk import Desk
from triptych.roles.encoder import Encoder, RowFormat
from triptych.roles.frontend import Frontend, GrammarCompiler
from triptych.roles.intake import Intake
from triptych.roles.known_items import KnownItems
from triptych.roles.leases import Leases
from triptych.roles.live import LiveRequests
from triptych.roles.prefill import Prefill
from triptych.text.tokenizer import Tokenizer
from triptych.transport.contract import SessionState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from triptych.core.adapter import Adapter, AdapterInfo
    from triptych.core.events import EngineEvent, Span
    from triptych.core.kv_events import KvChange
    from triptych.core.media_options import OptionLayer
    from triptych.core.request import EncodeRequest, Request
    from triptych.processors.contract import Processor
    from triptych.roles.media_intake import Fetcher
    from triptych.transport.contract import SessionEvent

CONTEXT = 400
LAYOUT = KvLayout(layers=2, kv_heads=1, head_size=8, block_size=16, dtype="float32", itemsize=4)
MODEL = bytes(range(32))
ROWS = RowFormat("fake", row_bytes=64, dtype="float32")


@cache
def frontend(vocab_size: int = 1024) -> Frontend:
    """The demo model's, without its weights."""
    directory = model_directory(DEMO)
    tokenizer = Tokenizer.load(directory)
    processor = load_processor(directory, tokenizer.encode_plain)
    model = ModelDescription(
        model_id=str(directory),
        served_name="demo",
        tokenizer_source=str(directory),
        max_context=CONTEXT,
        context_limit="the test",
        modalities=tuple(processor.placeholders),
        image_token_id=next(iter(processor.placeholders.values())),
    )
    return Frontend(model, tokenizer, processor, tokenizer.eos_token_ids, vocab_size, MediaLimits())


def video_processor(directory: Path) -> Processor:
    """The demo model's, if it read videos; its files are written to a directory that is empty."""
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(model_directory(DEMO) / name, directory)
    write_video_settings(directory)
    return load_processor(directory, frontend().tokenizer.encode_plain)


@dataclass
class FakeEngine:
    """Remembers what it was told."""

    room: int = 1000
    """Outputs that may wait."""
    submitted: list[tuple[Request, ...]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    failure: TriptychError | None = None
    deliver: Callable[[tuple[EngineEvent, ...], tuple[KvChange, ...]], None] | None = None
    tell: Callable[[str, SessionEvent], None] | None = None

    def start(self, deliver: Callable[[tuple[EngineEvent, ...], tuple[KvChange, ...]], None]) -> None:
        self.deliver = deliver

    def submit(self, requests: Sequence[Request]) -> None:
        self.check_queue(len(requests))
        self.submitted.append(tuple(requests))

    def check_queue(self, count: int = 1, *, before: int = 0) -> None:
        if sum(map(len, self.submitted)) + before + count > self.room:
            raise Overloaded("no room")

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def withdraw(self, session_id: str) -> None:
        self.withdrawn.append(session_id)

    def release(self, session_id: str) -> None:
        self.released.append(session_id)

    def stop(self) -> None:
        pass

    def load(self) -> Load:
        return Load(0, sum(map(len, self.submitted)), 0, 0, 0, 0, 0, 0)

    def statistics(self) -> dict[str, dict[str, float]]:
        return {}

    # -- what the test has it say -----------------------------------------------------------------

    def say(self, *events: EngineEvent, kv: tuple[KvChange, ...] = ()) -> None:
        """Heard by the role in the next turn of its loop."""
        assert self.deliver is not None
        self.deliver(events, kv)

    def answer(self, group: int = 0) -> None:
        """One token and the end for each output of a group."""
        for request in self.submitted[group]:
            self.say(
                Tokens(request.request_id, (70,)),
                Finished(request.request_id, FinishReason.LENGTH, Usage(len(request.plan), 1, 0)),
            )

    def prefilled(self, group: int = -1, *, cached: int = 0, **first: Any) -> str:
        """The first tokens of a group, 70 and on; returns the session's name."""
        requests = self.submitted[group]
        session_id = requests[0].export
        assert session_id is not None
        for index, request in enumerate(requests):
            assert request.export == session_id
            handle = Handle(session_id, "fake", "incarnation", LAYOUT, -(-len(request.plan) // 16), b"")
            self.say(
                Prefilled(
                    request.request_id,
                    FirstToken(70 + index, **first),
                    None if index else handle,
                    Usage(len(request.plan), 1, 0 if index else cached),
                    (),
                )
            )
        return session_id

    def encoded(
        self, group: int = -1, *, gone: Collection[int] = (), spans: Sequence[tuple[Span, ...]] | None = None
    ) -> list[str]:
        """The rows of a group of items, but of those that are ``gone``; returns the outputs' names, all of them."""
        requests: tuple[EncodeRequest, ...] = self.submitted[group]
        for index, request in enumerate(requests):
            if index in gone:
                self.say(RowsGone(request.request_id))
            else:
                handle = Handle(request.export, "fake", "incarnation", RowLayout(65536), 1, b"")
                self.say(Encoded(request.request_id, handle, () if spans is None else spans[index]))
        return [request.export for request in requests]


class Parts(NamedTuple):
    """What every role is built of."""

    description: EngineDescription
    intake: Intake
    live: LiveRequests


def _parts(
    engine: FakeEngine,
    role: RoleName,
    *,
    compiler: GrammarCompiler | None = None,
    read: Callable[[AdapterInfo], Adapter] | None = None,
    kv_event_buffer: int = 16,
    vocab_size: int = 1024,
    limits: MediaLimits | None = None,
    fetcher: Fetcher | None = None,
    server: OptionLayer | None = None,
) -> Parts:
    description = EngineDescription(
        role=role,
        instance_id="incarnation",
        device="cpu",
        dtype="float32",
        block_size=16,
        num_blocks=100,
        max_running_requests=8,
        max_batched_tokens=256,
        max_num_sequences=8,
        guided=compiler is not None,
        max_loras=2 if read else 0,
        kv_event_buffer=kv_event_buffer,
        kv_event_heartbeat=3600.0,
        fetches=fetcher is not None,
    )
    front = frontend(vocab_size) if limits is None else replace(frontend(vocab_size), limits=limits)
    media = media_intake(front, fetcher, server)
    intake = Intake(front, Adapters(read or _nothing, description.max_loras), compiler, media)
    return Parts(description, intake, LiveRequests(engine, frontend().tokenizer, description.max_num_sequences))


def fake_role(engine: FakeEngine, **parts: Any) -> Desk:
    """The aggregated role over a fake engine; without ``read`` adapters are off. Call it on the event loop."""
    description, intake, live = _parts(engine, RoleName.AGGREGATED, **parts)
    return Desk(description, intake, engine, live, Aggregated(intake, engine, live))


def fake_prefill(engine: FakeEngine, *, seconds: float = 3600, **parts: Any) -> Desk:
    """The prefill role; what its transport says goes through ``engine.tell``."""
    description, intake, live = _parts(engine, RoleName.PREFILL, **parts)
    leases = Leases(engine, seconds)
    engine.tell = leases.tell
    return Desk(description, intake, engine, live, Prefill(intake, engine, live, leases, MODEL), leases)


def fake_decode(engine: FakeEngine, *, vocab_size: int = 2048, **parts: Any) -> Desk:
    """The decode role."""
    description, intake, live = _parts(engine, RoleName.DECODE, vocab_size=vocab_size, **parts)
    whole = Aggregated(intake, engine, live)
    return Desk(description, intake, engine, live, Decode(intake, engine, live, whole, LAYOUT, MODEL))


def fake_both(engine: FakeEngine, *, seconds: float = 3600, vocab_size: int = 2048, **parts: Any) -> Desk:
    """The aggregated role with transports both ways."""
    description, intake, live = _parts(engine, RoleName.AGGREGATED, vocab_size=vocab_size, **parts)
    leases = Leases(engine, seconds)
    engine.tell = leases.tell
    prefill = Prefill(intake, engine, live, leases, MODEL)
    decode = Decode(intake, engine, live, Aggregated(intake, engine, live), LAYOUT, MODEL)
    return Desk(description, intake, engine, live, Aggregated(intake, engine, live, prefill, decode), leases)


def fake_encoder(
    engine: FakeEngine,
    *,
    seconds: float = 3600,
    state: Callable[[str], SessionState] = lambda _: SessionState.WAITING,
    known: KnownItems | None = None,
    limits: MediaLimits | None = None,
    fetcher: Fetcher | None = None,
) -> Desk:
    """The encoder role; what its transport says goes through ``engine.tell``, how its outputs stand by ``state``."""
    description, intake, live = _parts(
        engine, RoleName.ENCODER, kv_event_buffer=0, vocab_size=2048, limits=limits, fetcher=fetcher
    )
    assert intake.media is not None
    leases = Leases(engine, seconds, state)
    engine.tell = leases.tell
    known = known or KnownItems()
    encoder = Encoder(intake, intake.media, engine, live, leases, known, ROWS)
    description = replace(description, encodes=True, row_backend=ROWS.backend)
    return Desk(description, intake, engine, live, encoder, leases, known)


def _nothing(info: AdapterInfo) -> Adapter:
    raise AssertionError(f"{info} was read")
