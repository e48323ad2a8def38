"""The encoder role over an engine that the test plays: what is refused, asked of the engine, and handed over."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.drawings import data_uri, shape_png
from tests.roles.encoder_asks import MARKER, PICTURES, ask, outputs, ready_of, rest, submitted, turns
from tests.roles.fake_engine import ROWS, FakeEngine, fake_encoder, fake_role, frontend
from triptych.core.adapter import AdapterInfo
from triptych.core.config import MediaLimits
from triptych.core.encoded import EncoderReference, SealedReference
from triptych.core.encoder_input import EncoderInput
from triptych.core.errors import (
    DuplicateRequest,
    Internal,
    InvalidRequest,
    MediaError,
    ModelNotFound,
    Overloaded,
    PlaceholderMismatch,
    PromptTooLong,
    ReferenceNotFound,
    RoleMismatch,
    UnsupportedFeature,
    WrongState,
)
from triptych.core.events import EncoderReady, Failed, Span
from triptych.core.guide import Guide, GuideKind
from triptych.core.logprobs import LogprobOptions
from triptych.core.media import DataUri, MediaItem, Modality, RawBytes, Url
from triptych.core.request import CacheOptions, EncodeOptions, GenerateRequest, Sampling, Stopping
from triptych.core.session import SealedSession
from triptych.roles.contract import HealthState
from triptych.roles.known_items import KnownItems

if TYPE_CHECKING:
    from triptych.core.request import EncodeRequest
    from triptych.roles.desk import Desk
FORGETFUL = MediaLimits(prepared_cache_bytes=1)
"""Keeps nothing that was prepared."""


def counts(role: Desk) -> tuple[float, float]:
    statistics = role.statistics()["intake"]
    return statistics["image_loads"], statistics["preprocess_calls"]


async def encoded(role: Desk, engine: FakeEngine, one: GenerateRequest) -> EncoderReady:
    """One request, encoded and read of."""
    before = len(engine.submitted)
    answer = await role.accept(one)
    await submitted(engine, before + 1)
    engine.encoded()
    ready = await ready_of(answer)
    await answer.aclose()
    return ready


# -- what is refused ---------------------------------------------------------------------------------------------------

PLAIN = GenerateRequest("r", "demo", "hello")
REFERENCE = SealedReference("c", b"")


@pytest.mark.parametrize(
    "one",
    [
        PLAIN,
        replace(PLAIN, prompt=MARKER, media=PICTURES[:1]),
        replace(PLAIN, handoff=True),
        replace(PLAIN, session=SealedSession("s", b"")),
        replace(PLAIN, prompt=MARKER, references=(REFERENCE,)),
    ],
    ids=["text", "media", "prefill", "decode", "references"],
)
async def test_whoever_wants_an_answer_is_sent_elsewhere(one: GenerateRequest) -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    with pytest.raises(RoleMismatch, match="encodes media for others"):
        await role.accept(one)
    assert engine.submitted == []


REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"media": (), "prompt": "hello"}, InvalidRequest, "has none"),
    ({"encode": EncodeOptions("nixl")}, InvalidRequest, "'nixl'; this engine hands its outputs over by 'fake'"),
    ({"encode": EncodeOptions("x" * 5000)}, InvalidRequest, "hands its outputs over by"),
    ({"model": "another"}, ModelNotFound, "another"),
    ({"media": PICTURES[:2]}, PlaceholderMismatch, "2 image item"),
    ({"prompt": "no marker"}, PlaceholderMismatch, "0 image placeholder"),
    ({"prompt": MARKER * 2}, PlaceholderMismatch, "2 image placeholder"),
    ({"media": (MediaItem(Modality.VIDEO, RawBytes(b"x")),)}, UnsupportedFeature, "video"),
    (
        {"media": (MediaItem(Modality.IMAGE, Url("http://a.example/b.png")),)},
        UnsupportedFeature,
        "media item 0: fetch: this engine fetches no URLs",
    ),
    ({"media": PICTURES[:1] * 65, "prompt": MARKER * 65}, InvalidRequest, "65 media items"),
    ({"prompt": (1 << 30,)}, InvalidRequest, "vocabulary"),
    ({"prompt": MARKER + "word " * 1000}, PromptTooLong, "context window"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSALS)
async def test_refused_before_acceptance(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    with pytest.raises(error, match=message):
        await role.accept(ask(**changes))
    assert engine.submitted == []
    assert role.statistics()["media_admission"]["admitted"] == 0
    answer = await role.accept(ask())  # and its id is free
    await answer.aclose()


async def test_an_id_is_taken_once() -> None:
    role = fake_encoder(FakeEngine())
    answer = await role.accept(ask())
    with pytest.raises(DuplicateRequest):
        await role.accept(ask())
    await answer.aclose()


async def test_every_item_needs_a_place_in_the_queue() -> None:
    engine = FakeEngine(room=3)
    role = fake_encoder(engine)
    answer = await role.accept(ask(2))
    with pytest.raises(Overloaded):
        await role.accept(ask(2, request_id="second"))
    assert role.load().queued_requests == 2
    await answer.aclose()


async def test_the_line_for_media_is_bounded() -> None:
    role = fake_encoder(FakeEngine(), limits=MediaLimits(media_preparation_limit=1, max_waiting_preparations=1))
    answers = [await role.accept(ask(request_id=name)) for name in "ab"]
    with pytest.raises(Overloaded, match="media preparation"):
        await role.accept(ask(request_id="c"))
    for answer in answers:
        await answer.aclose()


# -- what is asked of the engine, and what is handed over --------------------------------------------------------------


async def test_a_picture_ends_as_a_reference() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine, seconds=100)
    before = time.time_ns()
    answer = await role.accept(ask(priority=7))
    assert answer.token_text is None
    await submitted(engine)
    (group,) = engine.submitted
    (one,) = group
    assert isinstance(one.input, EncoderInput)
    assert one.layout is one.input.layout
    assert one.layout.start == 0
    assert (len(one.export), one.priority) == (32, 7)
    (name,) = engine.encoded(spans=[(Span("encode", time.monotonic(), time.monotonic()),)])
    ready = await ready_of(answer)
    assert ready.request_id == "r"
    (reference,) = ready.references
    assert isinstance(reference, EncoderReference)
    assert reference.item.handle.session_id == name == one.export
    assert reference.item.layout is one.layout
    assert (reference.item.row_bytes, reference.item.dtype) == (ROWS.row_bytes, ROWS.dtype)
    assert reference.fingerprint == frontend().processor.fingerprint
    assert before + 100e9 <= reference.expires_unix_nanos <= time.time_ns() + 100e9
    assert [span.name for span in ready.spans] == ["prepare", "encode"]
    assert abs(ready.spans[0].end - time.time()) < 100
    await answer.aclose()
    assert engine.aborted == engine.withdrawn == []
    assert outputs(role) == (1, 1, 0, 0, 0)


async def test_items_become_references_in_their_order() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    answer = await role.accept(ask(3))
    await submitted(engine)
    (group,) = engine.submitted
    assert len({one.export for one in group}) == len({one.request_id for one in group}) == 3
    # the engine's answers come in any order
    for index in (2, 0, 1):
        said, engine.submitted = engine.submitted, [(group[index],)]
        engine.encoded()
        engine.submitted = said
    ready = await ready_of(answer)
    assert [one.item.handle.session_id for one in ready.references] == [one.export for one in group]
    assert [one.item.layout.content_key for one in ready.references] == [one.layout.content_key for one in group]
    await answer.aclose()
    assert outputs(role) == (3, 3, 0, 0, 0)


async def test_stages_of_several_items_are_told_as_one() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    answer = await role.accept(ask(2))
    await submitted(engine)
    now = time.monotonic()
    spans = [(Span("queue", now, now + 1), Span("encode", now + 1, now + 2)), (Span("queue", now, now + 4),)]
    engine.encoded(spans=spans)
    prepared, queue, encode = (await ready_of(answer)).spans
    assert (prepared.name, queue.name, encode.name) == ("prepare", "queue", "encode")
    assert queue.end - queue.start == pytest.approx(4)
    assert encode.end - encode.start == pytest.approx(1)
    await answer.aclose()


async def test_the_prompt_may_be_tokens() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    marker = role.model.image_token_id
    ready = await encoded(role, engine, ask(2, prompt=(5, marker, marker)))
    assert len(ready.references) == 2
    assert role.statistics()["intake"]["tokenisations"] == 0


async def test_what_concerns_answers_is_for_other_engines() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    one = ask(
        sampling=Sampling(temperature=0.5, seed=3),
        stopping=Stopping(max_tokens=1_000_000, min_tokens=1_000_000, stop_strings=("x",)),
        num_sequences=100,
        logprobs=LogprobOptions(prompt=True, output=True),
        guide=Guide(GuideKind.REGEX, "a+"),
        lora_name="somebodys",
    )
    assert len((await encoded(role, engine, one)).references) == 1


async def test_who_an_item_is_depends_on_bytes_salt_and_uuid_alone() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    png = shape_png("circle", "red")
    ways = [
        ask(),
        ask(media=(MediaItem(Modality.IMAGE, DataUri(data_uri(png))),)),
        ask(media=(MediaItem(Modality.IMAGE, RawBytes(png), mime="image/jpeg"),)),
        ask(cache=CacheOptions(salt="s")),
        ask(media=(MediaItem(Modality.IMAGE, RawBytes(png), uuid="u"),)),
    ]
    keys = [(await encoded(role, engine, one)).references[0].item.layout.content_key for one in ways]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys)) == 3
    assert counts(role) == (3, 3)


# -- what was encoded before is not opened -----------------------------------------------------------------------------


async def test_a_repeat_is_not_opened() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    first = await encoded(role, engine, ask(2))
    again = await encoded(role, engine, ask(2))
    assert counts(role) == (2, 2)
    assert [one.input is None for one in engine.submitted[1]] == [True, True]
    for old, new in zip(first.references, again.references, strict=True):
        assert new.item.layout == old.item.layout
        assert new.item.handle.session_id != old.item.handle.session_id
    assert role.statistics()["known_items"] == {"items": 2, "bytes": 2048, "hits": 2, "misses": 2}


async def test_a_picture_that_comes_twice_is_opened_once() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    ready = await encoded(role, engine, ask(media=PICTURES[:1] * 2, prompt=MARKER * 2))
    assert counts(role) == (1, 1)
    first, second = engine.submitted[0]
    assert first.input is second.input
    assert len({one.item.handle.session_id for one in ready.references}) == 2


@pytest.mark.parametrize("gone", [{0}, {0, 1, 2}])
async def test_when_rows_are_gone_all_is_opened_and_submitted_once_more(gone: set[int]) -> None:
    engine = FakeEngine()
    role = fake_encoder(engine, limits=FORGETFUL)
    await encoded(role, engine, ask(2, request_id="before"))
    answer = await role.accept(ask(3))
    await submitted(engine, 2)
    assert counts(role) == (3, 3)
    assert [one.input is None for one in engine.submitted[1]] == [True, True, False]
    old = engine.encoded(gone=gone)
    await submitted(engine, 3)
    assert counts(role) == (5, 5)
    assert all(isinstance(one.input, EncoderInput) for one in engine.submitted[2])
    assert engine.submitted[2][2].input is engine.submitted[1][2].input  # nothing is opened that was open
    for name in ("request_id", "layout"):
        first, second = ([getattr(one, name) for one in group] for group in engine.submitted[1:])
        assert first == second
    assert engine.withdrawn == old  # what the first try had is not used
    new = engine.encoded()
    assert not set(new) & set(old)
    ready = await ready_of(answer)
    assert [one.item.handle.session_id for one in ready.references] == new
    assert [span.name for span in ready.spans] == ["prepare"]
    await answer.aclose()
    assert outputs(role) == (5, 5, 0, 0, 0)
    assert role.statistics()["media_admission"]["shares_in_use"] == 0


async def test_a_picture_that_comes_twice_is_opened_once_when_it_is_gone() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine, limits=FORGETFUL)
    await encoded(role, engine, ask(request_id="before"))
    answer = await role.accept(ask(media=PICTURES[:1] * 2, prompt=MARKER * 2))
    await submitted(engine, 2)
    engine.encoded(gone={0, 1})
    await submitted(engine, 3)
    assert counts(role) == (2, 2)
    engine.encoded()
    assert len((await ready_of(answer)).references) == 2
    await answer.aclose()


@pytest.mark.parametrize("end", ["encoded", "gone", "aborted", "left", "failed"])
async def test_what_may_have_to_be_opened_again_is_counted_until_it_is_known(end: str) -> None:
    engine = FakeEngine()
    role = fake_encoder(engine, limits=FORGETFUL)
    await encoded(role, engine, ask(2, request_id="before"))

    def held() -> float:
        return role.statistics()["media_held"]["bytes"]

    assert held() == 0
    answer = await role.accept(ask(3))
    await submitted(engine, 2)
    assert held() == sum(len(one.source.data) for one in PICTURES[:2])  # the third is open
    if end == "gone":
        engine.encoded(gone={0})
        await submitted(engine, 3)
        assert held() == 0
    elif end == "aborted":
        await role.abort(answer.request_id)
    elif end == "failed":
        (serial, *_) = (one.request_id for one in engine.submitted[-1])
        engine.deliver((Failed(serial, Internal("broken")),), ())
    if end in ("encoded", "gone"):
        engine.encoded()
        await ready_of(answer)
    await answer.aclose()
    assert held() == 0


async def test_rows_that_are_gone_when_the_line_is_full() -> None:
    """It has begun once already: it is refused no more, and comes before the line."""
    engine = FakeEngine()
    limits = replace(FORGETFUL, media_preparation_limit=1, max_waiting_preparations=1)
    role = fake_encoder(engine, limits=limits)
    await encoded(role, engine, ask(request_id="before"))
    answer = await role.accept(ask())
    await submitted(engine, 2)
    others = [await role.accept(ask(media=PICTURES[1:2], request_id=name)) for name in "ab"]
    with pytest.raises(Overloaded):
        await role.accept(ask(request_id="c"))
    engine.encoded(gone={0})
    await submitted(engine, 5)
    layouts = [group[0].layout for group in engine.submitted]
    engine.encoded(layouts.index(layouts[1], 2))
    assert len((await ready_of(answer)).references) == 1
    for one in (answer, *others):
        await one.aclose()


async def test_an_engine_that_asks_for_what_it_has_is_not_believed() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    answer = await role.accept(ask())
    await submitted(engine)
    names = engine.encoded(gone={0})
    (end,) = await rest(answer)
    assert isinstance(end, Failed)
    assert isinstance(end.error, Internal)
    assert engine.withdrawn == names
    await answer.aclose()


async def test_what_is_known_is_bounded() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine, known=KnownItems(capacity=2048), limits=FORGETFUL)
    await encoded(role, engine, ask(3))
    await encoded(role, engine, ask(1))  # the oldest was forgotten
    assert counts(role) == (4, 4)
    await encoded(role, engine, ask(media=PICTURES[2:3]))
    assert counts(role) == (4, 4)
    assert role.statistics()["known_items"]["items"] == 2


async def test_nothing_is_known_that_the_engine_never_had() -> None:
    engine = FakeEngine(room=1)
    role = fake_encoder(engine)
    answer = await role.accept(ask())
    engine.room = 0
    (end,) = await rest(answer)
    assert isinstance(end, Failed)
    assert isinstance(end.error, Overloaded)
    await answer.aclose()
    assert role.statistics()["known_items"]["items"] == 0


# -- items that cannot be used -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        RawBytes(b"no picture"),
        RawBytes(b""),
        DataUri("data:image/png;base64,%%%"),
        RawBytes(PICTURES[0].source.data[:99]),
    ],
)
async def test_a_bad_item_is_named(bad: RawBytes | DataUri) -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    answer = await role.accept(ask(2, media=(PICTURES[0], MediaItem(Modality.IMAGE, bad))))
    (end,) = await rest(answer)
    assert isinstance(end, Failed)
    assert isinstance(end.error, MediaError)
    assert str(end.error).startswith("media item 1: ")
    assert engine.submitted == []
    assert role.statistics()["media_admission"]["shares_in_use"] == 0
    await answer.aclose()


@pytest.mark.parametrize("limits", [{"max_item_pixels": 100}, {"max_request_pixels": 20_000}, {"max_item_bytes": 200}])
async def test_limits_hold_here_too(limits: dict[str, int]) -> None:
    engine = FakeEngine()
    role = fake_encoder(engine, limits=MediaLimits(**limits))
    answer = await role.accept(ask(2))
    (end,) = await rest(answer)
    assert isinstance(end, Failed)
    assert isinstance(end.error, MediaError)
    assert next(iter(limits)).replace("_", "-") in str(end.error)
    await answer.aclose()


async def test_an_item_that_fails_takes_the_others_with_it() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    answer = await role.accept(ask(3))
    await submitted(engine)
    group: tuple[EncodeRequest, ...] = engine.submitted[0]
    said, engine.submitted = engine.submitted, [group[:1]]
    engine.encoded()
    engine.submitted = said
    engine.say(Failed(group[1].request_id, Overloaded("does not fit")))
    (end,) = await rest(answer)
    assert isinstance(end, Failed)
    assert isinstance(end.error, Overloaded)
    assert str(end.error) == "media item 1: does not fit"
    assert group[2].request_id in engine.aborted
    assert engine.withdrawn == [one.export for one in group]
    engine.encoded()  # the others were done just then
    await turns()
    assert outputs(role) == (0, 0, 0, 0, 0)
    await answer.aclose()


async def test_an_engine_that_fails_as_a_whole_names_no_item() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    answer = await role.accept(ask(2))
    await submitted(engine)
    engine.failure = Internal("the loop has ended")
    engine.say(*(Failed(one.request_id, engine.failure) for one in engine.submitted[0]))
    (end,) = await rest(answer)
    assert isinstance(end, Failed)
    assert str(end.error) == "the loop has ended"
    await answer.aclose()


# -- the desk ----------------------------------------------------------------------------------------------------------


async def test_what_an_encoder_has_nothing_of() -> None:
    role = fake_encoder(FakeEngine())
    with pytest.raises(WrongState, match="KV events"):
        role.subscribe_kv(snapshot=True, start=0)
    assert role.adapters() == ()
    with pytest.raises(WrongState):
        await role.load_adapter(AdapterInfo(1, "mine", "/adapters/mine"))
    with pytest.raises(WrongState):
        await role.unload_adapter("mine")
    with pytest.raises(UnsupportedFeature, match="sessions"):
        await role.abort_session("s")
    assert "kv_sessions" not in role.statistics()


async def test_who_does_not_encode_has_no_outputs() -> None:
    role = fake_role(FakeEngine())
    with pytest.raises(UnsupportedFeature, match="encodes for no other"):
        await role.abort_rows("c")
    with pytest.raises(UnsupportedFeature, match="encodes for no other"):
        role.transfer_outcome("c")
    assert "encoder_outputs" not in role.statistics()


async def test_an_unknown_output() -> None:
    role = fake_encoder(FakeEngine())
    with pytest.raises(ReferenceNotFound, match="never seen"):
        await role.abort_rows("never seen")
    with pytest.raises(ReferenceNotFound, match="never seen"):
        role.transfer_outcome("never seen")


async def test_a_probe_encodes_and_leaves_no_output_behind() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    for number in (1, 2):
        probing = asyncio.create_task(role.health(probe=True))
        await submitted(engine, number)
        (name,) = engine.encoded()
        checks = {check.name: check.state for check in await probing}
        assert checks == dict.fromkeys(
            ("scheduler", "model", "encoder_connector", "inference_probe"), HealthState.READY
        )
        assert engine.withdrawn[-1] == name
        assert counts(role) == (number, number)  # no cache answers for the tower
    assert outputs(role) == (0, 2, 0, 0, 2)


async def test_a_probe_that_fails_says_so() -> None:
    engine = FakeEngine()
    role = fake_encoder(engine)
    probing = asyncio.create_task(role.health(probe=True))
    await submitted(engine)
    engine.say(Failed(engine.submitted[0][0].request_id, Internal("the tower is broken")))
    probe = (await probing)[-1]
    assert (probe.state, probe.message) == (HealthState.NOT_READY, "media item 0: the tower is broken")
