"""The prefill role over an engine that the test plays: what is asked of it, what is handed over, how that ends."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.drawings import shape_png
from tests.roles.fake_engine import MODEL, FakeEngine, fake_both, fake_prefill, fake_role, frontend
from triptych.core.adapter import AdapterInfo
from triptych.core.errors import (
    Draining,
    Internal,
    KvSessionNotFound,
    RequestNotFound,
    RoleMismatch,
    UnsupportedFeature,
)
from triptych.core.events import Failed, Finished, FinishReason, PrefillReady, Prompt, StopToken, Usage, is_terminal
from triptych.core.logprobs import LogprobOptions, TokenLogprob, TopN
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import GenerateRequest, Sampling, Stopping, derived_seed
from triptych.core.session import SealedSession
from triptych.roles.contract import AbortOutcome, HealthState
from triptych.transport.contract import SessionEvent

if TYPE_CHECKING:
    from triptych.core.events import Event
    from triptych.roles.contract import Answer
    from triptych.roles.desk import Desk

PICTURE = MediaItem(Modality.IMAGE, RawBytes(shape_png("circle", "red")))
STATES = ("waiting", "granted", "taken", "expired", "withdrawn")


def request(**changes: object) -> GenerateRequest:
    plain = GenerateRequest("r", "demo", "hello", sampling=Sampling(seed=3), stopping=Stopping(max_tokens=4))
    return replace(plain, **changes)


async def turns(count: int = 5) -> None:
    """Let everything happen that can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def submitted(engine: FakeEngine, groups: int = 1) -> None:
    async with asyncio.timeout(20):
        while len(engine.submitted) < groups:
            await asyncio.sleep(0.001)


async def rest(answer: Answer) -> list[Event]:
    events = [event async for event in answer]
    assert [is_terminal(event) for event in events[:-1]] == [False] * (len(events) - 1)
    return events


async def handed_over(
    role: Desk, engine: FakeEngine, one: GenerateRequest | None = None, **said: object
) -> PrefillReady:
    """One request, computed and read of."""
    answer = await role.accept(one or request())
    await turns()
    engine.prefilled(**said)
    (ready,) = await rest(answer)
    await answer.aclose()
    assert isinstance(ready, PrefillReady)
    return ready


def sessions(role: Desk) -> tuple[float, ...]:
    statistics = role.statistics()["kv_sessions"]
    return tuple(statistics[name] for name in STATES)


# -- what is asked of the engine, and what is handed over --------------------------------------------------------------


async def test_a_prompt_ends_with_its_session() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine, seconds=100)
    before = time.time_ns()
    answer = await role.accept(request())
    await turns()
    ((one,),) = engine.submitted
    assert one.export is not None
    assert len(one.export) == 32
    assert one.resume is None
    session_id = engine.prefilled(cached=16)
    (ready,) = await rest(answer)
    assert isinstance(ready, PrefillReady)
    assert (ready.request_id, ready.usage) == ("r", Usage(len(one.plan), 1, 16))
    session = ready.session
    assert session.handle.session_id == session_id == one.export
    assert session.plan is one.plan
    assert [first.token_id for first in session.first] == [70]
    assert (session.seed, session.cached_prompt_tokens) == (3, 16)
    assert (session.model, session.adapter) == (MODEL, b"")
    (prepared,) = ready.spans
    assert prepared.name == "prepare"
    assert abs(prepared.end - time.time()) < 100
    assert before + 100e9 <= session.expires_unix_nanos <= time.time_ns() + 100e9
    await answer.aclose()
    assert engine.aborted == engine.withdrawn == []
    assert sessions(role) == (1, 1, 0, 0, 0)


async def test_outputs_share_the_prompt_and_bring_a_token_each() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    asked = request(num_sequences=3, sampling=Sampling(temperature=2))
    ready = await handed_over(role, engine, asked, cached=32)
    (group,) = engine.submitted
    assert len({one.export for one in group}) == 1
    assert [first.token_id for first in ready.session.first] == [70, 71, 72]
    assert ready.usage == Usage(len(group[0].plan), 3, 32)
    # the seed that was drawn travels, and the outputs' follow from it
    assert [one.sampling.seed for one in group] == [derived_seed(ready.session.seed, index) for index in range(3)]


async def test_names_are_never_given_twice() -> None:
    engines = FakeEngine(), FakeEngine()
    names = set()
    for engine in engines:
        role = fake_prefill(engine)
        for number in range(20):
            names.add((await handed_over(role, engine, request(request_id=f"{number}"))).session.handle.session_id)
    assert len(names) == 40


async def test_a_picture_is_prepared_here_and_its_layout_travels() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    asked = request(prompt="<|vision_start|><|image_pad|><|vision_end|>", media=(PICTURE,))
    answer = await role.accept(asked)
    await submitted(engine)
    engine.prefilled()
    (ready,) = await rest(answer)
    assert len(engine.submitted[0][0].inputs) == len(ready.session.plan.items) == 1
    assert ready.session.plan.fingerprint == frontend().processor.fingerprint
    assert role.statistics()["intake"] == {"image_loads": 1, "clip_loads": 0, "preprocess_calls": 1, "tokenisations": 1}
    await answer.aclose()


async def test_the_adapter_is_named_by_its_content() -> None:
    class Loaded:
        digest = b"a" * 32

        def __init__(self, info: AdapterInfo) -> None:
            self.info = info

    engine = FakeEngine()
    role = fake_prefill(engine, read=Loaded)
    await role.load_adapter(AdapterInfo(1, "mine", "/adapters/mine"))
    ready = await handed_over(role, engine, request(lora_name="mine"))
    assert ready.session.adapter == b"a" * 32


async def test_the_prompts_log_probabilities_come_first() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    options = LogprobOptions(prompt=True, output=True, output_candidates=TopN(1))
    answer = await role.accept(request(prompt=(5, 6), logprobs=options, num_sequences=2))
    assert answer.token_text is not None
    await turns()
    leader, follower = engine.submitted[0]
    assert leader.logprobs == options
    assert follower.logprobs == replace(options, prompt=False)
    engine.say(Prompt(leader.request_id, (5, 6), (None, TokenLogprob(-1.0, 1))))
    engine.prefilled(logprob=TokenLogprob(-2.0, 1))
    prompt, ready = await rest(answer)
    assert isinstance(prompt, Prompt)
    assert prompt.request_id == "r"
    assert [first.logprob.logprob for first in ready.session.first] == [-2.0, -2.0]
    await answer.aclose()


@pytest.mark.parametrize("stopping", [Stopping(max_tokens=1), Stopping(min_tokens=9, max_tokens=9), Stopping()])
async def test_a_length_here_is_no_end(stopping: Stopping) -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    ready = await handed_over(role, engine, request(stopping=stopping), finish=FinishReason.LENGTH)
    assert ready.session.first[0].finish is None
    # what decides about the first token is there all the same
    assert engine.submitted[0][0].stopping.min_tokens == stopping.min_tokens


async def test_a_stop_is_told_as_it_was_seen_here() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    ready = await handed_over(role, engine, finish=FinishReason.STOP, stop=StopToken(70))
    assert (ready.session.first[0].finish, ready.session.first[0].stop) == (FinishReason.STOP, StopToken(70))


async def test_what_goes_on_belongs_elsewhere() -> None:
    role = fake_prefill(FakeEngine())
    with pytest.raises(RoleMismatch, match="decode engine"):
        await role.accept(request(session=SealedSession("s", b"")))


async def test_an_aggregated_engine_hands_over_when_asked() -> None:
    engine = FakeEngine()
    role = fake_both(engine)
    whole = await role.accept(request(request_id="whole"))
    half = await role.accept(request(request_id="half", handoff=True))
    await turns()
    assert [group[0].export is not None for group in engine.submitted] == [False, True]
    engine.answer(0)
    engine.prefilled(1)
    assert isinstance((await rest(whole))[-1], Finished)
    assert isinstance((await rest(half))[-1], PrefillReady)
    await whole.aclose()
    await half.aclose()


async def test_without_a_transport_nothing_is_handed_over() -> None:
    role = fake_role(FakeEngine())
    with pytest.raises(RoleMismatch, match="one leg"):
        await role.accept(request(handoff=True))
    with pytest.raises(UnsupportedFeature, match="sessions"):
        await role.abort_session("s")
    assert "kv_sessions" not in role.statistics()


async def test_a_probe_leaves_no_session_behind() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine, vocab_size=1 << 20)
    probing = asyncio.create_task(role.health(probe=True))
    await submitted(engine)
    session_id = engine.prefilled()
    assert (await probing)[-1].state is HealthState.READY
    assert engine.withdrawn == [session_id]
    assert sessions(role) == (0, 1, 0, 0, 1)


# -- how a session ends ------------------------------------------------------------------------------------------------


async def test_taken_and_free_in_either_order() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    for order in ((SessionEvent.FREE, SessionEvent.TAKEN), (SessionEvent.TAKEN, SessionEvent.FREE)):
        session_id = (await handed_over(role, engine)).session.handle.session_id
        for event in order:
            engine.tell(session_id, event)
        await turns()
        assert engine.released[-1] == session_id
        assert await role.abort_session(session_id) is AbortOutcome.ALREADY_FINISHED
    assert engine.withdrawn == []  # there was nothing to be withdrawn
    assert len(engine.released) == 2
    assert sessions(role) == (0, 2, 2, 0, 0)


async def test_memory_that_is_free_at_once_does_not_end_the_session() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    answer = await role.accept(request())
    await turns()
    session_id = engine.submitted[0][0].export
    engine.tell(session_id, SessionEvent.FREE)  # copied elsewhere, before we hear that the prompt is computed
    engine.prefilled()
    await rest(answer)
    await answer.aclose()
    assert engine.released == [session_id]
    assert sessions(role) == (1, 1, 0, 0, 0)
    assert await role.abort_session(session_id) is AbortOutcome.ABORTED
    assert engine.withdrawn == [session_id]


async def test_the_blocks_stay_until_the_transport_says_so() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    session_id = (await handed_over(role, engine)).session.handle.session_id
    assert await role.abort_session(session_id) is AbortOutcome.ABORTED
    assert await role.abort_session(session_id) is AbortOutcome.ALREADY_FINISHED
    await turns()
    assert engine.withdrawn == [session_id]
    assert engine.released == []
    engine.tell(session_id, SessionEvent.TAKEN)  # somebody had begun, and was let finish
    engine.tell(session_id, SessionEvent.FREE)
    await turns()
    assert engine.released == [session_id]
    assert sessions(role) == (0, 1, 0, 0, 1)


async def test_an_unknown_session() -> None:
    role = fake_prefill(FakeEngine())
    with pytest.raises(KvSessionNotFound, match="never seen"):
        await role.abort_session("never seen")


async def test_nobody_came() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine, seconds=0.01)
    session_id = (await handed_over(role, engine)).session.handle.session_id
    async with asyncio.timeout(20):
        while not engine.withdrawn:
            await asyncio.sleep(0.001)
    assert engine.withdrawn == [session_id]
    assert sessions(role) == (0, 1, 0, 1, 0)
    assert await role.abort_session(session_id) is AbortOutcome.ALREADY_FINISHED


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("way", ["close", "abort"])
async def test_who_leaves_before_reading_leaves_nothing_behind(way: str, computed: bool) -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    answer = await role.accept(request(num_sequences=2))
    await turns()
    serials = [one.request_id for one in engine.submitted[0]]
    session_id = engine.submitted[0][0].export
    if computed:
        engine.prefilled()
        await turns()
        assert sessions(role) == (1, 1, 0, 0, 0)
    if way == "close":
        await answer.aclose()
        assert await rest(answer) == []
    else:
        assert await role.abort("r") is AbortOutcome.ABORTED
        if not computed:
            engine.say(*(Finished(serial, FinishReason.CANCELLED, Usage(3, 0, 0)) for serial in serials))
        ends = await rest(answer)
        assert [end.reason for end in ends] == [FinishReason.CANCELLED] * 2
        assert [end.output_index for end in ends] == [0, 1]
        await answer.aclose()
    await turns()
    assert set(engine.aborted) == (set() if computed else set(serials))
    assert set(engine.withdrawn) == {session_id}
    assert sessions(role) == ((0, 1, 0, 0, 1) if computed else (0, 0, 0, 0, 0))
    if not computed:  # the engine was done just then: nobody waits for it, and it hears of that again
        engine.prefilled()
        await turns()
        assert sessions(role) == (0, 0, 0, 0, 0)


async def test_an_abort_that_crosses_the_result_wins() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    answer = await role.accept(request())
    await turns()
    assert await role.abort("r") is AbortOutcome.ABORTED
    session_id = engine.prefilled()
    (end,) = await rest(answer)
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.completion_tokens) == (FinishReason.CANCELLED, 1)
    assert session_id in engine.withdrawn
    assert sessions(role) == (0, 0, 0, 0, 0)
    await answer.aclose()


async def test_an_abort_by_request_finds_the_session_that_was_handed_over() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    ready = await handed_over(role, engine)
    other = await handed_over(role, engine, request(request_id="other"))
    assert await role.abort("r") is AbortOutcome.ABORTED
    assert engine.withdrawn == [ready.session.handle.session_id]
    assert await role.abort("r") is AbortOutcome.ALREADY_FINISHED
    assert await role.abort_all() == 1
    assert engine.withdrawn[-1] == other.session.handle.session_id
    with pytest.raises(RequestNotFound):
        await role.abort("nobody")


async def test_a_session_outlives_the_memory_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.roles.live.REMEMBERED_IDS", 0)
    engine = FakeEngine()
    role = fake_prefill(engine)
    await handed_over(role, engine)
    assert await role.abort("r") is AbortOutcome.ABORTED
    with pytest.raises(RequestNotFound):
        await role.abort("r")


async def test_an_abort_of_everything_counts_each_request_once() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    await handed_over(role, engine, request(request_id="read"))
    unread = await role.accept(request(request_id="unread"))
    running = await role.accept(request(request_id="running"))
    await turns()
    engine.prefilled(1)
    await turns()
    assert await role.abort_all() == 3
    assert sessions(role) == (0, 2, 0, 0, 2)
    assert [end.reason for end in await rest(unread)] == [FinishReason.CANCELLED]
    await unread.aclose()
    await running.aclose()


async def test_an_abort_before_the_engine_has_it() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    answer = await role.accept(request(num_sequences=2))
    assert await role.abort("r") is AbortOutcome.ABORTED
    assert [end.reason for end in await rest(answer)] == [FinishReason.CANCELLED] * 2
    await turns()
    assert engine.submitted == []
    assert engine.withdrawn == []
    await answer.aclose()


async def test_a_failure_of_one_output_takes_the_session_with_it() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    answer = await role.accept(request(num_sequences=2))
    await turns()
    leader, follower = engine.submitted[0]
    engine.say(Failed(follower.request_id, Internal("no")))
    (end,) = await rest(answer)
    assert isinstance(end, Failed)
    assert leader.request_id in engine.aborted
    assert engine.withdrawn == [leader.export]
    engine.prefilled()  # the leader was done just then
    await turns()
    assert sessions(role) == (0, 0, 0, 0, 0)
    await answer.aclose()


# -- the end of the engine ---------------------------------------------------------------------------------------------


async def test_a_drain_waits_for_sessions_too() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    session_id = (await handed_over(role, engine)).session.handle.session_id
    draining = asyncio.create_task(role.drain(60))
    await turns()
    assert not draining.done()
    engine.tell(session_id, SessionEvent.TAKEN)
    await draining
    assert engine.withdrawn == []


async def test_a_drain_does_not_wait_for_an_engine_that_has_failed() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    session_id = (await handed_over(role, engine)).session.handle.session_id
    engine.failure = Internal("no")
    await role.drain(3600)
    assert engine.withdrawn == [session_id]


async def test_a_drain_withdraws_what_nobody_took() -> None:
    engine = FakeEngine()
    role = fake_prefill(engine)
    read = await handed_over(role, engine)
    unread = await role.accept(request(request_id="unread"))
    running = await role.accept(request(request_id="running"))
    await turns()
    engine.prefilled(1)
    await turns()
    await role.drain(0)
    for answer in (unread, running):
        (end,) = await rest(answer)
        assert isinstance(end, Failed)
        assert isinstance(end.error, Draining)
        await answer.aclose()
    names = [group[0].export for group in engine.submitted]
    assert names[0] == read.session.handle.session_id
    assert sorted(engine.withdrawn) == sorted(names)
    assert sessions(role) == (0, 2, 0, 0, 2)
