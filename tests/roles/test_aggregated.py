"""The aggregated role with a real model: admission, media errors, stop strings, aborts at every moment."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.drawings import data_uri, shape_png
from tests.roles.running import ask, load_model, options, running
from triptych.core.errors import (
    Draining,
    DuplicateRequest,
    InvalidRequest,
    MediaError,
    ModelNotFound,
    Overloaded,
    PlaceholderMismatch,
    PromptTooLong,
    RequestNotFound,
    RoleMismatch,
    UnsupportedFeature,
)
from triptych.core.events import EosToken, Failed, Finished, FinishReason, StopText, StopToken, Tokens
from triptych.core.logprobs import LogprobOptions
from triptych.core.media import DataUri, MediaItem, Modality, RawBytes
from triptych.core.request import CacheOptions, GenerateRequest, Sampling, Stopping
from triptych.core.session import SealedSession
from triptych.roles.contract import AbortOutcome, HealthState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from triptych.cli.loaded import LoadedModel
    from triptych.roles.desk import Desk

CHOSEN = options()
MARKER = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(CHOSEN)


@pytest.fixture
async def role(loaded: LoadedModel) -> AsyncIterator[Desk]:
    async with running(loaded) as one:
        yield one


def request(question: str = "what shape is this?", *pngs: bytes, **changes: object) -> GenerateRequest:
    prompt = f"<|im_start|>user\n{MARKER * len(pngs)}{question}<|im_end|>\n<|im_start|>assistant\n"
    plain = GenerateRequest(
        request_id="r",
        model="demo",
        prompt=prompt,
        media=tuple(MediaItem(Modality.IMAGE, RawBytes(png)) for png in pngs),
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_tokens=12),
    )
    return replace(plain, **changes)


RED = shape_png("circle", "red")


async def test_raw_bytes_and_data_uri_are_the_same_item(role: Desk) -> None:
    first = await ask(role, request("what colour is the circle?", RED))
    uri = MediaItem(Modality.IMAGE, DataUri(data_uri(RED)))
    second = await ask(role, request("what colour is the circle?", RED, media=(uri,)))
    assert first.token_ids == second.token_ids
    assert isinstance(second.end, Finished)
    assert second.end.usage.cached_prompt_tokens > 0
    assert role.statistics()["encoder_cache"]["entries"] == 1


async def test_a_salt_shares_nothing(role: Desk) -> None:
    await ask(role, request("what colour is the circle?", RED))
    salted = await ask(role, request("what colour is the circle?", RED, cache=CacheOptions(salt="tenant")))
    assert isinstance(salted.end, Finished)
    assert salted.end.usage.cached_prompt_tokens == 0


async def test_bypass_reuses_nothing_and_answers_the_same(role: Desk) -> None:
    first = await ask(role, request("what colour is the circle?", RED))
    bypass = CacheOptions(bypass_prefix_cache=True)
    second = await ask(role, request("what colour is the circle?", RED, cache=bypass))
    assert isinstance(second.end, Finished)
    assert second.end.usage.cached_prompt_tokens == 0
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "nobody"}, ModelNotFound),
        ({"media": (MediaItem(Modality.IMAGE, RawBytes(RED)),) * 2}, PlaceholderMismatch),
        ({"media": ()}, PlaceholderMismatch),
        ({"media": (MediaItem(Modality.VIDEO, RawBytes(RED)),)}, UnsupportedFeature),
        ({"prompt": (10**6,)}, InvalidRequest),
        ({"prompt": "shape " * 20_000, "media": ()}, PromptTooLong),
        ({"prompt": (5,) * 100_000, "media": ()}, PromptTooLong),
        ({"media": (MediaItem(Modality.IMAGE, RawBytes(RED)),) * 65}, InvalidRequest),
        ({"session": SealedSession("1", b"")}, UnsupportedFeature),
        ({"handoff": True}, RoleMismatch),
    ],
)
async def test_refusals_hold_nothing(role: Desk, changes: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        await role.accept(request("what is it?", RED, **changes))
    assert "\n" not in str(caught.value)
    assert isinstance((await ask(role, request())).end, Finished)


@pytest.mark.parametrize(
    "data", [b"", b"junk", RED[:60], RED[: len(RED) // 2]], ids=["empty", "junk", "header", "cut off"]
)
async def test_a_broken_picture_fails_its_own_request_only(role: Desk, data: bytes) -> None:
    bad = request("and this?", RED, data, request_id="bad")
    good, failed = await asyncio.gather(ask(role, request("what is it?", RED)), ask(role, bad))
    assert isinstance(good.end, Finished)
    assert isinstance(failed.end, Failed)
    assert isinstance(failed.end.error, MediaError)
    assert failed.end.error.index == 1
    assert role.load().running_requests == 0


async def test_a_live_id_is_refused_and_free_again_after_its_stream(role: Desk) -> None:
    answer = await role.accept(request())
    with pytest.raises(DuplicateRequest):
        await role.accept(request())
    await answer.aclose()
    assert isinstance((await ask(role, request())).end, Finished)


async def test_stop_strings_are_cut_and_named(role: Desk) -> None:
    whole = (await ask(role, request(stopping=Stopping(max_tokens=40, ignore_eos=True)))).text
    stop = whole[5:8]
    expected = whole[: whole.index(stop)]
    cut = await ask(role, request(stopping=Stopping(max_tokens=40, ignore_eos=True, stop_strings=(stop,))))
    assert isinstance(cut.end, Finished)
    assert (cut.text, cut.end.reason, cut.end.stop) == (expected, FinishReason.STOP, StopText(stop))
    assert cut.end.usage.completion_tokens == len(cut.token_ids)
    kept = Stopping(max_tokens=40, ignore_eos=True, stop_strings=(stop,), include_stop_in_output=True)
    assert (await ask(role, request(stopping=kept))).text == expected + stop


async def test_stop_ids_and_eos_are_told_apart(role: Desk) -> None:
    eos = await ask(role, request("what colour is the circle?", RED, stopping=Stopping(max_tokens=60)))
    assert isinstance(eos.end, Finished)
    assert isinstance(eos.end.stop, EosToken)
    first = eos.token_ids[0]
    stopped = await ask(role, request("what colour is the circle?", RED, stopping=Stopping(stop_token_ids=(first,))))
    assert isinstance(stopped.end, Finished)
    assert stopped.end.stop == StopToken(first)
    assert stopped.token_ids == ()


async def test_min_tokens_hold_off_the_end(role: Desk) -> None:
    answer = await ask(role, request("what colour is the circle?", RED, stopping=Stopping(max_tokens=9, min_tokens=9)))
    assert len(answer.token_ids) == 9
    assert isinstance(answer.end, Finished)
    assert answer.end.reason is FinishReason.LENGTH


async def test_an_answer_ends_where_the_context_does(role: Desk) -> None:
    answer = await ask(role, request(stopping=Stopping(ignore_eos=True)))
    assert isinstance(answer.end, Finished)
    usage = answer.end.usage
    assert usage.prompt_tokens + usage.completion_tokens == role.model.max_context
    assert answer.end.reason is FinishReason.LENGTH


async def test_seeds_repeat_whatever_else_runs(role: Desk) -> None:
    def sampled(index: int, seed: int) -> GenerateRequest:
        sampling = Sampling(temperature=30.0, seed=seed)
        stopping = Stopping(max_tokens=20, ignore_eos=True)
        return request("hello", request_id=f"{index}", sampling=sampling, stopping=stopping)

    alone = [await ask(role, sampled(0, seed)) for seed in range(6)]
    together = await asyncio.gather(*(ask(role, sampled(1 + seed, seed)) for seed in range(6)))
    assert [a.token_ids for a in alone] == [t.token_ids for t in together]
    assert len({a.token_ids for a in alone}) > 1


async def test_sixteen_different_requests_answer_together_as_alone(role: Desk) -> None:
    samplings = (
        Sampling(temperature=0),
        Sampling(temperature=3.0, seed=1),
        Sampling(temperature=8.0, top_k=40, seed=2),
        Sampling(temperature=8.0, top_p=0.9, seed=3),
        Sampling(temperature=8.0, min_p=0.01, seed=4),
        Sampling(temperature=5.0, frequency_penalty=1.0, presence_penalty=0.5, seed=5),
        Sampling(temperature=5.0, repetition_penalty=1.5, seed=6),
        Sampling(temperature=30.0, seed=7),
    )
    stopping = Stopping(max_tokens=24, ignore_eos=True)
    requests = [
        request(
            question, *pngs, request_id=f"{number}{len(pngs)}", sampling=sampling, stopping=stopping, logprobs=wanted
        )
        for number, sampling in enumerate(samplings)
        for question, pngs, wanted in (
            (f"what shape is this? {number}", (RED,), LogprobOptions()),
            (f"hello {number}", (), LogprobOptions(output=True)),
        )
    ]
    assert len(requests) == 16
    alone = [await ask(role, one) for one in requests]
    together = await asyncio.gather(*(ask(role, one) for one in requests))
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert len({answer.token_ids for answer in alone}) == 16


async def test_a_prompt_that_is_too_long_is_told_both_lengths(role: Desk) -> None:
    window = role.model.max_context
    with pytest.raises(PromptTooLong, match=rf"prompt has {window} tokens.* {window} tokens"):
        await role.accept(request(prompt=(5,) * window))


async def test_detokenize_false_gives_ids_only(role: Desk) -> None:
    plain = await ask(role, request(stopping=Stopping(max_tokens=6, ignore_eos=True)))
    bare = await ask(role, request(stopping=Stopping(max_tokens=6, ignore_eos=True), detokenize=False))
    assert bare.token_ids == plain.token_ids
    assert bare.text == ""


async def test_stop_strings_are_found_where_no_text_is_wanted(role: Desk) -> None:
    plain = await ask(role, request("what colour is the circle?", RED))
    assert len(plain.text) > 2
    stopping = Stopping(max_tokens=20, stop_strings=(plain.text[1:3],))
    shown = await ask(role, request("what colour is the circle?", RED, stopping=stopping))
    bare = await ask(role, request("what colour is the circle?", RED, stopping=stopping, detokenize=False))
    assert isinstance(shown.end, Finished)
    assert isinstance(bare.end, Finished)
    assert bare.end.stop == shown.end.stop == StopText(plain.text[1:3])
    assert bare.end.reason is FinishReason.STOP
    assert (bare.token_ids, bare.end.usage) == (shown.token_ids, shown.end.usage)
    assert (bare.text, shown.text) == ("", plain.text[:1])


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
async def test_abort_at_any_moment(role: Desk, steps: int) -> None:
    answer = await role.accept(request("what is it?", RED, stopping=Stopping(ignore_eos=True)))
    events = 0
    while events < steps:
        assert isinstance(await anext(answer), Tokens)
        events += 1
    assert await role.abort("r") is AbortOutcome.ABORTED
    rest = [event async for event in answer]
    assert isinstance(rest[-1], Finished)
    assert rest[-1].reason is FinishReason.CANCELLED
    await answer.aclose()
    assert await role.abort("r") is AbortOutcome.ALREADY_FINISHED
    with pytest.raises(RequestNotFound):
        await role.abort("never seen")
    await until_idle(role)


async def test_closing_early_frees_everything(role: Desk) -> None:
    for steps in (0, 1, 3):
        answer = await role.accept(request("what is it?", RED, stopping=Stopping(ignore_eos=True)))
        for _ in range(steps):
            await anext(answer)
        await answer.aclose()
    await until_idle(role)


async def test_health_and_probe(role: Desk) -> None:
    checks = {check.name: check.state for check in await role.health(probe=False)}
    assert set(checks.values()) == {HealthState.READY}
    first, second = await asyncio.gather(role.health(probe=True), role.health(probe=True))
    assert first[-1] == second[-1]
    assert first[-1].name == "inference_probe"
    assert first[-1].state is HealthState.READY


async def test_drain_refuses_waits_and_ends(loaded: LoadedModel) -> None:
    async with running(loaded) as role:
        answer = await role.accept(request(stopping=Stopping(max_tokens=30, ignore_eos=True)))
        draining = asyncio.create_task(role.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            await role.accept(request(request_id="late"))
        events = [event async for event in answer]
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is FinishReason.LENGTH
        await answer.aclose()
        await draining
        await role.drain(0)


async def until_idle(role: Desk) -> None:
    """Aborted requests are freed by the engine's thread, soon."""
    async with asyncio.timeout(20):
        while role.load().running_requests or role.load().queued_requests or role.load().used_blocks:
            await asyncio.sleep(0.01)


async def test_who_leaves_the_queue_gives_the_place_back_and_nothing_is_decoded(loaded: LoadedModel) -> None:
    busy = shape_png("circle", "red", 1500)
    async with running(loaded) as role:
        answers = [await role.accept(request("what?", busy, request_id=f"{i}")) for i in range(20)]
        waiting = role.statistics()["media_admission"]["waiting"]
        assert waiting == 20 - loaded.frontend.limits.media_preparation_limit
        for answer in reversed(answers):  # else each that leaves makes room for another
            await answer.aclose()
        assert role.statistics()["media_admission"]["waiting"] == 0
        assert role.statistics()["media_admission"]["abandoned"] == waiting
        await until_idle(role)
        assert role.statistics()["media_admission"]["admitted"] == loaded.frontend.limits.media_preparation_limit
        assert role.statistics()["scheduler"]["accepted"] == 0


async def test_a_full_media_queue_refuses_before_acceptance(loaded: LoadedModel) -> None:
    limits = replace(loaded.frontend.limits, max_waiting_preparations=2, media_preparation_limit=1)
    small = replace(loaded, frontend=replace(loaded.frontend, limits=limits))
    async with running(small) as role:
        answers = [await role.accept(request("what?", RED, request_id=f"{i}")) for i in range(3)]
        with pytest.raises(Overloaded, match="--media-preparation-limit"):
            await role.accept(request("what?", RED, request_id="one too many"))
        ends = [[event async for event in answer][-1] for answer in answers]
        assert all(isinstance(end, Finished) for end in ends)


async def test_min_tokens_that_cannot_be_had_is_refused_by_name(role: Desk) -> None:
    window = role.model.max_context
    with pytest.raises(InvalidRequest, match="min_tokens"):
        await role.accept(request(stopping=Stopping(min_tokens=window)))
    with pytest.raises(PromptTooLong, match="min_tokens"):
        await role.accept(request(stopping=Stopping(min_tokens=window - 3)))


async def test_what_a_drain_cuts_off_may_be_tried_elsewhere(loaded: LoadedModel) -> None:
    async with running(loaded) as role:
        answer = await role.accept(request(stopping=Stopping(ignore_eos=True)))
        await anext(answer)
        await role.drain(0)
        last = [event async for event in answer][-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, Draining)
        assert last.error.retryable
        await answer.aclose()
