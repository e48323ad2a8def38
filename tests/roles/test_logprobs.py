"""Log probabilities: how many may be asked for, and that they come with the right tokens whatever else happens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.drawings import shape_png
from tests.roles.fake_engine import CONTEXT, FakeEngine, fake_role, frontend
from tests.roles.running import ask, ask_all, load_model, options, running
from triptych.core.errors import InvalidRequest
from triptych.core.events import Failed, Finished
from triptych.core.logprobs import (
    MAX_OUTPUT_ENTRIES,
    MAX_PROMPT_ENTRIES,
    Candidates,
    GivenIds,
    LogprobOptions,
    TopN,
    WholeVocabulary,
)
from triptych.core.media import MediaItem, Modality, RawBytes
from triptych.core.request import GenerateRequest, Sampling, Stopping
from triptych.roles.logprob_bounds import check_output_entries, check_prompt_entries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from triptych.roles.desk import Desk

VOCAB = 151_936
MARKER = "<|vision_start|><|image_pad|><|vision_end|>"
PICTURE = MediaItem(Modality.IMAGE, RawBytes(shape_png("circle", "red")))


@pytest.fixture(scope="module")
def loaded():
    return load_model(options())


@pytest.fixture
async def role(loaded) -> AsyncIterator[Desk]:
    async with running(loaded) as one:
        yield one


def request(logprobs: LogprobOptions, **changes: object) -> GenerateRequest:
    plain = GenerateRequest(
        request_id="r",
        model="demo",
        prompt="<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\n",
        sampling=Sampling(temperature=30.0, seed=1),
        stopping=Stopping(max_tokens=16, ignore_eos=True),
        logprobs=logprobs,
    )
    return replace(plain, **changes)


# -- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidates", "each"),
    [(None, 1), (TopN(0), 1), (TopN(7), 8), (GivenIds((1, 1, 2)), 4), (WholeVocabulary(), VOCAB + 1)],
)
def test_the_last_number_of_entries_that_is_allowed(candidates: Candidates | None, each: int) -> None:
    most = MAX_PROMPT_ENTRIES // each
    start = 5
    prompt = LogprobOptions(prompt=True, prompt_candidates=candidates, prompt_start=start)
    check_prompt_entries(prompt, start + most, VOCAB)
    with pytest.raises(InvalidRequest, match=rf"are {(most + 1) * each} .* at most {MAX_PROMPT_ENTRIES}: ask for"):
        check_prompt_entries(prompt, start + most + 1, VOCAB)
    check_prompt_entries(LogprobOptions(), 10**9, VOCAB)

    most = MAX_OUTPUT_ENTRIES // each
    output = request(LogprobOptions(output=True, output_candidates=candidates), stopping=Stopping(max_tokens=most + 1))
    check_output_entries(output, most, VOCAB)
    with pytest.raises(InvalidRequest, match=rf"{(most + 1) * each} .* at most {MAX_OUTPUT_ENTRIES}: lower max_tokens"):
        check_output_entries(output, most + 1, VOCAB)
    with pytest.raises(InvalidRequest, match="2 outputs"):
        check_output_entries(replace(output, num_sequences=2), most // 2 + 1, VOCAB)
    check_output_entries(request(LogprobOptions()), 10**9, VOCAB)


def test_the_first_token_has_none() -> None:
    check_prompt_entries(LogprobOptions(prompt=True), MAX_PROMPT_ENTRIES + 1, VOCAB)


@pytest.mark.parametrize("token_id", [1024, 2**31, -1])
@pytest.mark.parametrize("field", ["prompt", "output"])
async def test_candidates_that_are_no_tokens(field: str, token_id: int) -> None:
    options = LogprobOptions(**{field: True, f"{field}_candidates": GivenIds((3, token_id))})
    with pytest.raises(InvalidRequest, match=rf"response.{field}_candidates: token id {token_id} .* 1024"):
        await fake_role(FakeEngine()).accept(request(options))


async def test_what_is_refused_before_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    role = fake_role(FakeEngine())
    tokens = len(frontend().tokenizer.encode(request(LogprobOptions()).prompt))
    with pytest.raises(InvalidRequest, match=rf"prompt_logprob_start is {tokens} .* only {tokens} tokens"):
        await role.accept(request(LogprobOptions(prompt=True, prompt_start=tokens)))
    await (await role.accept(request(LogprobOptions(prompt=True, prompt_start=tokens - 1)))).aclose()
    for limit in ("MAX_PROMPT_ENTRIES", "MAX_OUTPUT_ENTRIES"):
        monkeypatch.setattr(f"triptych.roles.logprob_bounds.{limit}", 1000)
    for asked in (
        LogprobOptions(prompt=True, prompt_candidates=WholeVocabulary()),
        LogprobOptions(output=True, output_candidates=WholeVocabulary()),
    ):
        with pytest.raises(InvalidRequest, match="at most 1000"):
            await role.accept(request(asked))


async def test_what_is_known_only_with_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expansion makes a prompt longer: a start may lie in it then, and there may be too many numbers."""
    engine = FakeEngine()
    role = fake_role(engine)

    async def outcome(options: LogprobOptions) -> str:
        answer = await role.accept(request(options, prompt=MARKER, media=(PICTURE,)))
        (event,) = [event async for event in answer]
        await answer.aclose()
        assert isinstance(event, Failed)
        assert isinstance(event.error, InvalidRequest)
        return str(event.error)

    said = await outcome(LogprobOptions(prompt=True, prompt_start=CONTEXT))
    length = int(said.split("only ")[1].split()[0])
    assert length > 10
    assert str(CONTEXT) in said
    answer = await role.accept(
        request(LogprobOptions(prompt=True, prompt_start=length - 1), prompt=MARKER, media=(PICTURE,))
    )
    while not engine.submitted:
        await asyncio.sleep(0.001)
    await answer.aclose()
    monkeypatch.setattr("triptych.roles.logprob_bounds.MAX_PROMPT_ENTRIES", length - 2)
    assert f"are {length - 1} " in await outcome(LogprobOptions(prompt=True))


# -- with a real model ----------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [False, True])
async def test_outputs_have_the_numbers_of_requests_of_their_own(role: Desk, stop: bool) -> None:
    asked = LogprobOptions(prompt=True, prompt_candidates=TopN(2), output=True, output_candidates=TopN(3))
    several = request(asked, num_sequences=3)
    if stop:
        text = (await ask(role, replace(several, num_sequences=1))).text
        stops = Stopping(max_tokens=16, ignore_eos=True, stop_strings=(text[6:8],))
        several = replace(several, stopping=stops)
    bare = await ask_all(role, replace(several, logprobs=LogprobOptions()))
    told = await ask_all(role, several)
    lone = await ask(role, replace(several, num_sequences=1))
    assert [(one.token_ids, one.text) for one in told] == [(one.token_ids, one.text) for one in bare]
    for one in told:
        assert isinstance(one.end, Finished)
        assert len(one.logprobs) == len(one.token_ids)
        for token_id, number in zip(one.token_ids, one.logprobs, strict=True):
            assert number.candidates is not None
            assert len(number.candidates.token_ids) == 3
            if number.rank <= 3:
                at = number.candidates.token_ids.tolist().index(token_id)
                assert number.candidates.logprobs[at] == pytest.approx(number.logprob)
    assert [one.logprob for one in told[0].logprobs] == pytest.approx([one.logprob for one in lone.logprobs], abs=1e-4)
    prompt = told[0].prompt
    assert prompt is not None
    assert prompt.request_id == "r"
    assert len(prompt.logprobs) == len(prompt.token_ids)
    assert [one is None for one in prompt.logprobs] == [True] + [False] * (len(prompt.token_ids) - 1)


async def test_the_prompt_is_told_expanded_and_from_its_start(role: Desk) -> None:
    start = 11  # within the picture
    asked = LogprobOptions(prompt=True, prompt_start=start)
    answered = await ask(role, request(asked, prompt=f"{MARKER}what is it?", media=(PICTURE,)))
    prompt = answered.prompt
    assert prompt is not None
    assert isinstance(answered.end, Finished)
    assert answered.end.usage is not None
    assert len(prompt.token_ids) == answered.end.usage.prompt_tokens > start
    assert [one is None for one in prompt.logprobs] == [True] * start + [False] * (len(prompt.token_ids) - start)


async def test_the_whole_vocabulary(role: Desk) -> None:
    asked = LogprobOptions(output=True, output_candidates=WholeVocabulary())
    answered = await ask(role, request(asked, stopping=Stopping(max_tokens=3, ignore_eos=True)))
    for token_id, number in zip(answered.token_ids, answered.logprobs, strict=True):
        assert number.candidates is not None
        assert number.candidates.token_ids.tolist() == list(range(len(number.candidates.token_ids)))
        assert number.candidates.logprobs[token_id] == pytest.approx(number.logprob)
        assert number.candidates.ranks[token_id] == number.rank
