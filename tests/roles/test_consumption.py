"""Requests with encoder outputs, over an engine that the test plays: what is refused, what is taken, what is spent."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.drawings import shape_png
from tests.roles.fake_engine import CONTEXT, FakeEngine, fake_both, fake_decode, fake_role, frontend
from tests.roles.fake_sessions import BLUE, MARKER, RED, folded, going_on, media, plan_of, session
from tests.roles.row_fakes import (
    LAYOUT,
    ROW_BYTES,
    Encoder,
    Held,
    consumer,
    layout_of,
    numbers,
    reference,
    terms,
    until,
    with_references,
)
from triptych.core.encoded import SealedReference
from triptych.core.encoder_input import EncodedInput
from triptych.core.errors import (
    Draining,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PlaceholderMismatch,
    PromptTooLong,
    ReferenceMismatch,
    ReferenceNotFound,
    RoleMismatch,
    UnsupportedFeature,
)
from triptych.core.events import Admitted, Failed, Finished, FinishReason, PrefillReady, is_terminal
from triptych.core.guide import Guide, GuideKind
from triptych.core.logprobs import LogprobOptions, WholeVocabulary
from triptych.core.request import EncodeOptions, GenerateRequest, Stopping
from triptych.roles.contract import AbortOutcome, HealthState, RoleName
from triptych.roles.row_intake import Landing, RowIntake, RowLimits
from triptych.transport.contract import FetchOutcome

if TYPE_CHECKING:
    from triptych.core.events import Event
    from triptych.core.request import Request
    from triptych.roles.contract import Answer
    from triptych.roles.desk import Desk

NOTHING_DONE = {"image_loads": 0, "clip_loads": 0, "preprocess_calls": 0, "tokenisations": 0}
ROLES = (RoleName.AGGREGATED, RoleName.PREFILL)


async def turns(count: int = 8) -> None:
    """Let everything happen that can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def rest(answer: Answer) -> list[Event]:
    events = [event async for event in answer]
    assert [is_terminal(event) for event in events[:-1]] == [False] * (len(events) - 1)
    await answer.aclose()
    return events


async def failed(answer: Answer) -> Failed:
    (event,) = await rest(answer)
    assert isinstance(event, Failed)
    assert "\n" not in str(event.error)
    return event


async def submitted(engine: FakeEngine, groups: int = 1) -> tuple[Request, ...]:
    await until(lambda: len(engine.submitted) >= groups)
    return engine.submitted[groups - 1]


def over_memory(encoder: Encoder, *, blocks: int = 12, **changes: Any) -> RowIntake:
    landing = Landing.of(blocks * LAYOUT.block_bytes, LAYOUT)
    return RowIntake(terms(blocks=blocks, **changes), landing, encoder.fetcher(landing))


def nothing_held(role: Desk, rows: RowIntake) -> bool:
    now = rows.statistics()
    held = [now[name] for name in ("waiting", "fetching", "held_bytes", "quarantined_bytes")]
    return not any(held) and role._live.preparing == 0


# -- what the engine gets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("pictures", [(RED,), (RED, BLUE), (BLUE, RED, BLUE)])
async def test_a_prompt_is_planned_as_if_its_pictures_were_here(pictures: tuple[bytes, ...], role: RoleName) -> None:
    """Nothing is opened for it, and nothing is tokenised."""
    engine, encoder = FakeEngine(), Encoder()
    rows = over_memory(encoder)
    desk = consumer(engine, rows, role=role, requires_rows=True)
    plan = plan_of(*pictures)
    layouts = [replace(item, runs=(item.runs[0]._replace(start=0),)) for item in plan.items]
    given = [encoder.encode(layout) for layout in layouts]
    answer = await desk.accept(with_references(*given, num_sequences=2))
    group = await submitted(engine)
    assert len(group) == 2
    for one in group:
        assert one.plan.token_ids.tolist() == plan.token_ids.tolist()
        assert one.plan.items == plan.items
        assert one.plan.fingerprint == plan.fingerprint
        assert one.positions.table.tolist() == frontend().processor.positions(plan).table.tolist()
        assert one.inputs is group[0].inputs
    for own, item, layout in zip(group[0].inputs, plan.items, layouts, strict=True):
        assert isinstance(own, EncodedInput)
        assert own.layout == item
        assert own.rows.shape == (item.rows, ROW_BYTES)
        assert own.rows.tobytes() == numbers(layout).tobytes()
    assert desk.statistics()["intake"] == NOTHING_DONE
    assert desk.statistics()["media_admission"]["admitted"] == 0
    assert desk.statistics()["row_intake"]["taken"] == len(pictures)
    assert not any(encoder.waits(one) for one in given)
    await answer.aclose()
    assert nothing_held(desk, rows)


async def test_a_prompt_may_come_as_text() -> None:
    engine, encoder = FakeEngine(), Encoder()
    desk = consumer(engine, over_memory(encoder))
    asked = with_references(encoder.encode(layout_of()), prompt=MARKER + "hello there")
    answer = await desk.accept(asked)
    (one,) = await submitted(engine)
    assert one.plan.token_ids.tolist() == [
        token_id
        for marker in folded(RED)
        for token_id in [marker] * (16 if marker == frontend().model.image_token_id else 1)
    ]
    assert desk.statistics()["intake"] == NOTHING_DONE | {"tokenisations": 1}
    await answer.aclose()


async def test_many_requests_and_still_nothing_is_opened() -> None:
    engine, encoder = FakeEngine(), Encoder()
    rows = over_memory(encoder)
    desk = consumer(engine, rows, role=RoleName.PREFILL)
    for number in range(200):
        given = [encoder.encode(layout_of(2, 2, number + key)) for key in range(number % 4)]
        answer = await desk.accept(with_references(*given, request_id=f"{number}"))
        await submitted(engine)
        await answer.aclose()
        engine.submitted.clear()
    assert desk.statistics()["intake"] == NOTHING_DONE
    assert desk.statistics()["row_intake"]["taken"] == 50 * (1 + 2 + 3)
    assert nothing_held(desk, rows)


async def test_the_same_picture_twice_is_two_outputs() -> None:
    engine, encoder = FakeEngine(), Encoder()
    desk = consumer(engine, over_memory(encoder))
    given = encoder.encode(layout_of()), encoder.encode(layout_of())
    answer = await desk.accept(with_references(*given))
    (one,) = await submitted(engine)
    assert one.plan.items[0].content_key == one.plan.items[1].content_key
    assert one.inputs[0].rows.tobytes() == one.inputs[1].rows.tobytes()
    assert not any(encoder.waits(each) for each in given)
    await answer.aclose()


async def test_media_and_text_go_their_own_ways() -> None:
    """Where there is an encoder; the rows of others are no concern of theirs."""
    engine = FakeEngine()
    held = Held.of(blocks=1)
    desk = consumer(engine, held.rows)
    full = held.rows.line_up([reference()])
    waiting = held.rows.line_up([reference()])
    for number, asked in enumerate(
        (GenerateRequest("t", "demo", "hello"), GenerateRequest("m", "demo", folded(RED), media=media(RED)))
    ):
        answer = await desk.accept(asked)
        await submitted(engine, number + 1)
        await answer.aclose()
    assert desk.statistics()["intake"] == {"image_loads": 1, "clip_loads": 0, "preprocess_calls": 1, "tokenisations": 1}
    full.give_up()
    waiting.give_up()


async def test_the_time_of_taking_is_a_stage_of_its_own() -> None:
    engine, held = FakeEngine(), Held.of()
    desk = consumer(engine, held.rows)
    answer = await desk.accept(with_references(reference()))
    await turns()
    assert engine.submitted == []
    held.fetcher.begun[0].finish(numbers(layout_of()))
    (one,) = await submitted(engine)
    engine.answer()
    finished = (await rest(answer))[-1]
    assert isinstance(finished, Finished)
    prepare, rows = finished.spans
    assert (prepare.name, rows.name) == ("prepare", "rows")
    assert prepare.start <= prepare.end == rows.start < rows.end
    assert abs(rows.end - time.time()) < 100
    assert one.arrival > 0


async def test_a_session_tells_of_it_too() -> None:
    engine, encoder = FakeEngine(), Encoder()
    desk = consumer(engine, over_memory(encoder), role=RoleName.PREFILL)
    answer = await desk.accept(with_references(encoder.encode(layout_of())))
    await submitted(engine)
    engine.prefilled()
    (ready,) = await rest(answer)
    assert isinstance(ready, PrefillReady)
    assert [span.name for span in ready.spans] == ["prepare", "rows"]
    assert [item.rows for item in ready.session.plan.items] == [16]  # the decode engine needs nothing else


# -- what is refused before acceptance, and costs no reference ---------------------------------------------------------


async def refused(desk: Desk, encoder: Encoder, asked: GenerateRequest, error: type[Exception], match: str) -> None:
    """Nothing is held, and what could be taken before can be taken still."""
    waiting = set(encoder.exchange.sessions)
    with pytest.raises(error, match=match) as caught:
        await desk.accept(asked)
    assert "\n" not in str(caught.value)
    assert set(encoder.exchange.sessions) == waiting
    assert desk.load().queued_requests == 0
    assert desk.statistics().get("row_intake", {}).get("held_bytes", 0) == 0


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "model": ({"model": "nobody"}, ModelNotFound, "nobody"),
    "too few markers": ({"prompt": folded(RED)}, PlaceholderMismatch, r"2 image item\(s\) .* 1 image placeholder"),
    "too many markers": ({"prompt": folded(RED, RED, RED)}, PlaceholderMismatch, r"2 image item\(s\) .* 3 image"),
    "no text for them": ({"prompt": "hello"}, PlaceholderMismatch, r"2 image item\(s\) .* 0 image"),
    "vocabulary": ({"prompt": (*folded(RED, RED), 5000)}, InvalidRequest, "token id 5000"),
    "min_tokens": (
        {"stopping": Stopping(min_tokens=CONTEXT - 30)},
        PromptTooLong,
        r"the prompt has \d+ tokens and min",
    ),
    "start of log probabilities": (
        {"logprobs": LogprobOptions(prompt=True, prompt_start=300)},
        InvalidRequest,
        "prompt_logprob_start is 300 but the prompt has only",
    ),
    "guide": ({"guide": Guide(GuideKind.JSON_OBJECT)}, UnsupportedFeature, "guided"),
    "outputs": ({"num_sequences": 9}, InvalidRequest, "num_sequences is 9"),
    "encoder": ({"encode": EncodeOptions(), "references": ()}, RoleMismatch, "ask an encoder engine"),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", REFUSALS)
async def test_a_refusal_costs_no_reference(name: str, role: RoleName) -> None:
    changes, error, match = REFUSALS[name]
    engine, encoder = FakeEngine(), Encoder()
    desk = consumer(engine, over_memory(encoder), role=role)
    given = encoder.encode(layout_of(key=1)), encoder.encode(layout_of(key=2))
    await refused(desk, encoder, with_references(*given, **changes), error, match)
    answer = await desk.accept(with_references(*given))  # the very same
    await submitted(engine)
    await answer.aclose()


async def test_what_is_wrong_with_a_reference_is_said_before_acceptance() -> None:
    engine, encoder = FakeEngine(), Encoder()
    desk = consumer(engine, over_memory(encoder))
    good = encoder.encode(layout_of(key=1))
    other = encoder.encode(layout_of(key=2))
    expired = replace(other, expires_unix_nanos=1)
    foreign = replace(other, fingerprint=bytes(32))
    await refused(desk, encoder, with_references(good, expired), ReferenceNotFound, "media item 1: .* expired")
    await refused(desk, encoder, with_references(good, foreign), ReferenceMismatch, r"media item 1: .* \(fingerprint")
    await refused(desk, encoder, with_references(good, good), InvalidRequest, "media item 1: its reference .* item 0")
    sealed = with_references(good, SealedReference("rows", b"x"))
    await refused(desk, encoder, sealed, UnsupportedFeature, "media item 1: encoder_cache")
    state = replace(other.item, handle=replace(other.item.handle, state=b"x"))
    await refused(desk, encoder, with_references(good, replace(other, item=state)), InvalidRequest, "media item 1: ")


async def test_an_expanded_prompt_that_is_too_long_is_never_made() -> None:
    """The reference may claim what it likes: it is counted, not allocated."""
    encoder = Encoder()
    desk = consumer(FakeEngine(), over_memory(encoder, blocks=2**20, cache_bytes=2**60))
    huge = reference(layout_of(2**12, 2**12))
    asked = with_references(huge)
    await refused(desk, encoder, asked, PromptTooLong, rf"the prompt has {2**24 + len(folded(RED)) - 1} tokens")


async def test_the_prompts_log_probabilities_are_counted_as_they_will_be() -> None:
    encoder = Encoder()
    desk = consumer(FakeEngine(), over_memory(encoder))
    one = encoder.encode(layout_of(16, 12))
    behind = LogprobOptions(prompt=True, prompt_start=len(folded(RED)) + 192)
    await refused(desk, encoder, with_references(one, logprobs=behind), InvalidRequest, "has only .* tokens")
    last = replace(behind, prompt_start=behind.prompt_start - 2)
    answer = await desk.accept(with_references(one, logprobs=last))
    await answer.aclose()


async def test_log_probabilities_are_counted_before_anything_is_taken() -> None:
    encoder = Encoder()
    desk = consumer(FakeEngine(), over_memory(encoder), max_outputs=16)
    every = LogprobOptions(output=True, output_candidates=WholeVocabulary())
    asked = with_references(
        encoder.encode(layout_of()), logprobs=every, num_sequences=16, stopping=Stopping(max_tokens=300)
    )
    await refused(desk, encoder, asked, InvalidRequest, r"16 outputs of up to 300 tokens with 2049 each")


async def test_more_items_than_a_request_may_have() -> None:
    encoder = Encoder()
    desk = consumer(FakeEngine(), over_memory(encoder, blocks=100))
    many = [reference(layout_of(1, 1, key)) for key in range(65)]
    await refused(desk, encoder, with_references(*many), InvalidRequest, r"65 media items; at most 64 \(--max-items\)")


async def test_a_line_that_is_full_refuses() -> None:
    engine, held = FakeEngine(), Held.of(blocks=1, limits=RowLimits(max_waiting=1))
    desk = consumer(engine, held.rows)
    answers = [await desk.accept(with_references(reference(), request_id=f"{number}")) for number in range(2)]
    with pytest.raises(Overloaded, match="--encoder-quota"):
        await desk.accept(with_references(reference(), request_id="2"))
    assert desk.load().queued_requests == 2
    for answer in answers:
        await answer.aclose()
    held.fetcher.begun[0].end(FetchOutcome.CANCELLED)
    await until(lambda: nothing_held(desk, held.rows))


# -- who takes what ----------------------------------------------------------------------------------------------------


async def test_media_where_there_is_no_encoder_are_shown_the_way() -> None:
    encoder = Encoder()
    desk = consumer(FakeEngine(), over_memory(encoder), requires_rows=True)
    asked = GenerateRequest("r", "demo", folded(RED), media=media(RED))
    match = r"1 media item\(s\) without encoder_cache: .* to an encoder engine first, and its references here"
    await refused(desk, encoder, asked, RoleMismatch, match)


async def test_text_where_there_is_no_encoder_is_as_anywhere() -> None:
    engine = FakeEngine()
    desk = consumer(engine, over_memory(Encoder()), requires_rows=True)
    answer = await desk.accept(GenerateRequest("r", "demo", "hello"))
    await submitted(engine)
    await answer.aclose()


async def test_an_engine_that_takes_no_rows_says_so() -> None:
    encoder = Encoder()
    asked = with_references(encoder.encode(layout_of()))
    for desk in (consumer(FakeEngine(), None), fake_role(FakeEngine())):
        await refused(desk, encoder, asked, UnsupportedFeature, "encoder_cache: this engine takes no encoder outputs")
        assert "row_intake" not in desk.statistics()
        assert [check.name for check in await desk.health(probe=False)] == ["scheduler", "model"]


async def test_a_decode_engine_has_no_use_for_them() -> None:
    encoder = Encoder()
    one = encoder.encode(layout_of())
    desk = fake_decode(FakeEngine())
    await refused(
        desk, encoder, with_references(one), RoleMismatch, "encoder_cache without kv.session: a decode engine"
    )
    asked = replace(with_references(), encode=EncodeOptions())
    await refused(desk, encoder, asked, RoleMismatch, "ask an encoder engine")
    bare = going_on(session(None, tokens=40), RED, references=(one,))
    await refused(desk, encoder, bare, UnsupportedFeature, "encoder_cache: the session has no plan")


@pytest.mark.parametrize("takes_rows", [False, True])
async def test_a_session_needs_none_and_spends_none(takes_rows: bool) -> None:
    """Of a prompt that is computed already nothing is needed, whatever comes with it."""
    engine, encoder = FakeEngine(), Encoder()
    desk = fake_both(engine) if takes_rows else fake_decode(engine)
    if takes_rows:
        desk._intake.rows = over_memory(encoder)
    one = encoder.encode(layout_of())
    accepting = asyncio.create_task(desk.accept(going_on(session(plan_of(RED)), RED, references=(one,))))
    (request,) = await submitted(engine)
    engine.say(Admitted(request.request_id))
    answer = await accepting
    assert request.inputs == ()
    assert encoder.waits(one)
    await answer.aclose()


# -- whoever leaves, and what fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("how", ["abort", "abort all", "leave"])
@pytest.mark.parametrize("stage", ["waiting", "fetching"])
async def test_whoever_leaves_is_let_go_at_once(stage: str, how: str, role: RoleName) -> None:
    engine, held = FakeEngine(), Held.of(blocks=1)
    desk = consumer(engine, held.rows, role=role)
    other = held.rows.line_up([reference()]) if stage == "waiting" else None
    answer = await desk.accept(with_references(reference()))
    await turns()
    assert held.rows.statistics()["waiting"] == (stage == "waiting")
    assert desk.load().queued_requests == 1
    if how == "leave":
        await answer.aclose()
    else:
        if how == "abort":
            assert await desk.abort("r") is AbortOutcome.ABORTED
        else:
            assert await desk.abort_all() == 1
        (event,) = await rest(answer)
        assert isinstance(event, Finished)
        assert event.reason is FinishReason.CANCELLED
    assert held.rows.statistics()["waiting"] == 0
    await turns()
    assert desk.load().queued_requests == 0
    assert engine.submitted == []
    assert held.rows.statistics()["given_up"] == 1
    (fetch,) = held.fetcher.begun
    assert fetch.cancels == (stage == "fetching")
    if other is not None:
        other.give_up()
    fetch.end(FetchOutcome.CANCELLED)
    await until(lambda: nothing_held(desk, held.rows))


async def test_an_abort_while_it_is_looked_at_costs_no_reference() -> None:
    """The grammar is still being compiled."""
    go = asyncio.Event()

    class Compiler:
        async def compile(self, guide: Guide) -> object:
            await go.wait()
            return object()

        def statistics(self) -> dict[str, float]:
            return {}

        async def close(self) -> None:
            pass

    engine, encoder = FakeEngine(), Encoder()
    desk = consumer(engine, over_memory(encoder))
    desk._intake.compiler = Compiler()
    one = encoder.encode(layout_of())
    accepting = asyncio.create_task(desk.accept(with_references(one, guide=Guide(GuideKind.JSON_OBJECT))))
    await turns()
    assert await desk.abort("r") is AbortOutcome.ABORTED
    go.set()
    with pytest.raises(Exception, match="aborted before it was accepted"):
        await accepting
    assert encoder.waits(one)


@pytest.mark.parametrize("role", ROLES)
async def test_a_reference_that_is_spent_fails_its_own_request(role: RoleName) -> None:
    engine, encoder = FakeEngine(), Encoder()
    rows = over_memory(encoder)
    desk = consumer(engine, rows, role=role)
    one = encoder.encode(layout_of())
    answer = await desk.accept(with_references(one, request_id="first"))
    await submitted(engine)
    await answer.aclose()
    for number in range(3):
        event = await failed(await desk.accept(with_references(one, request_id=f"{number}")))
        assert isinstance(event.error, ReferenceNotFound)
        assert str(event.error).startswith("media item 0: ")
        assert event.error.retryable
        answer = await desk.accept(with_references(encoder.encode(layout_of()), request_id="next"))
        await submitted(engine, number + 2)
        await answer.aclose()
    assert nothing_held(desk, rows)
    assert [check.state for check in await desk.health(probe=False)] == [HealthState.READY] * 3


async def test_what_others_took_is_said_and_what_is_left_can_be_used_again() -> None:
    engine, encoder = FakeEngine(), Encoder()
    desk = consumer(engine, over_memory(encoder))
    held = Held.of()
    patient = consumer(engine, held.rows)
    first, gone, last = (reference(layout_of(key=key)) for key in range(3))
    answer = await patient.accept(with_references(first, gone, last))
    held.fetcher.begun[0].finish(numbers(layout_of(key=0)))
    await until(lambda: held.rows.statistics()["taken"] == 1)
    held.fetcher.begun[1].end(FetchOutcome.GONE, "it was withdrawn")
    event = await failed(answer)
    assert str(event.error) == (
        "media item 1: it was withdrawn; encode it again (so must be media item(s) 0, which had come already)"
    )
    held.fetcher.begun[2].end(FetchOutcome.CANCELLED)  # given back
    fresh = [encoder.encode(layout_of(key=key)) for key in range(2)]
    answer = await desk.accept(with_references(*fresh))
    await submitted(engine)
    await answer.aclose()


async def test_an_abort_before_the_rows_are_there_gives_all_of_them_back() -> None:
    """A request that waits for room has touched nothing."""
    engine, encoder = FakeEngine(), Encoder()
    rows = over_memory(encoder, blocks=1)
    desk = consumer(engine, rows)
    blocks = rows._blocks.allocate(1)
    one = encoder.encode(layout_of())
    for number in range(5):
        answer = await desk.accept(with_references(one, request_id=f"{number}"))
        await turns()
        await desk.abort(f"{number}")
        await answer.aclose()
        assert encoder.waits(one)
    rows._blocks.release(blocks)
    answer = await desk.accept(with_references(one))
    await submitted(engine)
    await answer.aclose()
    assert not encoder.waits(one)


async def test_rows_that_are_there_are_spent_whatever_the_engine_says() -> None:
    engine, encoder = FakeEngine(), Encoder()
    rows = over_memory(encoder)
    desk = consumer(engine, rows)
    one = encoder.encode(layout_of())
    answer = await desk.accept(with_references(one))
    engine.room = 0
    event = await failed(answer)
    assert isinstance(event.error, Overloaded)
    assert not encoder.waits(one)
    assert nothing_held(desk, rows)


async def test_a_drain_ends_what_waits_and_what_is_fetched() -> None:
    engine, held = FakeEngine(), Held.of(blocks=1)
    desk = consumer(engine, held.rows)
    answers = [await desk.accept(with_references(reference(), request_id=f"{number}")) for number in range(2)]
    await turns()
    await desk.drain(0)
    for answer in answers:
        event = await failed(answer)
        assert isinstance(event.error, Draining)
    with pytest.raises(Draining):
        await desk.accept(with_references(reference(), request_id="late"))
    # the transport ends after the engine: it may still bring what was asked for
    held.fetcher.begun[0].finish(numbers(layout_of()))
    await turns()
    assert held.nothing()
    assert engine.submitted == []


async def test_health_says_when_blocks_are_in_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.roles.row_intake.OVERDUE_SECONDS", 0)
    engine, held = FakeEngine(), Held.of(limits=RowLimits(fetch_seconds=0))
    desk = consumer(engine, held.rows)
    event = await failed(await desk.accept(with_references(reference())))
    assert "media item 0: its rows did not come within 0 s" in str(event.error)
    (check,) = [check for check in await desk.health(probe=False) if check.name == "encoder_connector"]
    assert check.state is HealthState.DEGRADED
    assert desk.statistics()["row_intake"]["quarantined_bytes"] == 1024
    held.fetcher.begun[0].end(FetchOutcome.FAILED)
    await turns()
    (check,) = [check for check in await desk.health(probe=False) if check.name == "encoder_connector"]
    assert check.state is HealthState.READY


def test_a_picture_and_its_reference_have_one_shape() -> None:
    """What the tests give as references is what the processor makes of pictures."""
    item = plan_of(shape_png("circle", "red")).items[0]
    made = layout_of(item.grid.h // 2, item.grid.w // 2)
    assert (item.rows, item.encoder_tokens, item.grid) == (made.rows, made.encoder_tokens, made.grid)
