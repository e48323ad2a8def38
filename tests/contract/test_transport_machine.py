"""Sessions in every order of events: everybody hears the end once, and no fetch brings anything but its own bytes."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.contract.transports import (
    SMALL,
    SMALL_ROWS,
    BlockLayout,
    Fetching,
    Sides,
    TransportRow,
    rows,
    wait_until,
)
from triptych.transport.contract import FetchOutcome, Move, SessionEvent, SessionState

if TYPE_CHECKING:
    from triptych.core.handles import Handle

BLOCKS = 24


@dataclass
class Model:
    """What should be true of one session."""

    session_id: str
    blocks: list[int] = field(default_factory=list)
    content: list[bytes] = field(default_factory=list)
    """What the blocks held when they were published."""
    handle: Handle[Any] | None = None
    withdrawn: bool = False
    reused: bool = False
    """The blocks were given to other content."""
    fetches: list[Fetching] = field(default_factory=list)
    late: list[Fetching] = field(default_factory=list)
    """Those begun after it was withdrawn."""
    cancelled: bool = False


def machine(transport: TransportRow) -> type[RuleBasedStateMachine]:
    """The machine for one transport."""

    class Machine(SessionMachine):
        def __init__(self) -> None:
            super().__init__(transport)

    return Machine


class SessionMachine(RuleBasedStateMachine):
    def __init__(self, transport: TransportRow) -> None:
        super().__init__()
        self.transport = transport
        self.directory = tempfile.TemporaryDirectory()
        self.models: list[Model] = []
        self.free_sources = list(range(BLOCKS))
        self.targets: dict[int, Fetching | None] = dict.fromkeys(range(BLOCKS))
        """Who writes into which of the consumer's blocks."""

    @initialize(layout=st.sampled_from([SMALL, SMALL_ROWS]))
    def begin(self, layout: BlockLayout) -> None:
        self.both = Sides(self.transport, self.transport.place(Path(self.directory.name)), layout, BLOCKS)

    def of(self, choice: int, *, sealed: bool) -> Model | None:
        """One of the sessions, if there is any."""
        fitting = [each for each in self.models if (each.handle is not None) == sealed]
        return fitting[choice % len(fitting)] if fitting else None

    @rule()
    def open(self) -> None:
        if len(self.models) < 12:
            self.models.append(Model(self.both.open()))

    @rule(choice=st.integers(0, 99), count=st.integers(1, 4))
    def publish(self, choice: int, count: int) -> None:
        model = self.of(choice, sealed=False)
        if model is None or model.withdrawn:
            return
        blocks, self.free_sources = self.free_sources[:count], self.free_sources[count:]
        model.blocks += blocks
        model.content += [self.both.source.memory[block].tobytes() for block in blocks]
        self.both.publisher.publish(model.session_id, blocks)

    @rule(choice=st.integers(0, 99))
    def seal(self, choice: int) -> None:
        model = self.of(choice, sealed=False)
        if model is not None and model.blocks and not model.withdrawn:
            model.handle = self.both.publisher.seal(model.session_id)

    @rule(choice=st.integers(0, 99), sealed=st.booleans())
    def withdraw(self, choice: int, sealed: bool) -> None:
        model = self.of(choice, sealed=sealed)
        if model is not None:
            self.both.publisher.withdraw(model.session_id)
            model.withdrawn = True

    @rule(choice=st.integers(0, 99), seed=st.integers(0, 999))
    def fetch(self, choice: int, seed: int) -> None:
        model = self.of(choice, sealed=True)
        if model is None:
            return
        assert model.handle is not None
        self.begin_fetch(model, seed)

    def begin_fetch(self, model: Model, seed: int) -> Fetching:
        assert model.handle is not None
        random = Random(seed)  # how much is drawn depends on who is faster, so hypothesis must not draw it
        places = [target for target, owner in self.targets.items() if owner is None or owner.ended]
        random.shuffle(places)
        sources = [index for index in range(len(model.blocks)) if random.random() < 0.7]
        moves = [Move(*pair) for pair in zip(sources, places, strict=False)]
        for target in places:  # what a fetch wrote after its end would be seen
            if (owner := self.targets[target]) is not None:
                assert (self.both.target.memory[target] == owner.MARK).all()
        fetching = self.both.fetch(model.handle, moves, marks=True)
        for move in moves:
            self.targets[move.target] = fetching
        model.fetches.append(fetching)
        if model.withdrawn:
            model.late.append(fetching)
        return fetching

    @rule(choice=st.integers(0, 99))
    def cancel(self, choice: int) -> None:
        fetched = [(model, each) for model in self.models for each in model.fetches]
        if fetched:
            model, fetching = fetched[choice % len(fetched)]
            model.cancelled = model.cancelled or not fetching.ended
            fetching.cancel()

    @rule()
    def reuse(self) -> None:
        """The producer gives blocks that are free to other content."""
        for model in self.models:
            if self.both.told.has(model.session_id, SessionEvent.FREE) and not model.reused:
                model.reused = True
                for block in model.blocks:
                    self.both.source.generations[block] += 1
                    self.both.source.memory[block] += 1
                self.free_sources += model.blocks

    @rule()
    def rest(self) -> None:
        self.check_fetches()

    def check_fetches(self) -> None:
        """Wait for all of them. One fetch a session brings its bytes; what all the others gave back can be had."""
        for model in self.models:
            ends = [each.wait() for each in model.fetches]
            if model.cancelled and not model.withdrawn and FetchOutcome.FINISHED not in ends:
                assert model.handle is not None
                assert self.both.wait_for_return(model.handle) is SessionState.WAITING
                assert self.begin_fetch(model, len(ends)).wait() is FetchOutcome.FINISHED
            finished = [each for each in model.fetches if each.wait() is FetchOutcome.FINISHED]
            assert len(finished) <= 1
            for fetching in finished:
                assert fetching.held == {source: model.content[source] for source in fetching.held}
                assert fetching not in model.late
            assert all(each.wait() in {FetchOutcome.GONE, FetchOutcome.CANCELLED} for each in model.late)
            if ends and not (model.withdrawn or model.cancelled):
                assert finished, ends
                assert set(ends) <= {FetchOutcome.FINISHED, FetchOutcome.GONE}
                self.both.told.wait(model.session_id, SessionEvent.TAKEN)
            if self.both.told.has(model.session_id, SessionEvent.TAKEN):
                assert finished

    def teardown(self) -> None:
        try:
            self.check_fetches()
            for model in self.models:
                self.both.publisher.withdraw(model.session_id)
            wait_until(self.both.settled, "something is still held")
        finally:
            self.both.close()
            self.directory.cleanup()
        for target, owner in self.targets.items():
            if owner is not None:
                assert (self.both.target.memory[target] == owner.MARK).all()


@pytest.mark.parametrize("transport", rows())
def test_sessions_in_every_order(transport: TransportRow) -> None:
    run_state_machine_as_test(machine(transport), settings=settings(max_examples=40, stateful_step_count=40))


@pytest.mark.slow
@pytest.mark.parametrize("transport", rows())
def test_sessions_in_every_order_at_length(transport: TransportRow) -> None:
    run_state_machine_as_test(machine(transport), settings=settings(max_examples=600, stateful_step_count=80))
