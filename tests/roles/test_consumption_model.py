"""Pictures that another engine has encoded, with a real model: the same answers, whatever is apart."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.drawings import data_uri, shape_png
from tests.roles.pair import Memory
from tests.roles.row_engines import (
    Engines,
    Models,
    ask_apart,
    ask_both,
    encode,
    load_models,
    referring,
    running_engines,
)
from tests.roles.running import Answered, ask, ask_all, options
from triptych.cli.transports import Nixl, SharedDir
from triptych.core.config import MIB
from triptych.core.errors import ReferenceNotFound, RoleMismatch
from triptych.core.events import Failed, Finished
from triptych.core.media import DataUri, MediaItem, Modality, RawBytes
from triptych.core.request import CacheOptions, GenerateRequest, Sampling, Stopping
from triptych.engine.row_arena import ROW_LAYOUT
from triptych.roles.contract import HealthState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from triptych.cli.transports import Transport
    from triptych.core.events import Usage
    from triptych.roles.desk import Desk

    Ask = Callable[[Engines, GenerateRequest], Awaitable[list[Answered]]]

MARKER = "<|vision_start|><|image_pad|><|vision_end|>"
SHAPES = (("circle", "red", 64), ("square", "blue", 97), ("triangle", "green", 150), ("circle", "orange", 80))
PICTURES = [shape_png(*shape) for shape in SHAPES]
BYPASS = CacheOptions(bypass_prefix_cache=True)
WAYS: dict[str, Ask] = {"E+PD": ask_both, "E+P+D": ask_apart}


@pytest.fixture(scope="module")
def models() -> Models:
    return load_models(options())


def transports() -> list[object]:
    """Ways for rows to move, each made from a directory of the test's own."""
    nixl = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="no nixl here")
    return [
        pytest.param(lambda _: Memory(), id="memory"),
        pytest.param(lambda path: SharedDir(path / "rows", 60.0), id="shared-dir"),
        pytest.param(lambda path: Nixl(f"the secret of {path}"), id="nixl", marks=nixl),
    ]


@pytest.fixture
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Transport:
    """By memory, where the test does not say otherwise."""
    make: Callable[[Path], Transport] = getattr(request, "param", lambda _: Memory())
    return make(tmp_path)


@pytest.fixture
async def engines(models: Models, rows: Transport) -> AsyncIterator[Engines]:
    async with running_engines(models, rows) as all_of_them:
        yield all_of_them
        await all_of_them.idle()
        for role in (all_of_them.both, all_of_them.prefill, all_of_them.decode):
            counts = role.statistics()["intake"]
            assert (counts["image_loads"], counts["preprocess_calls"]) == (0, 0)


def request(*pngs: bytes, question: str = "what is there, and where?", **changes: object) -> GenerateRequest:
    plain = GenerateRequest(
        request_id="r",
        model="demo",
        prompt=f"<|im_start|>user\n{MARKER * len(pngs)}{question}<|im_end|>\n<|im_start|>assistant\n",
        media=tuple(MediaItem(Modality.IMAGE, RawBytes(png)) for png in pngs),
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=20),
    )
    return replace(plain, **changes)


def usage_of(answered: Answered) -> Usage:
    assert isinstance(answered.end, Finished), answered.end
    assert answered.end.usage is not None
    return answered.end.usage


def same(got: list[Answered], expected: list[Answered]) -> None:
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    assert [one.text for one in got] == [one.text for one in expected]
    for one, other in zip(got, expected, strict=True):
        assert isinstance(one.end, Finished), one.end
        assert isinstance(other.end, Finished), other.end
        assert (one.end.reason, one.end.stop, one.end.usage) == (other.end.reason, other.end.stop, other.end.usage)


# -- the same answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", transports(), indirect=True)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", [CacheOptions(), BYPASS], ids=["prefix reuse", "no reuse"])
async def test_apart_is_as_together(engines: Engines, way: str, cache: CacheOptions) -> None:
    """0 to 4 pictures of different sizes, one of them twice; prefixes of one request are those of the next."""
    chosen = ((), (0,), (0, 1), (2, 1, 0), (0, 1, 2, 3), (3, 3), (0, 1, 0, 2))
    for number, pictures in enumerate(chosen):
        one = request(*(PICTURES[index] for index in pictures), cache=cache, num_sequences=1 + number % 2)
        for _ in range(2):
            same(await WAYS[way](engines, one), await ask_all(engines.whole, one))
    taken = engines.both if way == "E+PD" else engines.prefill
    assert taken.statistics()["row_intake"]["taken"] == 2 * sum(map(len, chosen))


@pytest.mark.parametrize("way", WAYS)
async def test_in_chunks_it_is_as_together(way: str) -> None:
    """Sixteen tokens a step: each picture is read in several."""
    async with running_engines(load_models(options(max_batched_tokens=16))) as engines:
        for pictures in (PICTURES[:1], PICTURES, [PICTURES[2]] * 2):
            one = request(*pictures)
            same(await WAYS[way](engines, one), await ask_all(engines.whole, one))
        await engines.idle()


@pytest.mark.parametrize("way", WAYS)
async def test_pictures_of_one_shape_are_told_apart(engines: Engines, way: str) -> None:
    """The text is the same, and so are the layouts; only what is in the rows differs."""
    texts = set()
    for colour in ("red", "blue", "green"):
        one = request(shape_png("circle", colour), question="what colour is the circle?")
        (got,) = await WAYS[way](engines, one)
        same([got], await ask_all(engines.whole, one))
        texts.add(got.text)
    assert len(texts) == 3


async def test_many_requests_at_once_get_their_own_pictures(engines: Engines) -> None:
    colours = ("red", "blue", "green", "orange")
    expected = {
        colour: await ask(engines.whole, request(shape_png("circle", colour), question="what colour?"))
        for colour in colours
    }

    async def one(number: int) -> None:
        colour = colours[number % 4]
        asked = request(shape_png("circle", colour), question="what colour?", request_id=f"{number}")
        (got,) = await (ask_both, ask_apart)[number % 2](engines, asked)
        assert got.token_ids == expected[colour].token_ids

    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(one(number))


async def test_seeds_and_outputs_are_as_together(engines: Engines) -> None:
    one = request(PICTURES[0], sampling=Sampling(temperature=2.0, seed=11), num_sequences=3, cache=BYPASS)
    for way in WAYS.values():
        same(await way(engines, one), await ask_all(engines.whole, one))


# -- who an item is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["both", "prefill"])
async def test_a_picture_is_known_again_however_it_came(engines: Engines, role: str) -> None:
    """By raw bytes or data URI: one identity, so the second prompt finds the first one's blocks."""
    raw = request(PICTURES[2])
    uri = replace(raw, media=(MediaItem(Modality.IMAGE, DataUri(data_uri(PICTURES[2]))),))
    desk: Desk = getattr(engines, role)
    reused = []
    for one in (raw, uri, raw):
        answer = await desk.accept(await referring(engines, one))
        events = [event async for event in answer]
        await answer.aclose()
        reused.append(events[-1].usage.cached_prompt_tokens)
        await engines.prefill.abort_all()
    assert reused[0] == 0
    assert reused[1] == reused[2] > 16
    together = [usage_of(await ask(engines.whole, one)).cached_prompt_tokens for one in (raw, uri)]
    assert together == reused[:2]


async def test_salts_share_nothing(engines: Engines) -> None:
    for salt in ("a", "b"):
        (got,) = await ask_both(engines, request(PICTURES[0], cache=CacheOptions(salt=salt)))
        assert usage_of(got).cached_prompt_tokens == 0


async def test_token_ids_are_enough(engines: Engines) -> None:
    one = request(PICTURES[0], PICTURES[1])
    expected = await ask_all(engines.whole, one)
    ids = engines.whole._intake.frontend.tokenizer.encode(one.prompt)
    same(await ask_both(engines, replace(one, prompt=tuple(ids))), expected)
    assert engines.both.statistics()["intake"]["tokenisations"] == 0


# -- what is spent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", transports(), indirect=True)
@pytest.mark.parametrize("role", ["both", "prefill"])
async def test_a_reference_is_used_once_and_the_next_fresh_one_works(engines: Engines, role: str) -> None:
    desk: Desk = getattr(engines, role)
    asked = await referring(engines, request(*PICTURES[:2]))
    for number in range(3):
        fresh = await referring(engines, request(*PICTURES[:2]))
        for one, fails in ((asked, number > 0), (fresh, False)):
            answer = await desk.accept(replace(one, request_id=f"{number}"))
            events = [event async for event in answer]
            await answer.aclose()
            if fails:
                (failed,) = events
                assert isinstance(failed, Failed)
                assert isinstance(failed.error, ReferenceNotFound)
                assert str(failed.error).startswith(("media item 0: ", "media item 1: "))  # both are spent
            else:
                assert not isinstance(events[-1], Failed)
        await desk.abort_all()
    assert all(check.state is HealthState.READY for check in await desk.health(probe=True))


async def test_media_themselves_are_refused_where_there_is_no_tower(engines: Engines) -> None:
    for desk in (engines.both, engines.prefill):
        with pytest.raises(RoleMismatch, match="encoder engine first"):
            await desk.accept(request(PICTURES[0]))


async def test_several_encoders_of_one_request(engines: Engines, models: Models) -> None:
    """References are one by one, whoever made them, and in any order."""
    first = await encode(engines.encoder, request(PICTURES[0]))
    second = await encode(engines.encoder, request(PICTURES[1], PICTURES[2]))
    one = request(PICTURES[2], PICTURES[0], PICTURES[1])
    given = (second[1], first[0], second[0])
    same(await ask_all(engines.both, replace(one, media=(), references=given)), await ask_all(engines.whole, one))


async def test_what_waits_counts_against_the_quota_though_it_lies_in_files(models: Models, tmp_path: Path) -> None:
    async with running_engines(models, SharedDir(tmp_path / "rows", 60.0), quota=2 * ROW_LAYOUT.block_bytes) as engines:
        asked = [request(PICTURES[0], request_id=f"{number}") for number in range(3)]
        waiting = [await referring(engines, one) for one in asked[:2]]
        third = asyncio.create_task(referring(engines, asked[2]))
        scheduler = engines.encoder._engine._scheduler
        async with asyncio.timeout(20):
            while scheduler.statistics().accepted < 3 or scheduler.busy:
                await asyncio.sleep(0.001)
        assert scheduler.statistics().handed_over == 2
        for one in waiting:
            same(await ask_all(engines.both, one), await ask_all(engines.whole, asked[0]))
        same(await ask_all(engines.both, await third), await ask_all(engines.whole, asked[0]))
        await engines.idle()
        assert scheduler.statistics().held_bytes == 0


# -- whoever leaves, at any moment -------------------------------------------------------------------------------------


async def check_storm(engines: Engines, total: int, concurrency: int, seed: int) -> None:
    """Requests that are aborted, left or read to the end, at random moments, over a small arena.

    The references of those that were aborted or left are used once more: each is as good as new, or spent.
    """
    rng = random.Random(seed)
    pictures = [(), PICTURES[:1], PICTURES[1:3], PICTURES]
    asked = [request(*pngs, stopping=Stopping(max_tokens=8, ignore_eos=True)) for pngs in pictures]
    expected = [(await ask(engines.whole, one)).token_ids for one in asked]
    tally: Counter[str] = Counter()

    async def moment() -> None:
        for _ in range(rng.choice((0, 0, 1, 3, 10, 30))):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.05)

    async def read(desk: Desk, kind: int, given: GenerateRequest) -> None:
        """To its end, which is the right one; or, of a request that comes late, that its references are spent."""
        answer = await desk.accept(given)
        *events, end = [event async for event in answer]
        await answer.aclose()
        if desk is engines.prefill:
            await desk.abort(given.request_id)  # its session, if there is one
        if isinstance(end, Failed):
            assert isinstance(end.error, ReferenceNotFound), end.error
            assert given.request_id.endswith("again")
            tally["spent", desk] += 1
            return
        if desk is engines.both:
            assert tuple(token for event in events for token in event.token_ids) == expected[kind]
        tally["again" if given.request_id.endswith("again") else "read"] += 1

    async def one(number: int) -> None:
        kind, name, how = rng.randrange(len(asked)), f"{number}", rng.choice(("read", "abort", "leave"))
        desk = (engines.both, engines.prefill)[number % 2]
        given = await referring(engines, replace(asked[kind], request_id=name))
        given = replace(given, handoff=desk is engines.prefill)
        if how == "read":
            await read(desk, kind, given)
        else:
            answer = await desk.accept(given)
            await moment()
            if how == "abort":
                await desk.abort(name)
                assert [event async for event in answer]
            await answer.aclose()
            await moment()
            await read(desk, kind, replace(given, request_id=f"{name} again"))
        for reference in given.references:  # what nobody took
            await engines.encoder.abort_rows(reference.item.handle.session_id)

    numbers = iter(range(total))

    async def worker() -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    await engines.idle()
    assert tally["read"] > total / 5
    assert tally["again"] > 0
    for desk in (engines.both, engines.prefill):
        now = desk.statistics()["row_intake"]
        assert now["taken"] > 0
        assert now["given_up"] > 0
        assert now["held_bytes"] == now["waiting"] == now["fetching"] == now["quarantined_bytes"] == 0
        assert now["gone"] == tally["spent", desk]
        assert now["failed"] == now["damaged"] == now["crowded"] == 0
        assert all(check.state is HealthState.READY for check in await desk.health(probe=True))


ARENA = 256 * 1024
"""Holds the rows of one request of four pictures, and hardly more."""


@pytest.mark.parametrize("rows", transports(), indirect=True)
async def test_whoever_leaves_leaves_nothing_behind(models: Models, rows: Transport) -> None:
    async with running_engines(models, rows, quota=ARENA) as engines:
        await check_storm(engines, 80, 10, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rows", transports(), indirect=True)
async def test_whoever_leaves_leaves_nothing_behind_a_thousand_times(models: Models, rows: Transport) -> None:
    async with running_engines(models, rows, quota=ARENA) as engines:
        await check_storm(engines, 1000, 24, seed=2)


# -- other shapes of engines -------------------------------------------------------------------------------------------


async def test_in_bfloat16_it_is_as_together() -> None:
    async with running_engines(load_models(options(dtype="bfloat16"))) as engines:
        for pictures in (PICTURES[:1], PICTURES[1:]):
            one = request(*pictures, cache=BYPASS)
            for way in WAYS.values():
                same(await way(engines, one), await ask_all(engines.whole, one))
        await engines.idle()


async def test_who_has_to_give_way_keeps_its_rows() -> None:
    """Blocks run out, so prompts are computed again: with rows whose references are long spent."""
    async with running_engines(load_models(options(kv_cache_bytes=2 * MIB))) as engines:
        asked = [
            request(picture, request_id=f"{number}", cache=BYPASS, stopping=Stopping(max_tokens=150, ignore_eos=True))
            for number, picture in enumerate(PICTURES * 2)
        ]
        expected = [await ask_all(engines.whole, one) for one in asked]
        got = await asyncio.gather(*(ask_both(engines, one) for one in asked))
        for mine, others in zip(got, expected, strict=True):
            same(mine, others)
        assert engines.both.statistics()["scheduler"]["preemptions"] > 0
        assert engines.both.statistics()["row_intake"]["taken"] == len(asked)
        await engines.idle()
