"""Several outputs and log probabilities over a real connection, as messages and as core events again."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from tests.rpc.scripted_role import SPANS, ScriptedRole
from triptych.core.errors import Internal, InvalidRequest
from triptych.core.events import EosToken, Failed, Finished, FinishReason, Prompt, Tokens, Usage, is_terminal
from triptych.core.logprobs import CandidateColumns, LogprobOptions, TokenLogprob, WholeVocabulary
from triptych.core.request import GenerateRequest
from triptych.wire import answer, codec_events
from triptych.wire.gen import error_pb2, lifecycle_pb2
from triptych.wire.gen import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.rpc.conftest import Foreign, Serve
    from triptych.core.events import Event
    from triptych.wire.channel import EngineChannel

SECONDS = 20.0
USAGE = Usage(prompt_tokens=2, completion_tokens=5, cached_prompt_tokens=1)
ASKED = LogprobOptions(prompt=True, output=True, output_candidates=WholeVocabulary())
REQUEST = GenerateRequest("r", "scripted", "hi", num_sequences=3)


def three_outputs(request: GenerateRequest) -> list[Event]:
    """Interleaved; the middle one ends first, the usage comes with the last."""
    r = request.request_id
    return [
        Tokens(r, (1,), "a", output_index=0),
        Tokens(r, (2,), "b", output_index=1),
        Finished(r, FinishReason.STOP, None, EosToken(0), output_index=1),
        Tokens(r, (3, 4), "cd", output_index=2),
        Finished(r, FinishReason.LENGTH, None, output_index=2),
        Tokens(r, (5,), "e", output_index=0),
        Finished(r, FinishReason.LENGTH, USAGE, spans=SPANS, output_index=0),
    ]


def number(count: int, first: int = 0) -> TokenLogprob:
    """A token whose place has so many candidates."""
    return TokenLogprob(
        -0.25,
        3,
        CandidateColumns(
            np.arange(first, first + count, dtype=np.int32),
            -np.arange(count, dtype=np.float32) / 8,
            np.arange(1, count + 1, dtype=np.int32),
        ),
    )


async def read_all(call: Any) -> list[pb.GenerateResponse]:
    return [message async for message in call]


async def test_every_event_names_its_output_and_usage_comes_with_the_last(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=three_outputs))
    call = served.generate(sampling={"num_sequences": 3})
    messages = await read_all(call)
    indices = [getattr(message, message.WhichOneof("event") or "").output_index for message in messages]
    assert indices == [0, 1, 1, 2, 2, 0, 0]
    assert [message.HasField("usage") for message in messages] == [False] * 6 + [True]
    assert messages[2].finished.stop_match.WhichOneof("match") == "eos_token_id"
    assert messages[-1].usage.completion_tokens == 5
    assert await call.code() is grpc.StatusCode.OK
    assert served.role.requests[0].num_sequences == 3
    assert served.role.live == set()


async def test_several_outputs_come_back_as_core_events(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=three_outputs))
    events = [event async for event in await served.channel.generate(REQUEST)]
    assert events == three_outputs(REQUEST)
    assert [is_terminal(event) for event in events] == [False] * 6 + [True]


async def test_a_failure_ends_all_outputs(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=lambda request: [*three_outputs(request)[:3], Internal("lost")]))
    messages = await read_all(served.generate(sampling={"num_sequences": 3}))
    assert [message.WhichOneof("event") for message in messages] == ["token", "token", "finished", "error"]


def with_prompt(request: GenerateRequest) -> list[Event]:
    r = request.request_id
    return [
        Prompt(r, (7, 8), (None, TokenLogprob(-1.5, 2))),
        Tokens(r, (1,), "a", (number(3),)),
        Finished(r, FinishReason.LENGTH, USAGE),
    ]


async def test_prompt_and_output_log_probabilities(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=with_prompt, token_text=lambda token_id: f"<{token_id}>"))
    response = {"return_prompt_logprobs": True, "return_output_logprobs": True}
    prompt, token, finished = await read_all(served.generate(response=response))
    first, second = prompt.prompt.tokens
    assert (first.token_id, first.token) == (7, "<7>")
    assert not first.HasField("logprob")
    assert (second.logprob, second.rank, second.token) == (-1.5, 2, "<8>")
    (info,) = token.token.tokens
    assert (info.logprob, info.rank, info.token) == (-0.25, 3, "<1>")
    assert [(c.token_id, c.logprob, c.rank, c.token) for c in info.candidates] == [
        (0, 0.0, 1, "<0>"),
        (1, -0.125, 2, "<1>"),
        (2, -0.25, 3, "<2>"),
    ]
    assert finished.WhichOneof("event") == "finished"


async def test_no_words_where_no_text_is_wanted(serve: Serve) -> None:
    asked: list[int] = []

    def word(token_id: int) -> str:
        asked.append(token_id)
        return "word"

    served = await serve(ScriptedRole(script=with_prompt, token_text=word))
    request = pb.GenerateRequest(
        request_id="r", model="scripted", prompt="hi", response={"return_prompt_logprobs": True}
    )
    request.extra.update({"detokenize": False})
    messages = await read_all(served.inference.Generate(request))
    assert messages[0].prompt.tokens[0].token == ""
    assert asked == []


async def test_log_probabilities_come_back_as_core_events(serve: Serve) -> None:
    served = await serve(ScriptedRole(script=with_prompt))
    events = [event async for event in await served.channel.generate(replace(REQUEST, num_sequences=1, logprobs=ASKED))]
    assert [type(event) for event in events] == [Prompt, Tokens, Finished]
    prompt, delta, _ = events
    assert isinstance(prompt, Prompt)
    assert isinstance(delta, Tokens)
    assert prompt.token_ids == (7, 8)
    assert prompt.logprobs == (None, prompt.logprobs[1])
    assert prompt.logprobs[1] is not None
    assert (prompt.logprobs[1].logprob, prompt.logprobs[1].rank) == (-1.5, 2)
    assert delta.logprobs[0].candidates is not None
    assert delta.logprobs[0].candidates.ranks.tolist() == [1, 2, 3]


async def test_large_events_are_written_on_a_thread(serve: Serve) -> None:
    threads: set[str] = set()

    def word(token_id: int) -> str:
        threads.add(threading.current_thread().name)
        return "w"

    def script(request: GenerateRequest) -> Iterable[Event]:
        yield Tokens(request.request_id, (1,), "a", (number(5000),))
        yield Finished(request.request_id, FinishReason.LENGTH, USAGE)

    served = await serve(ScriptedRole(script=script, token_text=word))
    message, _ = await read_all(served.generate())
    assert len(message.token.tokens[0].candidates) == 5000
    assert threads
    assert threading.current_thread().name not in threads


async def test_a_large_message_comes_back_whole(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "LARGE_MESSAGE", 10_000)

    def script(request: GenerateRequest) -> Iterable[Event]:
        yield Tokens(request.request_id, (1,), "a", (number(3000),))
        yield Finished(request.request_id, FinishReason.LENGTH, USAGE)

    served = await serve(ScriptedRole(script=script))
    delta, _ = [event async for event in await served.channel.generate(replace(REQUEST, num_sequences=1))]
    assert isinstance(delta, Tokens)
    columns = delta.logprobs[0].candidates
    assert columns is not None
    assert columns.token_ids.tolist() == list(range(3000))


async def test_a_delta_too_large_for_one_message_comes_in_several(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_events, "LARGE_DELTA", 20)

    def script(request: GenerateRequest) -> Iterable[Event]:
        yield Tokens(request.request_id, (1, 2, 3), "abc", (number(9), number(9), number(9)))
        yield Finished(request.request_id, FinishReason.LENGTH, USAGE)

    served = await serve(ScriptedRole(script=script))
    *parts, finished = await read_all(served.generate())
    assert [[info.token_id for info in part.token.tokens] for part in parts] == [[1], [2], [3]]
    assert [part.token.text for part in parts] == ["", "", "abc"]
    assert finished.WhichOneof("event") == "finished"


@pytest.mark.parametrize(
    ("limits", "word", "code"),
    [
        ({"MAX_MESSAGE": 500}, lambda token_id: "w" * 20, error_pb2.ERROR_CODE_INVALID_ARGUMENT),
        ({}, lambda token_id: "\ud800", error_pb2.ERROR_CODE_INTERNAL),
        ({}, lambda token_id: {}[token_id], error_pb2.ERROR_CODE_INTERNAL),
    ],
)
async def test_an_event_that_cannot_be_written_is_one_error_event(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], word: Any, code: int
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(codec_events, name, value)

    def script(request: GenerateRequest) -> Iterable[Event]:
        yield Prompt(request.request_id, tuple(range(100)), (None,) * 100)
        yield Finished(request.request_id, FinishReason.LENGTH, USAGE)

    served = await serve(ScriptedRole(script=script, token_text=word))
    call = served.generate(response={"return_prompt_logprobs": True})
    (message,) = await read_all(call)
    assert message.error.code == code
    assert await call.code() is grpc.StatusCode.OK
    assert served.role.live == set()


async def test_a_delta_that_contradicts_itself_is_one_error_event(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(codec_events, "LARGE_DELTA", 2)

    def script(request: GenerateRequest) -> Iterable[Event]:
        yield Tokens(request.request_id, (1, 2, 3), "abc", (number(1), number(1)))

    served = await serve(ScriptedRole(script=script))
    (message,) = await read_all(served.generate())
    assert message.error.code == error_pb2.ERROR_CODE_INTERNAL
    assert "Traceback" in caplog.text


async def test_health_while_large_events_are_written(serve: Serve) -> None:
    begun, go = threading.Event(), threading.Event()

    def word(token_id: int) -> str:
        begun.set()
        assert go.wait(SECONDS)
        return "w"

    def script(request: GenerateRequest) -> Iterable[Event]:
        yield Tokens(request.request_id, (1,), "a", (number(3000),))
        yield Finished(request.request_id, FinishReason.LENGTH, USAGE)

    served = await serve(ScriptedRole(script=script, token_text=word))
    reading = asyncio.create_task(read_all(served.generate()))
    assert await asyncio.to_thread(begun.wait, SECONDS)
    health = await asyncio.wait_for(served.control.Health(lifecycle_pb2.HealthRequest()), SECONDS)
    assert health.state == lifecycle_pb2.HEALTH_STATE_READY
    assert not reading.done()
    go.set()
    assert len(await reading) == 2


def token(index: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id="r", token=pb.TokenOutput(output_index=index, tokens=[pb.TokenInfo()]))


def finish(index: int, *, usage: bool = False) -> pb.GenerateResponse:
    end = pb.GenerationFinished(output_index=index, reason=pb.FINISH_REASON_LENGTH)
    return pb.GenerateResponse(request_id="r", finished=end, usage=pb.Usage(prompt_tokens=7) if usage else None)


PROMPT = pb.GenerateResponse(request_id="r", prompt=pb.PromptOutput(tokens=[pb.TokenInfo(token_id=1)]))


async def collect(channel: EngineChannel, request: GenerateRequest) -> list[Event]:
    return [event async for event in await channel.generate(request)]


TWO = replace(REQUEST, num_sequences=2)


@pytest.mark.parametrize("usages", [(False, False), (True, False), (True, True)])
async def test_the_last_output_ends_the_answer_whatever_its_engine_reports(
    foreign: Foreign, usages: tuple[bool, bool]
) -> None:
    channel = await foreign(token(1), finish(1, usage=usages[0]), token(0), finish(0, usage=usages[1]))
    events = await asyncio.wait_for(collect(channel, TWO), SECONDS)
    assert [is_terminal(event) for event in events] == [False, False, False, True]
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.usage == Usage(7 if usages[1] else 0, 0, 0)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([token(2)], "output 2 of a request for 2"),
        ([token(0), finish(0), token(0)], "went on with output 0 after its end"),
        ([token(0), finish(0), finish(0)], "went on with output 0 after its end"),
        ([PROMPT], "prompt that was not asked for"),
    ],
)
async def test_an_engine_that_breaks_the_order_fails_the_answer(
    foreign: Foreign, messages: list[pb.GenerateResponse], why: str
) -> None:
    channel = await foreign(*messages)
    if len(messages) == 1:
        with pytest.raises(Internal, match=why):
            await channel.generate(TWO)
        return
    last = (await asyncio.wait_for(collect(channel, TWO), SECONDS))[-1]
    assert isinstance(last, Failed)
    assert type(last.error) is Internal
    assert why in str(last.error)


@pytest.mark.parametrize("messages", [[PROMPT, PROMPT], [token(0), PROMPT]])
async def test_a_prompt_comes_once_and_first(foreign: Foreign, messages: list[pb.GenerateResponse]) -> None:
    channel = await foreign(*messages)
    events = await asyncio.wait_for(collect(channel, replace(TWO, logprobs=ASKED)), SECONDS)
    last = events[-1]
    assert isinstance(last, Failed)
    assert "late or twice" in str(last.error)


async def test_bytes_that_are_no_message_fail_the_answer(foreign: Foreign) -> None:
    channel = await foreign(token(0), b"\xff\xff\xff")
    last = (await asyncio.wait_for(collect(channel, TWO), SECONDS))[-1]
    assert isinstance(last, Failed)
    assert type(last.error) is Internal
    assert "no GenerateResponse" in str(last.error)


@pytest.mark.parametrize("priority", [0, 7, -(2**31)])
async def test_priority_travels_as_metadata(serve: Serve, priority: int) -> None:
    served = await serve()
    request = replace(REQUEST, num_sequences=1, priority=priority)
    await collect(served.channel, request)
    assert served.role.requests == [request]


async def test_a_request_that_is_too_much_is_refused_before_acceptance(serve: Serve) -> None:
    served = await serve(ScriptedRole(refusal=InvalidRequest("num_sequences 3 is more than 1")))
    with pytest.raises(InvalidRequest, match="num_sequences"):
        await served.channel.generate(REQUEST)
