"""How an encoder engine's requests and outputs end: taken, expired, aborted, left, drained; and that nothing stays."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.roles.encoder_asks import MARKER, PICTURES, ask, outputs, ready_of, rest, submitted, turns
from tests.roles.fake_engine import FakeEngine, fake_encoder
from triptych.core.config import MediaLimits
from triptych.core.errors import Cancelled, Draining, Internal, Overloaded, ReferenceNotFound, RequestNotFound
from triptych.core.events import EncoderReady, Failed, Finished, FinishReason, RowsGone, Usage
from triptych.roles.contract import AbortOutcome, TransferOutcome
from triptych.roles.known_items import KnownItems
from triptych.transport.contract import SessionEvent, SessionState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.request import EncodeRequest, GenerateRequest
    from triptych.roles.contract import Answer
    from triptych.roles.desk import Desk


async def handed_over(role: Desk, engine: FakeEngine, one: GenerateRequest | None = None) -> list[str]:
    """One request, encoded and read of; the names of its outputs."""
    before = len(engine.submitted)
    answer = await role.accept(one or ask())
    await submitted(engine, before + 1)
    engine.encoded()
    ready = await ready_of(answer)
    await answer.aclose()
    return [one.item.handle.session_id for one in ready.references]


# -- how an output ends ------------------------------------------------------------------------------------------------


async def test_each_output_is_taken_by_itself() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    first, second = await handed_over(role, engine, ask(2))
    assert role.transfer_outcome(first) is TransferOutcome.NOT_STARTED
    for event in (SessionEvent.FREE, SessionEvent.TAKEN):
        engine.tell(first, event)
    await turns()
    assert engine.released == [first]
    assert role.transfer_outcome(first) is TransferOutcome.FINISHED
    assert role.transfer_outcome(second) is TransferOutcome.NOT_STARTED
    assert await role.abort_rows(first) is AbortOutcome.ALREADY_FINISHED
    assert await role.abort_rows(second) is AbortOutcome.ABORTED
    assert await role.abort_rows(second) is AbortOutcome.ALREADY_FINISHED
    assert engine.withdrawn == [second]
    assert engine.released == [first]  # the transport has not said that nobody reads the second
    assert outputs(role) == (0, 2, 1, 0, 1)


async def test_nobody_came() -> None:
    engine = FakeEngine()
    state = SessionState.WAITING
    role = fake_encoder(engine, seconds=0.01, state=lambda _: state)
    (name,) = await handed_over(role, engine)
    async with asyncio.timeout(20):
        while not engine.withdrawn:
            await asyncio.sleep(0.001)
    state = SessionState.UNKNOWN
    assert engine.withdrawn == [name]
    assert role.transfer_outcome(name) is TransferOutcome.FAILED
    assert await role.abort_rows(name) is AbortOutcome.ALREADY_FINISHED
    assert outputs(role) == (0, 1, 0, 1, 0)


async def test_the_outcome_is_known_when_both_sides_know_it() -> None:
    engine = FakeEngine()
    state = SessionState.WAITING
    role = fake_encoder(engine, state=lambda _: state)
    (name,) = await handed_over(role, engine)
    assert role.transfer_outcome(name) is TransferOutcome.NOT_STARTED
    state = SessionState.TAKING
    assert role.transfer_outcome(name) is TransferOutcome.IN_PROGRESS
    assert await role.abort_rows(name) is AbortOutcome.ABORTED  # too late: it is taken whole
    assert role.transfer_outcome(name) is TransferOutcome.IN_PROGRESS
    state = SessionState.UNKNOWN
    engine.tell(name, SessionEvent.TAKEN)
    await turns()
    assert role.transfer_outcome(name) is TransferOutcome.FINISHED
    assert outputs(role) == (0, 1, 0, 0, 1)


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("state", [SessionState.WAITING, SessionState.UNKNOWN])
async def test_the_outcome_while_one_side_has_not_heard(state: SessionState, over: bool) -> None:
    engine = FakeEngine()
    role = fake_encoder(engine, state=lambda _: state)
    (name,) = await handed_over(role, engine)
    if over:
        await role.abort_rows(name)
    expected = {
        (SessionState.WAITING, False): TransferOutcome.NOT_STARTED,
        (SessionState.WAITING, True): TransferOutcome.IN_PROGRESS,  # the transport has not heard of the abort
        (SessionState.UNKNOWN, False): TransferOutcome.IN_PROGRESS,  # here it is not known how it ended
        (SessionState.UNKNOWN, True): TransferOutcome.FAILED,
    }
    assert role.transfer_outcome(name) is expected[state, over]


async def test_an_output_is_not_known_before_it_is_handed_over() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    answer = await role.accept(ask())
    await submitted(engine)
    name = engine.submitted[0][0].export
    with pytest.raises(ReferenceNotFound):
        role.transfer_outcome(name)
    await answer.aclose()


async def test_an_abort_by_request_finds_all_of_its_outputs() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    names = await handed_over(role, engine, ask(3))
    others = await handed_over(role, engine, ask(2, request_id="other"))
    engine.tell(names[1], SessionEvent.TAKEN)
    await turns()
    assert await role.abort("r") is AbortOutcome.ABORTED
    assert engine.withdrawn == [names[0], names[2]]
    assert await role.abort("r") is AbortOutcome.ALREADY_FINISHED
    with pytest.raises(RequestNotFound):
        await role.abort("nobody")
    assert await role.abort_all() == 2
    assert engine.withdrawn[2:] == others


# -- who leaves before reading leaves nothing behind -------------------------------------------------------------------

PHASES = ("arriving", "in line", "opening", "in the engine", "partly done", "gone", "opening again", "ready")


@dataclass
class Stage:
    """A request of two items, brought to one of the phases."""

    engine: FakeEngine
    role: Desk
    answer: Answer
    blockers: list[Answer] = field(default_factory=list)


async def staged(phase: str) -> Stage:
    engine = FakeEngine()
    role = fake_encoder(engine, limits=MediaLimits(media_preparation_limit=1))
    if phase in ("gone", "opening again"):
        await handed_over(role, engine, ask(2, request_id="before"))
    stage = Stage(engine, role, answer=await role.accept(ask(3 if phase == "in line" else 2)))
    match phase:
        case "in line":
            stage.blockers.append(stage.answer)
            stage.answer = await role.accept(ask(2, request_id="second"))
        case "opening":
            await turns(2)
        case "in the engine" | "partly done" | "ready" | "gone" | "opening again":
            await submitted(engine, len(engine.submitted) + 1)
    match phase:
        case "partly done":
            whole = engine.submitted[-1]
            engine.submitted[-1] = whole[:1]
            engine.encoded()
            engine.submitted[-1] = whole
        case "gone":
            engine.encoded(gone={0, 1})
        case "opening again":
            engine.encoded(gone={0, 1})
            await turns(2)
        case "ready":
            engine.encoded()
    if phase not in ("gone", "opening again", "arriving", "in line", "opening"):
        await turns()
    return stage


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("way", ["close", "abort", "abort all"])
async def test_leaving_at_every_phase(phase: str, way: str) -> None:
    stage = await staged(phase)
    engine, role, answer = stage.engine, stage.role, stage.answer
    waiting = outputs(role)[0] - (2 if phase == "ready" else 0)
    if way == "close":
        await answer.aclose()
        assert await rest(answer) == []
    else:
        if way == "abort":
            assert await role.abort(answer.request_id) is AbortOutcome.ABORTED
        else:
            await role.abort_all()
            waiting = 0
        serials = {one.request_id for group in engine.submitted for one in group} & set(answer.serials)
        engine.say(*(Finished(serial, FinishReason.CANCELLED, None) for serial in serials))
        (end,) = await rest(answer)
        assert isinstance(end, Finished)
        assert (end.reason, end.usage) == (FinishReason.CANCELLED, Usage(0, 0, 0))
        await answer.aclose()
    for one in stage.blockers:
        await one.aclose()
    await role._live.settled()
    if engine.submitted and engine.submitted[-1][0].request_id in answer.serials:
        for one in engine.submitted[-1]:
            assert one.export in engine.withdrawn
        engine.encoded()  # the engine was done just then, and hears that nobody wants it
    await turns()
    assert outputs(role)[0] == waiting
    assert role.statistics()["media_admission"]["shares_in_use"] == 0
    assert role.load().queued_requests == sum(map(len, engine.submitted))
    assert role._live._by_serial == {}
    answer = await role.accept(ask(request_id=answer.request_id))  # its id is free
    await answer.aclose()


async def test_an_abort_that_crosses_the_result_wins() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    answer = await role.accept(ask(2))
    await submitted(engine)
    assert await role.abort("r") is AbortOutcome.ABORTED
    names = engine.encoded()
    (end,) = await rest(answer)
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.CANCELLED
    assert set(names) <= set(engine.withdrawn)
    assert outputs(role) == (0, 0, 0, 0, 0)
    await answer.aclose()


async def test_an_abort_that_crosses_rows_that_are_gone_wins() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    await handed_over(role, engine, ask(request_id="before"))
    answer = await role.accept(ask())
    await submitted(engine, 2)
    assert await role.abort("r") is AbortOutcome.ABORTED
    engine.encoded(gone={0})
    (end,) = await rest(answer)
    assert isinstance(end, Finished)
    await turns()
    assert len(engine.submitted) == 2
    await answer.aclose()


async def test_an_abort_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.roles.tokenising.LONG_TEXT", 1)  # so that it leaves the event loop
    engine = FakeEngine()
    role = fake_encoder(engine)
    long = asyncio.create_task(role.accept(ask()))
    await turns(2)
    assert not long.done()
    assert await role.abort("r") is AbortOutcome.ABORTED
    with pytest.raises(Cancelled):
        await long
    assert engine.submitted == []
    assert role.statistics()["media_admission"]["admitted"] == 0


# -- the end of the engine ---------------------------------------------------------------------------------------------


async def test_a_drain_waits_for_outputs_too() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    names = await handed_over(role, engine, ask(2))
    draining = asyncio.create_task(role.drain(60))
    for name in names:
        await turns()
        assert not draining.done()
        engine.tell(name, SessionEvent.TAKEN)
    await draining
    assert engine.withdrawn == []
    with pytest.raises(Draining):
        await role.accept(ask())


async def test_a_drain_withdraws_what_nobody_took() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    read = await handed_over(role, engine, ask(2))
    unread = await role.accept(ask(2, request_id="unread"))
    await submitted(engine, 2)
    running = await role.accept(ask(request_id="running"))
    await submitted(engine, 3)
    names = engine.encoded(1)
    opening = await role.accept(ask(request_id="opening"))
    await turns(2)
    await role.drain(0)
    for answer in (unread, running, opening):
        (end,) = await rest(answer)
        assert isinstance(end, Failed)
        assert isinstance(end.error, Draining)
        await answer.aclose()
    assert {*read, *names} < set(engine.withdrawn)
    assert set(engine.withdrawn) == {one.export for group in engine.submitted for one in group}
    assert outputs(role) == (0, 4, 0, 0, 4)
    assert role.statistics()["media_admission"]["shares_in_use"] == 0


async def test_a_drain_lets_items_be_opened_again() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    (name,) = await handed_over(role, engine, ask(request_id="before"))
    answer = await role.accept(ask())
    await submitted(engine, 2)
    draining = asyncio.create_task(role.drain(60))
    await turns()
    engine.encoded(gone={0})
    await submitted(engine, 3)
    (other,) = engine.encoded()
    await ready_of(answer)
    await answer.aclose()
    for one in (name, other):
        engine.tell(one, SessionEvent.TAKEN)
    await draining


async def test_a_drain_does_not_wait_for_an_engine_that_has_failed() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    names = await handed_over(role, engine, ask(2))
    engine.failure = Internal("no")
    with pytest.raises(Draining, match="failed"):
        await role.accept(ask())
    await role.drain(3600)
    assert engine.withdrawn == names


# -- many at once ------------------------------------------------------------------------------------------------------


class LivelyEngine(FakeEngine):
    """Ends what it is given at random, and holds blocks until its transport says that they are free."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(room=10**9)
        self.chance = chance
        self.live: dict[str, EncodeRequest] = {}
        self.held: set[str] = set()
        """Outputs with blocks."""
        self.ends = dict.fromkeys(("encoded", "gone", "failed", "cancelled"), 0)

    def submit(self, requests: Sequence[EncodeRequest]) -> None:
        super().submit(requests)
        for one in requests:
            assert one.request_id not in self.live
            self.live[one.request_id] = one
        asyncio.get_running_loop().call_soon(self._begin, tuple(requests))

    def _begin(self, requests: Sequence[EncodeRequest]) -> None:
        """Of a group all rows are gone, or none."""
        known = any(one.input is None for one in requests)
        if known and self.chance.random() < 0.5 and all(one.request_id in self.live for one in requests):
            for one in requests:
                del self.live[one.request_id]
                self.ends["gone"] += 1
                self.say(RowsGone(one.request_id))
            return
        for one in requests:
            asyncio.get_running_loop().call_later(self.chance.random() / 500, self._settle, one)

    def _settle(self, one: EncodeRequest) -> None:
        if self.live.pop(one.request_id, None) is None:
            return
        if self.chance.random() < 0.05:
            self.ends["failed"] += 1
            self.say(Failed(one.request_id, Overloaded("no")))
            return
        self.ends["encoded"] += 1
        self.held.add(one.export)
        said, self.submitted = self.submitted, [(one,)]
        self.encoded()
        self.submitted = said

    def abort(self, request_id: str) -> None:
        if self.live.pop(request_id, None) is not None:
            self.ends["cancelled"] += 1
            self.say(Finished(request_id, FinishReason.CANCELLED, None))

    def withdraw(self, session_id: str) -> None:
        if session_id in self.held:
            self.tell(session_id, SessionEvent.FREE)

    def release(self, session_id: str) -> None:
        self.held.discard(session_id)

    def take(self, session_id: str) -> None:
        """By a consumer."""
        if session_id in self.held:
            self.tell(session_id, SessionEvent.FREE)
            self.tell(session_id, SessionEvent.TAKEN)


@pytest.mark.parametrize("seed", range(3))
async def test_five_hundred_requests_leave_nothing_behind(seed: int) -> None:
    chance = random.Random(seed)
    engine = LivelyEngine(chance)
    role = fake_encoder(
        engine,
        known=KnownItems(capacity=2048),
        limits=MediaLimits(media_preparation_limit=2, max_waiting_preparations=500),
    )
    ends = dict.fromkeys(("ready", "failed", "cancelled", "left"), 0)

    async def one(number: int) -> None:
        media = tuple(chance.choice(PICTURES) for _ in range(chance.randrange(1, 4)))
        answer = await role.accept(ask(request_id=str(number), media=media, prompt=MARKER * len(media)))
        try:
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() / 20)
                if chance.random() < 0.5:
                    ends["left"] += 1
                    return
                await role.abort(str(number))
            (end,) = await rest(answer)
        finally:
            await answer.aclose()
        match end:
            case EncoderReady(references=references):
                ends["ready"] += 1
                assert [each.item.layout.content_key for each in references]
                for each in references:
                    name = each.item.handle.session_id
                    if chance.random() < 0.5:
                        engine.take(name)
                    else:
                        await role.abort_rows(name)
            case Finished():
                ends["cancelled"] += 1
            case Failed():
                ends["failed"] += 1

    await asyncio.gather(*(one(number) for number in range(500)))
    assert min(ends.values()) > 0
    assert min(engine.ends.values()) > 0
    await turns()
    assert engine.live == {}
    assert engine.held == set()
    statistics = role.statistics()
    assert outputs(role)[0] == 0
    assert statistics["media_admission"]["shares_in_use"] == statistics["media_admission"]["waiting"] == 0
    assert role._live.preparing == 0
    assert role._live._by_serial == {}
    await role.drain(60)  # and there is nothing to be waited for
