"""A role over an engine that does nothing by itself: the test says what it says."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from triptych.cli.flags import DEMO, model_directory
from triptych.core.config import MediaLimits
from triptych.core.errors import Overloaded, TriptychError
from triptych.core.events import Finished, FinishReason, Tokens, Usage
from triptych.core.load import Load
from triptych.processors.registry import load_processor
from triptych.roles.adapters import Adapters
from triptych.roles.aggregated import Aggregated
from triptych.roles.contract import EngineDescription, ModelDescription, RoleName
from triptych.roles.desk import Desk
from triptych.roles.intake import Frontend, GrammarCompiler, Intake
from triptych.roles.live import LiveRequests
from triptych.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triptych.core.adapter import Adapter, AdapterInfo
    from triptych.core.events import Event
    from triptych.core.kv_events import KvChange
    from triptych.core.request import Request

CONTEXT = 400


@cache
def frontend(vocab_size: int = 1024) -> Frontend:
    """The demo model's, without its weights."""
    directory = model_directory(DEMO)
    processor = load_processor(directory)
    tokenizer = Tokenizer.load(directory)
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


@dataclass
class FakeEngine:
    """Remembers what it was told."""

    room: int = 1000
    """Outputs that may wait."""
    submitted: list[tuple[Request, ...]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    failure: TriptychError | None = None
    deliver: Callable[[tuple[Event, ...], tuple[KvChange, ...]], None] | None = None

    def start(self, deliver: Callable[[tuple[Event, ...], tuple[KvChange, ...]], None]) -> None:
        self.deliver = deliver

    def submit(self, requests: Sequence[Request]) -> None:
        self.check_queue(len(requests))
        self.submitted.append(tuple(requests))

    def check_queue(self, count: int = 1) -> None:
        if sum(map(len, self.submitted)) + count > self.room:
            raise Overloaded("no room")

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stop(self) -> None:
        pass

    def load(self) -> Load:
        return Load(0, sum(map(len, self.submitted)), 0, 0, 0, 0, 0, 0)

    def statistics(self) -> dict[str, dict[str, float]]:
        return {}

    # -- what the test has it say -----------------------------------------------------------------

    def say(self, *events: Event, kv: tuple[KvChange, ...] = ()) -> None:
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


def fake_role(
    engine: FakeEngine,
    *,
    compiler: GrammarCompiler | None = None,
    read: Callable[[AdapterInfo], Adapter] | None = None,
    kv_event_buffer: int = 16,
) -> Desk:
    """The aggregated role over a fake engine; without ``read`` adapters are off. Call it on the event loop."""
    description = EngineDescription(
        role=RoleName.AGGREGATED,
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
    )
    adapters = Adapters(read or _nothing, description.max_loras)
    intake = Intake(frontend(), adapters, compiler)
    live = LiveRequests(engine, frontend().tokenizer, description.max_num_sequences)  # type: ignore[arg-type]
    return Desk(description, frontend(), intake, engine, live, Aggregated(intake, engine, live))  # type: ignore[arg-type]


def _nothing(info: AdapterInfo) -> Adapter:
    raise AssertionError(f"{info} was read")
