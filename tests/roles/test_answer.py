"""Outputs of one request become one stream: numbers, texts, stop strings, log probabilities and one end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import Internal
from triptych.core.events import (
    EosToken,
    Event,
    Failed,
    Finished,
    FinishReason,
    Prompt,
    Span,
    StopText,
    Tokens,
    Usage,
    is_terminal,
)
from triptych.core.logprobs import CandidateColumns, TokenLogprob
from triptych.core.request import GenerateRequest, Stopping
from triptych.roles import answer as answer_module
from triptych.roles.answer import AnswerStream
from triptych.roles.output import outputs_of
from triptych.roles.visible_text import token_texts

HALF = 300
"""A token that is half a character."""


@dataclass
class Letters:
    """A tokenizer whose tokens are the characters; counts what it is asked."""

    leading_spaces: int = 0
    special_ids: frozenset[int] = frozenset({0})
    calls: int = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.calls += 1
        return b"\xc3" if token_id == HALF else chr(token_id).encode()


@dataclass
class Stage:
    """An answer, the aborts it asked for, and a request of the engine for each output."""

    request: GenerateRequest
    tokenizer: Letters = field(default_factory=Letters)
    aborted: list[str] = field(default_factory=list)
    closed: list[AnswerStream] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answer = AnswerStream(
            self.request.request_id,
            outputs_of(self.request, [f"7.{index}" for index in range(self.request.num_sequences)], self.tokenizer),
            token_text=None,
            abort=self.aborted.append,
            on_close=self.closed.append,
        )

    def say(self, index: int, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        self.answer.push(Tokens(f"7.{index}", tuple(map(ord, text)), logprobs=logprobs))

    def end(self, index: int, reason: FinishReason = FinishReason.LENGTH, tokens: int = 0, **more: object) -> None:
        self.answer.push(Finished(f"7.{index}", reason, Usage(10, tokens, 4 * (index == 0)), **more))

    async def rest(self) -> list[Event]:
        return [event async for event in self.answer]


def stage(outputs: int = 1, *stops: str, include: bool = False, detokenize: bool = True) -> Stage:
    stopping = Stopping(stop_strings=stops, include_stop_in_output=include)
    return Stage(GenerateRequest("r", "m", "prompt", stopping=stopping, num_sequences=outputs, detokenize=detokenize))


def number(value: int, candidates: int | None = None) -> TokenLogprob:
    """A log probability that bears a number."""
    if candidates is None:
        return TokenLogprob(-float(value), 1)
    ids = np.arange(candidates, dtype=np.int32)
    return TokenLogprob(-float(value), 1, CandidateColumns(ids, -ids.astype(np.float32), ids + 1))


async def test_outputs_are_numbered_and_the_last_end_has_the_sums() -> None:
    s = stage(2)
    s.say(0, "ab")
    s.say(1, "x")
    s.say(0, "c")
    s.end(1, FinishReason.STOP, tokens=2, stop=EosToken(5), spans=(Span("queue", 1, 2), Span("decode", 3, 9)))
    assert not s.answer.ended
    s.end(0, tokens=3, spans=(Span("queue", 1, 2), Span("prefill", 2, 3), Span("decode", 3, 5)))
    assert s.answer.ended
    first, other, end, last = await s.rest()
    assert first == Tokens("r", (97, 98, 99), "abc", output_index=0)
    assert other == Tokens("r", (120,), "x", output_index=1)
    assert end == Finished("r", FinishReason.STOP, None, EosToken(5), output_index=1)
    assert isinstance(last, Finished)
    assert (last.reason, last.output_index, last.usage) == (FinishReason.LENGTH, 0, Usage(10, 5, 4))
    assert [span.name for span in last.spans] == ["queue", "prefill", "decode"]
    assert last.spans[2].end - last.spans[2].start == pytest.approx(6)  # until the last output ended
    assert s.aborted == []


async def test_stop_strings_are_each_outputs_own() -> None:
    s = stage(3, "##")
    for index, text in enumerate(("a#", "b##b", "c#c")):
        s.say(index, text)
    assert s.aborted == ["7.1"]
    s.say(1, "late")
    s.say(0, "#z")
    assert s.aborted == ["7.1", "7.0"]
    s.end(1, FinishReason.CANCELLED, tokens=9)
    s.end(0, FinishReason.CANCELLED, tokens=4)
    s.say(2, "#")
    s.end(2, tokens=4)
    events = await s.rest()
    texts = ["".join(e.text for e in events if isinstance(e, Tokens) and e.output_index == i) for i in range(3)]
    assert texts == ["a", "b", "c#c#"]
    ends = {e.output_index: e for e in events if isinstance(e, Finished)}
    assert [ends[i].stop for i in range(3)] == [StopText("##"), StopText("##"), None]
    assert [ends[i].reason for i in range(3)] == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    # up to and with the token that completed the stop string
    assert ends[2].usage == Usage(10, 3 + 3 + 4, 4)


async def test_abort_before_the_engine_ends_every_output_once() -> None:
    s = stage(3)
    s.answer.cancel()
    events = await s.rest()
    assert [(e.output_index, e.reason) for e in events if isinstance(e, Finished)] == [
        (index, FinishReason.CANCELLED) for index in range(3)
    ]
    assert [is_terminal(event) for event in events] == [False, False, True]


async def test_leaving_the_engine_spares_what_has_ended() -> None:
    s = stage(3)
    s.end(1, tokens=1)
    s.answer.leave_engine()
    assert s.aborted == ["7.0", "7.2"]
    s.end(0, FinishReason.CANCELLED, tokens=2)
    s.end(2, FinishReason.CANCELLED, tokens=3)
    reasons = {e.output_index: e.reason for e in await s.rest() if isinstance(e, Finished)}
    assert reasons == {0: FinishReason.CANCELLED, 1: FinishReason.LENGTH, 2: FinishReason.CANCELLED}


async def test_a_failed_output_fails_the_request_once_and_ends_the_others() -> None:
    s = stage(3)
    s.say(0, "a")
    s.end(2, tokens=1)
    s.answer.push(Failed("7.1", Internal("broken")))
    assert s.aborted == ["7.0"]
    s.answer.push(Failed("7.0", Internal("broken as well")))
    s.end(0, FinishReason.CANCELLED)
    events = await s.rest()
    assert [type(event) for event in events] == [Tokens, Finished, Failed]
    assert isinstance(events[-1], Failed)
    assert str(events[-1].error) == "broken"
    assert events[-1].request_id == "r"


async def test_the_prompt_comes_once_and_first() -> None:
    s = stage(2)
    s.answer.push(Prompt("7.0", (1, 2), (None, number(3))))
    s.say(1, "x")
    s.say(0, "a")
    prompt, *deltas = [await anext(s.answer) for _ in range(3)]
    assert isinstance(prompt, Prompt)
    assert (prompt.request_id, prompt.token_ids, len(prompt.logprobs)) == ("r", (1, 2), 2)
    assert all(isinstance(delta, Tokens) for delta in deltas)


async def test_whoever_waits_when_the_answer_is_closed_is_let_go() -> None:
    s = stage()
    waiting = asyncio.create_task(anext(s.answer, None))
    await asyncio.sleep(0)
    s.answer.close()
    assert await waiting is None


async def test_token_ids_alone_cost_no_detokenising() -> None:
    s = stage(2, detokenize=False)
    s.say(0, "abc")
    s.say(1, "d")
    s.end(0)
    s.end(1)
    assert [e.token_ids for e in await s.rest() if isinstance(e, Tokens)] == [(97, 98, 99), (100,)]
    assert s.tokenizer.calls == 0


def test_single_tokens_are_spelled_once() -> None:
    tokenizer = Letters()
    spell = token_texts(tokenizer)
    assert [spell(ord("é")), spell(HALF), spell(ord("é"))] == ["é", "\ufffd", "é"]
    assert tokenizer.calls == 2


async def test_deltas_that_pile_up_stay_below_the_size_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_module, "MAX_JOINED_ENTRIES", 10)
    s = stage()
    for value in range(7):
        s.say(0, "abcdefg"[value], (number(value, candidates=3),))
    s.say(0, "h", (number(7, candidates=50),))  # as the engine sent it, however large
    s.say(0, "i", (number(8, candidates=3),))
    s.end(0)
    deltas = [e for e in await s.rest() if isinstance(e, Tokens)]
    assert [delta.text for delta in deltas] == ["ab", "cd", "ef", "g", "h", "i"]
    assert [logprob.logprob for delta in deltas for logprob in delta.logprobs] == [-value for value in range(9)]


letters = st.sampled_from("ab#é")
deltas = st.lists(st.tuples(st.integers(0, 1), st.text(letters, max_size=4), st.booleans()), max_size=12)


@given(deltas, st.lists(st.text(letters, min_size=1, max_size=3), max_size=2), st.booleans(), st.booleans())
def test_log_probabilities_stay_with_their_tokens(
    deltas: list[tuple[int, str, bool]], stops: list[str], include: bool, detokenize: bool
) -> None:
    """However the engine splits two outputs, wherever they stop, and whenever the reader reads."""

    async def play() -> None:
        s = stage(2, *(stops if detokenize else []), include=include, detokenize=detokenize)
        said: list[list[tuple[int, float]]] = [[], []]
        heard: list[list[tuple[int, float]]] = [[], []]
        texts = ["", ""]
        stopped: dict[int, str] = {}

        def hear(event: Event) -> None:
            if isinstance(event, Tokens):
                assert len(event.logprobs) == len(event.token_ids)
                pairs = zip(event.token_ids, (one.logprob for one in event.logprobs), strict=True)
                heard[event.output_index] += pairs
                texts[event.output_index] += event.text
            elif isinstance(event, Finished) and isinstance(event.stop, StopText):
                stopped[event.output_index] = event.stop.text

        for index, text, read in deltas:
            logprobs = tuple(number(len(said[index]) + place) for place in range(len(text)))
            s.say(index, text, logprobs)
            said[index] += zip(map(ord, text), (one.logprob for one in logprobs), strict=True)
            if read:
                hear(await anext(s.answer)) if text and not s.aborted else None
        s.end(0)
        s.end(1)
        for event in await s.rest():
            hear(event)
        for index in (0, 1):
            assert heard[index] == said[index][: len(heard[index])]
            whole = "".join(chr(token_id) for token_id, _ in heard[index])
            if not detokenize:
                assert (heard[index], texts[index]) == (said[index], "")
            elif index in stopped:
                stop = stopped[index]
                assert whole.endswith(stop)
                assert texts[index] == (whole if include else whole.removesuffix(stop))
            else:
                assert (heard[index], texts[index]) == (said[index], whole)

    asyncio.run(play())
