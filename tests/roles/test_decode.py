"""The decode role over an engine that the test plays: which sessions are taken, and when a caller hears of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.roles.fake_engine import LAYOUT, FakeEngine, fake_both, fake_decode, fake_role
from tests.roles.fake_sessions import BLUE, MARKER, RED, folded, going_on, media, plan_of, session
from triptych.core.adapter import AdapterInfo
from triptych.core.errors import (
    AdapterNotFound,
    Cancelled,
    Draining,
    DuplicateRequest,
    InvalidRequest,
    KvSessionNotFound,
    KvTransferFailed,
    MediaError,
    Overloaded,
    PromptTooLong,
    RoleMismatch,
    SessionMismatch,
    UnsupportedFeature,
)
from triptych.core.events import Admitted, Failed, Finished, FinishReason, Tokens, Usage
from triptych.core.logprobs import CandidateColumns, LogprobOptions, TokenLogprob, TopN, WholeVocabulary
from triptych.core.media import DataUri, MediaItem, Modality
from triptych.core.media_options import OptionLayer, PictureLayer
from triptych.core.request import CacheOptions, GenerateRequest, Sampling, Stopping, derived_seed
from triptych.core.session import FirstToken, KvSession, SealedSession
from triptych.roles.contract import AbortOutcome

if TYPE_CHECKING:
    from triptych.core.plan import PromptPlan
    from triptych.core.request import Request
    from triptych.roles.contract import Answer
    from triptych.roles.desk import Desk

NOTHING_DONE = {"image_loads": 0, "clip_loads": 0, "preprocess_calls": 0, "tokenisations": 0}


async def turns(count: int = 8) -> None:
    """Let everything happen that can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until_submitted(engine: FakeEngine, task: asyncio.Task[Answer]) -> tuple[Request, ...]:
    async with asyncio.timeout(20):
        while not engine.submitted:
            if task.done():
                await task
            await asyncio.sleep(0.001)
    return engine.submitted[-1]


async def admitted(role: Desk, engine: FakeEngine, request: GenerateRequest) -> Answer:
    """The answer to a request, for which there was room."""
    task = asyncio.create_task(role.accept(request))
    for one in await until_submitted(engine, task):
        engine.say(Admitted(one.request_id))
    return await task


async def refused(role: Desk, engine: FakeEngine, request: GenerateRequest, error: type[Exception], match: str) -> None:
    """Before acceptance, and nothing is held: the very same id is free."""
    with pytest.raises(error, match=match) as caught:
        await role.accept(request)
    assert "\n" not in str(caught.value)
    assert engine.submitted == []
    assert role.load().queued_requests == 0
    assert role.statistics()["media_admission"]["shares_in_use"] == 0


# -- with a plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pictures", [(), (RED,), (RED, BLUE)])
@pytest.mark.parametrize("form", ["folded", "expanded", "text", "with media"])
async def test_nothing_is_opened_or_tokenised(form: str, pictures: tuple[bytes, ...]) -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    plan = plan_of(*pictures)
    request = going_on(session(plan), *pictures)
    if form == "expanded":
        request = replace(request, prompt=tuple(plan.token_ids.tolist()))
    elif form == "text":
        request = replace(request, prompt=MARKER * len(pictures) + "hello there")
    elif form == "with media":  # not even looked at
        broken = tuple(MediaItem(Modality.IMAGE, DataUri("data:,junk")) for _ in pictures)
        request = replace(request, media=broken)
    answer = await admitted(role, engine, request)
    ((one,),) = engine.submitted
    assert one.plan is plan
    assert one.inputs == ()
    assert one.positions.table.shape[1] == len(plan)
    assert one.resume.handle is request.session.handle
    assert (one.resume.token_id, one.resume.logprob, one.resume.cached_prompt_tokens) == (70, None, 16)
    assert role.statistics()["intake"] == NOTHING_DONE
    assert role.statistics()["media_admission"]["admitted"] == 0
    await answer.aclose()


async def test_many_requests_and_still_nothing_is_done() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    plans = [plan_of(), plan_of(RED), plan_of(RED, BLUE)]
    for number in range(300):
        one = session(plans[number % 3])
        answer = await admitted(role, engine, going_on(one, *(RED, BLUE)[: number % 3], request_id=f"{number}"))
        await answer.aclose()
        engine.submitted.clear()
    assert role.statistics()["intake"] == NOTHING_DONE
    assert role.load().queued_requests == 0


async def test_positions_follow_from_the_plan() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    plan = plan_of(RED)
    answer = await admitted(role, engine, going_on(session(plan), RED))
    expected = role._intake.frontend.processor.positions(plan)
    got = engine.submitted[0][0].positions
    assert np.array_equal(got.table, expected.table)
    assert got.delta == expected.delta != 0
    await answer.aclose()


async def test_outputs_go_on_from_their_own_tokens_with_the_sessions_seed() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    answer = await admitted(role, engine, going_on(session(plan_of(), outputs=3)))
    (group,) = engine.submitted
    assert [one.resume.token_id for one in group] == [70, 71, 72]
    assert [one.sampling.seed for one in group] == [derived_seed(99, index) for index in range(3)]
    assert len({id(one.resume.handle) for one in group}) == 1
    await answer.aclose()


async def test_the_answer_is_like_any_other() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    answer = await admitted(role, engine, going_on(session(plan_of(), first=(FirstToken(75),)), stopping=Stopping()))
    serial = engine.submitted[0][0].request_id
    engine.say(Tokens(serial, (75,)), Tokens(serial, (76,)))
    engine.say(Finished(serial, FinishReason.LENGTH, Usage(5, 2, 16)))
    events = [event async for event in answer]
    assert [event.token_ids for event in events if isinstance(event, Tokens)] == [(75, 76)]
    assert events[-1].usage == Usage(5, 2, 16)
    assert {event.request_id for event in events} == {"r"}
    await answer.aclose()


async def test_what_ended_there_is_decided_here() -> None:
    """The prefill engine was told max_tokens = 1, and perhaps other stop ids: its opinion is not asked."""
    engine = FakeEngine()
    role = fake_decode(engine)
    first = FirstToken(70, None, FinishReason.LENGTH)
    stopping = Stopping(max_tokens=9, min_tokens=2, stop_token_ids=(70,))
    answer = await admitted(role, engine, going_on(session(plan_of(), first=(first,)), stopping=stopping))
    assert engine.submitted[0][0].stopping == stopping
    await answer.aclose()


@pytest.mark.parametrize("asked", [LogprobOptions(), LogprobOptions(output=True)])
async def test_as_many_log_probabilities_as_are_asked_for(asked: LogprobOptions) -> None:
    columns = CandidateColumns(np.array([5], np.int32), np.array([-1], np.float32), np.array([1], np.int32))
    first = FirstToken(70, TokenLogprob(-2.0, 7, columns))
    engine = FakeEngine()
    role = fake_decode(engine)
    answer = await admitted(role, engine, going_on(session(plan_of(), first=(first,)), logprobs=asked))
    got = engine.submitted[0][0].resume.logprob
    if asked.output:
        assert (got.logprob, got.rank, got.candidates) == (-2.0, 7, None)
    else:
        assert got is None
    await answer.aclose()


async def test_the_prompts_log_probabilities_were_sent_before() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    asked = LogprobOptions(prompt=True, prompt_candidates=TopN(3), prompt_start=1)
    answer = await admitted(role, engine, going_on(session(plan_of()), logprobs=asked))
    assert engine.submitted[0][0].logprobs == LogprobOptions()
    await answer.aclose()


# -- without a plan ----------------------------------------------------------------------------------------------------


async def plan_elsewhere(request: GenerateRequest, **parts: Any) -> PromptPlan:
    """As an engine that opens media makes it."""
    engine = FakeEngine()
    answer = await fake_role(engine, vocab_size=2048, **parts).accept(replace(request, session=None))
    while not engine.submitted:
        await asyncio.sleep(0.001)
    await answer.aclose()
    return engine.submitted[0][0].plan


def planless(plan: PromptPlan) -> KvSession:
    return replace(session(plan), plan=None)


async def test_without_a_plan_it_is_prepared_here_where_that_can_be() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    asked = going_on(session(plan_of()), RED, media=media(RED))
    plan = await plan_elsewhere(asked)
    answer = await admitted(role, engine, replace(asked, session=planless(plan)))
    ((one,),) = engine.submitted
    assert np.array_equal(one.plan.token_ids, plan.token_ids)
    assert one.inputs == ()  # nobody could encode them here, and nobody needs to
    assert role.statistics()["intake"] == {"image_loads": 1, "clip_loads": 0, "preprocess_calls": 1, "tokenisations": 0}
    await answer.aclose()
    engine.submitted.clear()
    answer = await admitted(role, engine, going_on(planless(plan_of())))
    await answer.aclose()


GREY = OptionLayer(image=PictureLayer(background=(128, 128, 128)))
UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "server": ({"server": GREY}, {}),
    "request": ({}, {"media_options": GREY}),
    "picture": ({}, {"media": media(BLUE)}),
    "salt": ({}, {"cache": CacheOptions(salt="s")}),
    "text": ({}, {"prompt": (*folded(RED)[:-1], 70)}),
}


@pytest.mark.parametrize("name", UNLIKE)
async def test_without_a_plan_the_prompt_must_become_the_very_same(name: str) -> None:
    """Though it is as long: engines whose options differ read a picture otherwise."""
    parts, changes = UNLIKE[name]
    asked = going_on(session(plan_of()), RED, media=media(RED))
    plan = await plan_elsewhere(replace(asked, **changes), **parts)
    assert len(plan) == len(await plan_elsewhere(asked))
    engine = FakeEngine()
    role = fake_decode(engine)
    match = r"prepared again, is another one \(digest .* the same --media-options"
    await refused(role, engine, replace(asked, session=planless(plan)), SessionMismatch, match)
    answer = await admitted(role, engine, replace(asked, session=session(plan), prompt=MARKER + "hello there"))
    await answer.aclose()  # with its plan nothing is read here, and nothing can differ


async def test_without_a_plan_and_without_its_media() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    await refused(role, engine, going_on(session(None, tokens=40), RED), InvalidRequest, "placeholder")


async def test_without_a_plan_and_with_a_broken_picture() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    request = going_on(session(None, tokens=40), RED, media=media(b"junk"))
    await refused(role, engine, request, MediaError, "media item 0")


async def test_without_a_plan_the_prompt_must_fill_the_blocks() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    await refused(role, engine, going_on(session(None, tokens=17)), InvalidRequest, "2 KV blocks.* fill 1")


# -- what is refused, in this order ------------------------------------------------------------------------------------

LOGPROBS = LogprobOptions(output=True, output_candidates=TopN(2))


def _narrow(one: KvSession) -> KvSession:
    return replace(one, handle=replace(one.handle, layout=replace(LAYOUT, layers=3, dtype="bfloat16")))


REFUSALS = {
    "layout": (_narrow, {}, SessionMismatch, r"layers: 2 against 3, dtype: float32 against bfloat16"),
    "model": (lambda s: replace(s, model=bytes(32)), {}, SessionMismatch, "other weights"),
    "adapter": (lambda s: replace(s, adapter=b"x" * 32), {}, SessionMismatch, "another LoRA adapter.*of none here"),
    "expired": (lambda s: replace(s, expires_unix_nanos=time.time_ns() - 1), {}, KvSessionNotFound, r"expired \d"),
    "outputs": (lambda s: s, {"num_sequences": 2}, InvalidRequest, r"1 output\(s\), and num_sequences is 2"),
    "first": (
        lambda s: replace(s, first=(FirstToken(2048),)),
        {},
        InvalidRequest,
        "output 0 begins with token id 2048",
    ),
    "logprobs": (lambda s: s, {"logprobs": LOGPROBS}, InvalidRequest, "output 0 begins without the log prob"),
    "whole": (
        lambda s: replace(s, first=(FirstToken(70, TokenLogprob(-1.0, 1)),)),
        {
            "logprobs": LogprobOptions(output=True, output_candidates=WholeVocabulary()),
            "stopping": Stopping(max_tokens=1),
        },
        InvalidRequest,
        "begins without",
    ),
    "fingerprint": (
        lambda s: replace(s, plan=replace(s.plan, fingerprint=bytes(32))),
        {},
        SessionMismatch,
        "processor settings",
    ),
    "blocks": (lambda s: replace(s, handle=replace(s.handle, blocks=2)), {}, InvalidRequest, "2 KV blocks"),
    "prompt": (lambda s: s, {"prompt": (5, 6, 7)}, InvalidRequest, "another prompt: token_ids has 3 tokens"),
    "media": (lambda s: s, {"media": media(RED)}, InvalidRequest, r"1 media item\(s\)"),
    "length": (lambda s: s, {"stopping": Stopping(min_tokens=399)}, PromptTooLong, "min_tokens"),
    "name": (lambda s: s, {"lora_name": "nobody"}, UnsupportedFeature, "--max-loras"),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_refused_before_anything_is_held(name: str) -> None:
    change, changes, error, match = REFUSALS[name]
    engine = FakeEngine()
    role = fake_decode(engine)
    await refused(role, engine, going_on(change(session(plan_of())), **changes), error, match)
    assert role.statistics()["intake"] == NOTHING_DONE
    answer = await admitted(role, engine, going_on(session(plan_of())))
    await answer.aclose()


async def test_the_order_of_the_checks() -> None:
    """What is wrong with the engines is said before what is wrong with the request."""
    engine = FakeEngine()
    role = fake_decode(engine)
    wrong = replace(
        _narrow(session(plan_of(), outputs=2)),
        model=bytes(32),
        adapter=b"x" * 32,
        expires_unix_nanos=0,
        plan=plan_of(RED),
    )
    request = going_on(wrong, num_sequences=1)
    for error, match, repair in (
        (SessionMismatch, "layout", lambda s: replace(s, handle=replace(s.handle, layout=LAYOUT))),
        (SessionMismatch, "weights", lambda s: replace(s, model=session(None, tokens=1).model)),
        (SessionMismatch, "adapter", lambda s: replace(s, adapter=b"")),
        (KvSessionNotFound, "expired", lambda s: replace(s, expires_unix_nanos=2**63)),
        (InvalidRequest, "first tokens", lambda s: replace(s, first=s.first[:1])),
        (InvalidRequest, "another prompt", lambda s: replace(s, plan=plan_of())),
    ):
        await refused(role, engine, request, error, match)
        request = replace(request, session=repair(request.session))
    answer = await admitted(role, engine, request)
    await answer.aclose()


async def test_both_legs_at_once_are_neither() -> None:
    with pytest.raises(InvalidRequest, match="not both"):
        going_on(session(plan_of()), handoff=True)


async def test_the_adapter_must_be_the_same_one() -> None:
    class Loaded:
        def __init__(self, info: AdapterInfo) -> None:
            self.info, self.digest = info, info.name.encode() * 16

    engine = FakeEngine()
    role = fake_decode(engine, read=Loaded)
    await role.load_adapter(AdapterInfo(1, "ab", "/adapters/ab"))
    one = session(plan_of(), adapter=b"ab" * 16)
    await refused(role, engine, going_on(one), SessionMismatch, "of none here, 6162")
    await refused(role, engine, going_on(one, lora_name="cd"), AdapterNotFound, "cd")
    answer = await admitted(role, engine, going_on(one, lora_name="ab"))
    assert engine.submitted[0][0].adapter.info.name == "ab"
    await answer.aclose()


# -- admission ---------------------------------------------------------------------------------------------------------


async def test_a_caller_hears_of_it_when_there_is_room() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    task = asyncio.create_task(role.accept(going_on(session(plan_of()))))
    (one,) = await until_submitted(engine, task)
    await turns()
    assert not task.done()
    with pytest.raises(DuplicateRequest):
        await role.accept(going_on(session(plan_of())))
    engine.say(Admitted(one.request_id))
    await (await task).aclose()


@pytest.mark.parametrize("error", [Overloaded("no blocks"), KvSessionNotFound("gone")])
async def test_no_room_is_said_before_acceptance(error: Exception) -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    task = asyncio.create_task(role.accept(going_on(session(plan_of(), outputs=2))))
    group = await until_submitted(engine, task)
    engine.say(*(Failed(one.request_id, error) for one in group))
    with pytest.raises(type(error)):
        await task
    assert await role.abort("r") is AbortOutcome.ALREADY_FINISHED
    engine.submitted.clear()
    await (await admitted(role, engine, going_on(session(plan_of())))).aclose()


@pytest.mark.parametrize("error", [KvSessionNotFound("gone"), KvTransferFailed("lost")])
async def test_what_goes_wrong_later_is_an_event(error: Exception) -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    answer = await admitted(role, engine, going_on(session(plan_of())))
    engine.say(Failed(engine.submitted[0][0].request_id, error))
    (event,) = [event async for event in answer]
    assert isinstance(event, Failed)
    assert event.error is error
    await answer.aclose()


async def test_who_leaves_while_waiting_for_room_leaves_nothing_behind() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    task = asyncio.create_task(role.accept(going_on(session(plan_of(), outputs=2))))
    group = await until_submitted(engine, task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted == [one.request_id for one in group]
    engine.say(*(Admitted(one.request_id) for one in group))  # it had just been admitted
    await turns()
    assert role.load().queued_requests == len(group)  # the fake engine's own count; none is being prepared
    engine.submitted.clear()
    await (await admitted(role, engine, going_on(session(plan_of())))).aclose()


async def test_who_leaves_while_pictures_are_prepared() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    request = going_on(session(None, tokens=40), RED, media=media(RED))
    task = asyncio.create_task(role.accept(request))
    await turns(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(20):
        while role.statistics()["media_admission"]["shares_in_use"]:
            await asyncio.sleep(0.001)
    await turns()
    assert engine.submitted == []
    assert role.load().queued_requests == 0


async def test_an_abort_while_waiting_for_room() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    task = asyncio.create_task(role.accept(going_on(session(plan_of()))))
    (one,) = await until_submitted(engine, task)
    assert await role.abort("r") is AbortOutcome.ABORTED
    assert engine.aborted == [one.request_id]
    engine.say(Finished(one.request_id, FinishReason.CANCELLED, Usage(5, 0, 16)))
    with pytest.raises(Cancelled):
        await task


async def test_a_drain_ends_those_who_wait_for_room() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    task = asyncio.create_task(role.accept(going_on(session(plan_of()))))
    await until_submitted(engine, task)
    await role.drain(0)
    with pytest.raises(Draining):
        await task


# -- without a session -------------------------------------------------------------------------------------------------


async def test_without_a_session_a_request_is_run_whole() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    answer = await role.accept(GenerateRequest("r", "demo", "hello", sampling=Sampling(temperature=0)))
    await turns()
    ((one,),) = engine.submitted
    assert one.resume is one.export is None
    engine.answer()
    assert isinstance([event async for event in answer][-1], Finished)
    await answer.aclose()


async def test_pictures_without_a_session_are_sent_elsewhere() -> None:
    engine = FakeEngine()
    role = fake_decode(engine)
    request = GenerateRequest("r", "demo", MARKER, media=media(RED))
    await refused(role, engine, request, RoleMismatch, "aggregated engine.*prefill engine")
    await refused(role, engine, GenerateRequest("r", "demo", "hello", handoff=True), RoleMismatch, "prefill engine")


async def test_an_aggregated_engine_goes_on_where_it_can() -> None:
    engine = FakeEngine()
    role = fake_both(engine)
    answer = await admitted(role, engine, going_on(session(plan_of(RED)), RED))
    await answer.aclose()
    engine.submitted.clear()
    await refused(fake_role(engine), engine, going_on(session(plan_of())), UnsupportedFeature, "kv.session")


async def test_a_session_that_nobody_has_read_is_not_taken_for_one() -> None:
    engine = FakeEngine()
    request = going_on(session(plan_of()), session=SealedSession("s", b""))
    await refused(fake_decode(engine), engine, request, UnsupportedFeature, "kv.session")
