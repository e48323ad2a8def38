"""The aggregated role over an engine that the test plays: what is passed on, what is held, who hears what and when."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from tests.drawings import shape_png
from tests.roles.fake_engine import FakeEngine, fake_role
from tests.roles.kv_changes import block
from triptych.core.adapter import AdapterInfo
from triptych.core.errors import (
    AdapterNotFound,
    Cancelled,
    Draining,
    DuplicateRequest,
    Internal,
    InvalidRequest,
    Overloaded,
    RequestNotFound,
    UnsupportedFeature,
    WrongState,
)
from triptych.core.events import Failed, Finished, FinishReason, Prompt, Tokens
from triptych.core.guide import Guide, GuideKind
from triptych.core.logprobs import LogprobOptions, TopN
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import GenerateRequest, Sampling, Stopping, derived_seed
from triptych.roles.contract import AbortOutcome, HealthState

if TYPE_CHECKING:
    from triptych.core.guide import Grammar

PICTURE = MediaItem(Modality.IMAGE, RawBytes(shape_png("circle", "red")))
JSON = Guide(GuideKind.JSON_OBJECT)


def request(**changes: object) -> GenerateRequest:
    plain = GenerateRequest("r", "demo", "hello", sampling=Sampling(seed=3), stopping=Stopping(max_tokens=4))
    return replace(plain, **changes)


def with_picture(**changes: object) -> GenerateRequest:
    return request(prompt="<|vision_start|><|image_pad|><|vision_end|>", media=(PICTURE,), **changes)


async def turns(count: int = 5) -> None:
    """Let everything happen that can."""
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass(frozen=True)
class FakeGrammar:
    guide: Guide

    def matcher(self) -> None:
        raise AssertionError("not in this test")


@dataclass
class Compiler:
    """Compiles when it is told to."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[Guide] = field(default_factory=list)
    trouble: Exception | None = None

    async def compile(self, guide: Guide) -> Grammar:
        self.asked.append(guide)
        await self.go.wait()
        if self.trouble is not None:
            raise self.trouble
        return FakeGrammar(guide)

    def statistics(self) -> dict[str, float]:
        return {"compiled": len(self.asked)}

    async def close(self) -> None:
        self.closed = True


async def test_a_group_shares_everything_but_serials_and_seeds() -> None:
    engine = FakeEngine()
    role = fake_role(engine)
    options = LogprobOptions(prompt=True, prompt_candidates=TopN(2), prompt_start=1, output=True)
    answer = await role.accept(with_picture(num_sequences=3, priority=-5, logprobs=options))
    while not engine.submitted:
        await asyncio.sleep(0.001)
    (group,) = engine.submitted
    leader, *followers = group
    assert len({one.request_id for one in group}) == 3
    assert [one.sampling.seed for one in group] == [derived_seed(3, index) for index in range(3)]
    assert leader.sampling.seed == 3
    assert leader.logprobs == options
    for one in followers:
        assert one.plan is leader.plan
        assert one.inputs is leader.inputs
        assert one.positions is leader.positions
        assert one.logprobs == LogprobOptions(output=True)  # the prompt is computed, and told, once
        assert one.priority == -5
        assert one.arrival == leader.arrival
    engine.say(Prompt(leader.request_id, (1,), (None,)))
    engine.answer()
    events = [event async for event in answer]
    assert isinstance(events[0], Prompt)
    assert {event.request_id for event in events} == {"r"}
    await answer.aclose()


async def test_without_a_seed_each_output_still_has_its_own() -> None:
    engine = FakeEngine()
    role = fake_role(engine)
    await role.accept(request(num_sequences=8, sampling=Sampling()))
    await turns()
    assert len({one.sampling.seed for one in engine.submitted[0]}) == 8


async def test_outputs_count_in_the_queue_and_in_the_load() -> None:
    engine = FakeEngine(room=10)
    role = fake_role(engine)
    first = await role.accept(request(num_sequences=6))
    assert role.load().queued_requests == 6  # being prepared
    await turns()
    assert role.load().queued_requests == 6  # the engine's
    with pytest.raises(Overloaded):
        await role.accept(request(request_id="five more", num_sequences=5))
    await role.accept(request(request_id="four more", num_sequences=4))
    await first.aclose()
    assert engine.aborted == [one.request_id for one in engine.submitted[0]]


async def test_an_abort_before_the_engine_has_it_ends_every_output() -> None:
    engine = FakeEngine()
    role = fake_role(engine)
    answer = await role.accept(request(num_sequences=3))
    assert await role.abort("r") is AbortOutcome.ABORTED
    ends = [event async for event in answer]
    assert [end.reason for end in ends if isinstance(end, Finished)] == [FinishReason.CANCELLED] * 3
    await turns()
    assert engine.submitted == []
    await answer.aclose()


async def test_what_cannot_be_read_fails_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    role = fake_role(engine)
    bad, good = await role.accept(request(request_id="bad")), await role.accept(request(request_id="good"))
    await turns()
    monkeypatch.setattr(bad, "push", lambda event: 1 / 0)
    engine.say(*(Tokens(group[0].request_id, (70,)) for group in engine.submitted))
    engine.answer(1)
    failed = [event async for event in bad][-1]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, Internal)
    assert isinstance([event async for event in good][-1], Finished)
    assert engine.aborted == [engine.submitted[0][0].request_id]


async def test_ids_alone_ask_the_tokenizer_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    role = fake_role(engine)
    bare = await role.accept(request(request_id="bare", prompt=(70, 71), detokenize=False, num_sequences=2))
    told = await role.accept(request(request_id="told", prompt=(70, 71)))
    assert bare.token_text is None
    assert told.token_text is not None
    assert told.token_text(70) == role._front.tokenizer.token_bytes(70).decode()
    calls = []
    real = type(role._front.tokenizer).token_bytes
    monkeypatch.setattr(
        type(role._front.tokenizer),
        "token_bytes",
        lambda self, token_id: calls.append(token_id) or real(self, token_id),
    )
    await turns()
    engine.answer(0)
    assert [event.text for event in [event async for event in bare] if isinstance(event, Tokens)] == ["", ""]
    assert calls == []
    engine.answer(1)
    assert [event.text for event in [event async for event in told] if isinstance(event, Tokens)] != [""]
    assert calls == [70]


# -- guides ---------------------------------------------------------------------------------------


async def test_a_guide_is_compiled_before_acceptance_and_before_a_place_in_line() -> None:
    engine, compiler = FakeEngine(), Compiler()
    role = fake_role(engine, compiler=compiler)
    accepting = asyncio.create_task(role.accept(with_picture(guide=JSON, num_sequences=2)))
    await turns()
    assert compiler.asked == [JSON]
    assert role.statistics()["media_admission"]["admitted"] == 0
    compiler.go.set()
    await (await accepting).aclose()
    assert role.statistics()["media_admission"]["admitted"] == 1
    assert role.statistics()["grammars"] == {"compiled": 1}
    await role.accept(request(guide=JSON, num_sequences=2))
    await turns()
    leader, follower = engine.submitted[-1]
    assert leader.grammar is follower.grammar is not None


async def test_cheap_checks_come_before_the_compiler() -> None:
    compiler = Compiler()
    role = fake_role(FakeEngine(), compiler=compiler)
    for changes in ({"model": "nobody"}, {"prompt": (10**6,)}, {"media": (PICTURE,)}, {"lora_name": "x"}):
        with pytest.raises(Exception, match=r"\S"):
            await role.accept(request(guide=JSON, **changes))
    assert compiler.asked == []


async def test_a_guide_that_cannot_be_compiled_is_refused_and_nothing_is_held() -> None:
    engine, compiler = FakeEngine(), Compiler(trouble=InvalidRequest("guided.json_object: no"))
    compiler.go.set()
    role = fake_role(engine, compiler=compiler)
    with pytest.raises(InvalidRequest, match="no"):
        await role.accept(with_picture(guide=JSON))
    assert role.statistics()["media_admission"]["shares_in_use"] == 0
    await role.accept(request())


async def test_who_leaves_while_compiling_leaves_nothing_behind() -> None:
    compiler = Compiler()
    role = fake_role(FakeEngine(), compiler=compiler)
    accepting = asyncio.create_task(role.accept(with_picture(guide=JSON)))
    await turns()
    accepting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await accepting
    compiler.go.set()
    await turns()
    assert role.load().queued_requests == 0
    assert role.statistics()["media_admission"]["shares_in_use"] == 0
    await role.accept(request())
    await role.drain(0)


async def test_an_engine_that_closes_while_a_guide_is_compiled() -> None:
    compiler = Compiler()
    role = fake_role(FakeEngine(), compiler=compiler)
    late = asyncio.create_task(role.accept(with_picture(guide=JSON)))
    await turns()
    draining = asyncio.create_task(role.drain(0))
    await turns(1)
    compiler.go.set()
    with pytest.raises(Draining):
        await late
    assert role.statistics()["media_admission"]["shares_in_use"] == 0
    await draining


async def test_without_a_compiler_the_extra_is_named() -> None:
    with pytest.raises(UnsupportedFeature, match=r"guided.json_object: .*pip install 'triptych\[guided\]'"):
        await fake_role(FakeEngine()).accept(request(guide=JSON))


# -- adapters -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeAdapter:
    info: AdapterInfo
    digest: bytes = bytes(32)


FIRST = AdapterInfo(4, "first", "/adapters/first")


async def test_a_request_takes_the_adapter_and_keeps_it() -> None:
    engine = FakeEngine()
    role = fake_role(engine, read=FakeAdapter)
    with pytest.raises(AdapterNotFound, match="loaded: none"):
        await role.accept(request(lora_name="first"))
    assert await role.load_adapter(FIRST) is False
    assert await role.load_adapter(FIRST) is True
    assert role.adapters() == (FIRST,)
    assert role.statistics()["adapters"]["loaded"] == 1
    answer = await role.accept(request(lora_name="first", num_sequences=2))
    assert await role.unload_adapter("first") == FIRST
    await turns()
    leader, follower = engine.submitted[0]
    assert leader.adapter is follower.adapter
    assert leader.adapter == FakeAdapter(FIRST)
    with pytest.raises(AdapterNotFound):
        await role.accept(request(request_id="later", lora_name="first"))
    engine.answer()
    assert isinstance([event async for event in answer][-1], Finished)


async def test_where_adapters_are_off() -> None:
    role = fake_role(FakeEngine())
    with pytest.raises(UnsupportedFeature, match="--max-loras"):
        await role.accept(request(lora_name="first"))
    with pytest.raises(WrongState):
        await role.load_adapter(FIRST)
    with pytest.raises(WrongState):
        await role.unload_adapter("first")


async def test_nothing_is_loaded_while_the_engine_ends() -> None:
    role = fake_role(FakeEngine(), read=FakeAdapter)
    await role.drain(0)
    with pytest.raises(Draining):
        await role.load_adapter(FIRST)


# -- cached blocks --------------------------------------------------------------------------------


async def test_blocks_bear_the_clients_name_for_the_request_while_it_lives() -> None:
    engine = FakeEngine()
    role = fake_role(engine)
    follower = role.subscribe_kv(snapshot=False, start=0)
    answer = await role.accept(request(num_sequences=2))
    await turns()
    first, second = engine.submitted[0]
    engine.say(kv=(block(1, request_id=first.request_id), block(2, 1, request_id=second.request_id)))
    assert [change.request_id for change in (await anext(follower)).changes] == ["r", "r"]
    await answer.aclose()
    engine.say(kv=(block(3, request_id=first.request_id),))
    assert [change.request_id for change in (await anext(follower)).changes] == [""]
    assert role.statistics()["kv_events"]["blocks"] == 3
    snapshot = role.subscribe_kv(snapshot=True, start=0)
    assert [getattr(change, "request_id", None) for change in (await anext(snapshot)).changes] == [None, "r", "r", ""]


async def test_a_drain_ends_the_followers_at_once() -> None:
    role = fake_role(FakeEngine())
    follower = role.subscribe_kv(snapshot=False, start=0)
    answer = await role.accept(request())
    draining = asyncio.create_task(role.drain(60))
    with pytest.raises(Draining):
        await anext(follower)
    with pytest.raises(Draining):
        role.subscribe_kv(snapshot=True, start=0)
    await answer.aclose()
    await draining


async def test_switched_off_by_its_flag() -> None:
    engine = FakeEngine()
    role = fake_role(engine, kv_event_buffer=0)
    engine.say(kv=(block(1),))
    await turns()
    with pytest.raises(WrongState, match="--no-kv-events"):
        role.subscribe_kv(snapshot=True, start=0)


async def test_probes_at_the_same_time_are_one_request() -> None:
    engine = FakeEngine()
    role = fake_role(engine, vocab_size=1 << 20)
    probes = [asyncio.create_task(role.health(probe=True)) for _ in range(3)]
    await turns()
    assert len(engine.submitted) == 1
    engine.answer()
    assert {(await one)[-1].state for one in probes} == {HealthState.READY}
    again = asyncio.create_task(role.health(probe=True))
    await turns()
    assert len(engine.submitted) == 2
    engine.answer(1)
    assert (await again)[-1].state is HealthState.READY


async def test_a_probe_that_waits_too_long_or_finds_no_room_is_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.roles.probe.PROBE_SECONDS", 0.01)
    engine = FakeEngine()
    role = fake_role(engine, vocab_size=1 << 20)
    assert (await role.health(probe=True))[-1].state is HealthState.DEGRADED
    assert engine.aborted == ["0.0"]
    engine.room = 1
    assert (await role.health(probe=True))[-1].state is HealthState.DEGRADED


async def test_an_id_is_taken_while_its_request_is_looked_at() -> None:
    compiler = Compiler()
    role = fake_role(FakeEngine(), compiler=compiler)
    asked = request(request_id="one", guide=JSON)
    arriving = asyncio.create_task(role.accept(asked))
    await turns()
    assert compiler.asked
    with pytest.raises(DuplicateRequest):
        await role.accept(asked)
    assert role.load().queued_requests == 1
    assert await role.abort("one") is AbortOutcome.ABORTED
    compiler.go.set()
    with pytest.raises(Cancelled):
        await arriving
    assert role.load().queued_requests == 0
    with pytest.raises(RequestNotFound):
        await role.abort("one")


async def test_whoever_is_looked_at_has_a_place_in_the_queue() -> None:
    compiler = Compiler()
    engine = FakeEngine(room=2)
    role = fake_role(engine, compiler=compiler)
    guided = [request(request_id=f"{name}", guide=JSON) for name in range(2)]
    arriving = [asyncio.create_task(role.accept(one)) for one in guided]
    await turns()
    with pytest.raises(Overloaded):
        await role.accept(request(request_id="late"))
    compiler.go.set()
    for answer in await asyncio.gather(*arriving):
        await answer.aclose()
