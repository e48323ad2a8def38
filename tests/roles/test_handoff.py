"""Prefill and decode apart, with a real model: the same answers, and nothing that is done twice or left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.adapters import make_adapter
from tests.drawings import shape_png
from tests.roles.pair import Models, Pair, ask_apart, begin, load_models, running_equals, running_pair
from tests.roles.running import Answered, ask, ask_all, options
from triptych.cli.flags import DEMO, model_directory
from triptych.core.adapter import AdapterInfo
from triptych.core.errors import KvSessionNotFound, Overloaded, RoleMismatch, SessionMismatch
from triptych.core.events import Failed, Finished, FinishReason, Tokens
from triptych.core.guide import Guide, GuideKind
from triptych.core.logprobs import GivenIds, LogprobOptions, TokenLogprob, TopN, WholeVocabulary
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import CacheOptions, GenerateRequest, Sampling, Stopping
from triptych.engine.grammar import guided_available
from triptych.roles.contract import AbortOutcome, HealthState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from triptych.core.events import Usage

MARKER = "<|vision_start|><|image_pad|><|vision_end|>"
SHAPES = (("circle", "red", 64), ("square", "blue", 97), ("triangle", "green", 150), ("circle", "orange", 80))
PICTURES = [shape_png(*shape) for shape in SHAPES]


@pytest.fixture(scope="module")
def models() -> Models:
    return load_models(options())


@pytest.fixture
async def pair(models: Models) -> AsyncIterator[Pair]:
    async with running_pair(models) as both:
        yield both
        await both.idle()


def request(pictures: int = 0, question: str = "what is there, and where?", **changes: object) -> GenerateRequest:
    plain = GenerateRequest(
        request_id="r",
        model="demo",
        prompt=f"<|im_start|>user\n{MARKER * pictures}{question}<|im_end|>\n<|im_start|>assistant\n",
        media=tuple(MediaItem(Modality.IMAGE, RawBytes(png)) for png in PICTURES[:pictures]),
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=20),
    )
    return replace(plain, **changes)


def near(ours: tuple[TokenLogprob | None, ...], theirs: tuple[TokenLogprob | None, ...]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert (one.candidates is None) == (other.candidates is None)
        if one.candidates is not None:
            assert np.allclose(np.sort(one.candidates.logprobs), np.sort(other.candidates.logprobs), atol=1e-4)


def usage(outputs: list[Answered]) -> Usage:
    """Of the whole request: the output that ends last has it."""
    (found,) = (one.end.usage for one in outputs if isinstance(one.end, Finished) and one.end.usage is not None)
    return found


def same(ours: list[Answered], theirs: list[Answered]) -> None:
    assert len(ours) == len(theirs)
    assert usage(ours) == usage(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert isinstance(one.end, Finished)
        assert isinstance(other.end, Finished)
        assert (one.end.reason, one.end.stop) == (other.end.reason, other.end.stop)
        near(one.logprobs, other.logprobs)
        assert (one.prompt is None) == (other.prompt is None)
        if one.prompt is not None:
            assert one.prompt.token_ids == other.prompt.token_ids
            near(one.prompt.logprobs, other.prompt.logprobs)


LONG = Stopping(max_tokens=20, ignore_eos=True)
HOT = Sampling(temperature=20.0, seed=2**64 - 3)
VARIANTS = {
    "greedy": {},
    "to the end": {"stopping": Stopping()},
    "seeded": {"sampling": HOT, "stopping": LONG},
    "penalties": {
        "sampling": Sampling(3, frequency_penalty=2, presence_penalty=1, repetition_penalty=1.5, seed=7),
        "stopping": LONG,
    },
    "three": {"sampling": HOT, "stopping": LONG, "num_sequences": 3},
    "three greedy": {"num_sequences": 3},
    "one token": {"stopping": Stopping(max_tokens=1)},
    "three of one token": {"stopping": Stopping(max_tokens=1), "num_sequences": 3, "sampling": HOT},
    "stop strings": {"stopping": Stopping(max_tokens=30, ignore_eos=True, stop_strings=("e", "a b")), "sampling": HOT},
    "shown": {
        "stopping": Stopping(max_tokens=30, stop_strings=("i",), include_stop_in_output=True, ignore_eos=True),
        "sampling": HOT,
        "num_sequences": 3,
    },
    "stop ids": {
        "stopping": Stopping(max_tokens=30, ignore_eos=True, stop_token_ids=tuple(range(0, 960, 15))),
        "sampling": HOT,
        "num_sequences": 3,
    },
    "at least": {"stopping": Stopping(max_tokens=9, min_tokens=9)},
    "logprobs": {"logprobs": LogprobOptions(output=True)},
    "top": {"logprobs": LogprobOptions(output=True, output_candidates=TopN(4)), "num_sequences": 3},
    "given": {"logprobs": LogprobOptions(output=True, output_candidates=GivenIds((5, 900, 3)))},
    "whole vocabulary": {
        "logprobs": LogprobOptions(output=True, output_candidates=WholeVocabulary()),
        "stopping": Stopping(max_tokens=3),
    },
    "prompt logprobs": {
        "logprobs": LogprobOptions(prompt=True, prompt_candidates=TopN(2), prompt_start=3, output=True),
        "num_sequences": 3,
    },
    "ids only": {"detokenize": False},
    "salted": {"cache": CacheOptions(salt="tenant")},
    "bypass": {"cache": CacheOptions(bypass_prefix_cache=True)},
}


@pytest.mark.parametrize("pictures", range(5))
async def test_the_same_as_one_engine(pair: Pair, pictures: int) -> None:
    """Each variant twice: the second time the prompt is cached on both sides."""
    for name, changes in VARIANTS.items():
        for again in range(2):
            one = request(pictures, **changes, request_id=f"{name} {again}")
            same(await ask_apart(pair, one), await ask_all(pair.whole, one))
    if pictures:
        assert pair.prefill.statistics()["scheduler"]["cached_prompt_tokens"] > 0
        # what the decode engine had was not moved again
        blocks = pair.prefill.statistics()["scheduler"]["exported_sessions"] * 8
        assert 0 < pair.decode.statistics()["scheduler"]["imported_blocks"] < blocks
    assert pair.decode.statistics()["intake"] == {
        "image_loads": 0,
        "clip_loads": 0,
        "preprocess_calls": 0,
        "tokenisations": 0,
    }


async def test_drawn_seeds_travel(pair: Pair) -> None:
    """Without a seed of the request's own, the answer is that of the one which was drawn."""
    asked = request(1, sampling=Sampling(temperature=20.0), stopping=LONG, num_sequences=3)
    begun = await begin(pair.prefill, asked)
    apart = await ask_all(pair.decode, replace(asked, session=begun.session, media=()))
    sampling = Sampling(temperature=20.0, seed=begun.session.seed)
    same(apart, await ask_all(pair.whole, replace(asked, sampling=sampling)))


@pytest.mark.skipif(not guided_available(), reason="the grammar library is not installed")
@pytest.mark.parametrize("outputs", [1, 3])
async def test_guides_go_on_where_they_were(pair: Pair, outputs: int) -> None:
    guides = (
        Guide(GuideKind.REGEX, "[a-f]{3,9}(-[0-9]{2}){2}"),
        Guide(GuideKind.CHOICE, choices=("red circle", "red square", "nothing")),
        Guide(GuideKind.JSON_SCHEMA, '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'),
        Guide(GuideKind.CHOICE, choices=("r",)),  # perhaps complete with its first token
    )
    for number, guide in enumerate(guides):
        asked = request(1, guide=guide, sampling=HOT, num_sequences=outputs, request_id=f"{number}")
        same(await ask_apart(pair, asked), await ask_all(pair.whole, asked))


async def test_adapters_are_the_same_on_both_sides(pair: Pair, tmp_path: Path) -> None:
    base = model_directory(DEMO)
    infos = [AdapterInfo(seed, f"a{seed}", str(make_adapter(base, tmp_path / f"{seed}", seed=seed))) for seed in (1, 2)]
    for role in (pair.whole, pair.prefill, pair.decode):
        for info in infos:
            await role.load_adapter(info)
    for name in ("", "a1", "a2"):
        asked = request(1, lora_name=name, stopping=LONG, request_id=name or "none")
        same(await ask_apart(pair, asked), await ask_all(pair.whole, asked))
    begun = await begin(pair.prefill, request(lora_name="a1"))
    with pytest.raises(SessionMismatch, match="LoRA"):
        await pair.decode.accept(request(lora_name="a2", session=begun.session))
    # the same name for something else
    await pair.decode.unload_adapter("a1")
    await pair.decode.load_adapter(replace(infos[1], lora_id=9, name="a1"))
    with pytest.raises(SessionMismatch, match="LoRA"):
        await pair.decode.accept(request(lora_name="a1", session=begun.session))
    assert await pair.prefill.abort_session(begun.session.handle.session_id) is AbortOutcome.ABORTED


@pytest.mark.parametrize("form", ["folded", "expanded", "media"])
async def test_the_prompt_in_each_form_that_clients_send(pair: Pair, form: str) -> None:
    tokenizer = pair.whole._intake.frontend.tokenizer
    asked = request(2)
    asked = replace(asked, prompt=tuple(tokenizer.encode(asked.prompt)))
    whole = await ask_all(pair.whole, asked)
    begun = await begin(pair.prefill, asked)
    rest = replace(asked, session=begun.session)
    if form == "expanded":
        rest = replace(rest, prompt=tuple(begun.session.plan.token_ids.tolist()), media=())
    elif form == "folded":
        rest = replace(rest, media=())
    same(await ask_all(pair.decode, rest), whole)
    assert pair.decode.statistics()["intake"] == {
        "image_loads": 0,
        "clip_loads": 0,
        "preprocess_calls": 0,
        "tokenisations": 0,
    }


async def test_without_the_plan_the_media_are_prepared_again(pair: Pair) -> None:
    asked = request(2)
    begun = await begin(pair.prefill, asked)
    bare = replace(begun.session, plan=None)
    same(await ask_all(pair.decode, replace(asked, session=bare)), await ask_all(pair.whole, asked))
    assert pair.decode.statistics()["intake"] == {
        "image_loads": 2,
        "clip_loads": 0,
        "preprocess_calls": 2,
        "tokenisations": 1,
    }


async def test_a_session_is_for_one(pair: Pair) -> None:
    begun = await begin(pair.prefill, request(1))
    rest = request(1, session=begun.session, media=())
    assert isinstance((await ask(pair.decode, rest)).end, Finished)
    again = await ask(pair.decode, replace(rest, request_id="again"))
    assert isinstance(again.end, Failed)
    assert isinstance(again.end.error, KvSessionNotFound)
    assert again.token_ids == ()
    assert pair.prefill.statistics()["kv_sessions"]["taken"] == 1
    assert await pair.prefill.abort_session(begun.session.handle.session_id) is AbortOutcome.ALREADY_FINISHED


async def test_an_aborted_session_cannot_be_taken(pair: Pair) -> None:
    begun = await begin(pair.prefill, request(1))
    assert await pair.prefill.abort_session(begun.session.handle.session_id) is AbortOutcome.ABORTED
    await pair.idle()  # soon: the engine's thread does it
    got = await ask(pair.decode, request(1, session=begun.session, media=()))
    assert isinstance(got.end, Failed)
    assert isinstance(got.end.error, KvSessionNotFound)


async def test_an_expired_session_is_an_error_and_its_blocks_are_free(models: Models) -> None:
    async with running_pair(models, ttl=0.05) as pair:
        begun = await begin(pair.prefill, request(2))
        await pair.idle()
        assert pair.prefill.statistics()["kv_sessions"]["expired"] == 1
        rest = request(2, session=begun.session, media=())
        with pytest.raises(KvSessionNotFound, match="expired"):
            await pair.decode.accept(rest)
        # a clock that is behind hears it from the engine that made it
        late = replace(begun.session, expires_unix_nanos=2**63)
        got = await ask(pair.decode, replace(rest, session=late))
        assert isinstance(got.end, Failed)
        assert isinstance(got.end.error, KvSessionNotFound)


async def test_engines_that_can_do_either_part(models: Models) -> None:
    asked = request(2, cache=CacheOptions(bypass_prefix_cache=True), num_sequences=3, sampling=HOT, stopping=LONG)
    async with running_equals(models) as roles:
        for first, second in (roles, roles[::-1], (roles[0], roles[0])):  # the last hands over to itself
            begun = await begin(first, asked)
            apart = await ask_all(second, replace(asked, session=begun.session, media=()))
            same(apart, await ask_all(first, asked))


async def test_both_without_sessions(pair: Pair) -> None:
    asked = request(stopping=LONG)
    same(await ask_all(pair.decode, asked), await ask_all(pair.whole, asked))
    with pytest.raises(RoleMismatch):
        await pair.decode.accept(request(1))
    for role in (pair.prefill, pair.decode):
        assert {check.state for check in await role.health(probe=True)} == {HealthState.READY}


@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_aborts_on_the_decode_engine(pair: Pair, steps: int) -> None:
    begun = await begin(pair.prefill, request(1))
    rest = request(1, session=begun.session, media=(), stopping=Stopping(ignore_eos=True))
    answer = await pair.decode.accept(rest)
    for _ in range(steps):
        assert isinstance(await anext(answer), Tokens)
    assert await pair.decode.abort("r") is AbortOutcome.ABORTED
    last = [event async for event in answer][-1]
    assert isinstance(last, Finished)
    assert last.reason is FinishReason.CANCELLED
    await answer.aclose()


async def test_no_room_is_said_before_acceptance_and_the_session_waits_on(models: Models) -> None:
    config = replace(models.decode.config, max_running_requests=1)
    async with running_pair(models._replace(decode=replace(models.decode, config=config))) as pair:
        asked = request(1)
        begun = await begin(pair.prefill, asked)
        rest = replace(asked, session=begun.session, media=())
        occupant = await pair.decode.accept(request(request_id="occupant", stopping=Stopping(ignore_eos=True)))
        await anext(occupant)
        with pytest.raises(Overloaded, match="no room"):
            await pair.decode.accept(rest)
        assert pair.prefill.statistics()["kv_sessions"]["waiting"] == 1
        await occupant.aclose()
        async with asyncio.timeout(20):
            while pair.decode.load().running_requests:
                await asyncio.sleep(0.01)
        same(await ask_all(pair.decode, rest), await ask_all(pair.whole, asked))
        await pair.idle()
