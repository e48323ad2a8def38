"""Events and spans through the wire format and back, and engines that break the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.references import reference, steps
from tests.sessions import plain as comparable_session
from tests.sessions import plan, session
from triptych.core.encoded import SealedReference
from triptych.core.errors import Internal, InvalidRequest, MediaError, Overloaded
from triptych.core.events import (
    EncoderReady,
    EosToken,
    Event,
    Failed,
    Finished,
    FinishReason,
    PrefillReady,
    Prompt,
    Span,
    StopText,
    StopToken,
    Tokens,
    Usage,
    is_terminal,
)
from triptych.core.logprobs import CandidateColumns, TokenLogprob
from triptych.core.session import SealedSession
from triptych.wire import codec_events
from triptych.wire.codec_events import (
    MAX_SPANS_BYTES,
    decode_event,
    decode_spans,
    encode_event,
    encode_spans,
    event_entries,
    split_event,
    write_event,
)
from triptych.wire.codec_reference import ReferenceCodec
from triptych.wire.codec_session import SessionCodec
from triptych.wire.gen import encoder_pb2, generation_pb2, kv_pb2

UINT32 = st.integers(0, 2**32 - 1)
TOKEN = st.integers(0, 2**31 - 1)
TEXT = st.text(min_size=1, max_size=20)


@st.composite
def token_logprobs(draw: st.DrawFn) -> TokenLogprob:
    rows = draw(st.lists(st.tuples(TOKEN, st.floats(-100, 0, width=32), TOKEN), min_size=1, max_size=4) | st.none())
    if rows is None:
        return TokenLogprob(draw(st.floats(-100, 0)), draw(TOKEN))
    ids, numbers, ranks = zip(*rows, strict=True)
    columns = CandidateColumns(np.array(ids, np.int32), np.array(numbers, np.float32), np.array(ranks, np.int32))
    return TokenLogprob(draw(st.floats(-100, 0)), draw(TOKEN), columns)


@st.composite
def deltas(draw: st.DrawFn) -> Tokens:
    token_ids = tuple(draw(st.lists(UINT32, max_size=5)))
    numbers = tuple(draw(token_logprobs()) for _ in token_ids) if draw(st.booleans()) else ()
    return Tokens(draw(TEXT), token_ids, draw(st.text(max_size=20)), numbers, draw(st.integers(0, 8)))


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    token_ids = tuple(draw(st.lists(UINT32, min_size=1, max_size=8)))
    return Prompt(draw(TEXT), token_ids, (None, *(draw(st.none() | token_logprobs()) for _ in token_ids[1:])))


def plain(logprob: TokenLogprob | None) -> Any:
    """As values that can be compared."""
    if logprob is None or logprob.candidates is None:
        return logprob and (logprob.logprob, logprob.rank)
    c = logprob.candidates
    assert (c.token_ids.dtype, c.logprobs.dtype, c.ranks.dtype) == (np.int32, np.float32, np.int32)
    return logprob.logprob, logprob.rank, c.token_ids.tolist(), c.logprobs.tolist(), c.ranks.tolist()


def comparable(event: Event) -> Any:
    if isinstance(event, Prompt):
        return event.request_id, event.token_ids, [plain(number) for number in event.logprobs]
    if isinstance(event, Tokens):
        numbers = [plain(number) for number in event.logprobs]
        return event.request_id, event.token_ids, event.text, numbers, event.output_index
    return event


events = st.one_of(
    deltas(),
    prompts(),
    st.builds(
        Finished,
        TEXT,
        st.sampled_from(FinishReason),
        st.none() | st.builds(Usage, st.integers(0, 2**31), st.integers(0, 2**31 - 1), st.integers(0, 2**31)),
        st.none()
        | st.builds(StopToken, UINT32)
        | st.builds(EosToken, UINT32)
        | st.builds(StopText, st.text(max_size=9)),
        output_index=st.integers(0, 8),
    ),
)


def read(data: bytes) -> Event:
    return decode_event(generation_pb2.GenerateResponse.FromString(data), outputs=9)


@given(events)
def test_an_event_comes_back_equal(event: Event) -> None:
    back = read(write_event(event))
    assert comparable(back) == comparable(event)
    assert is_terminal(back) == is_terminal(event)


@given(prompts(), st.integers(1, 4))
def test_a_prompt_in_pieces_is_the_same_message(event: Prompt, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_events, "PROMPT_PIECE", piece)
        data = write_event(event, str)
    assert generation_pb2.GenerateResponse.FromString(data) == encode_event(event, str)


@given(deltas())
def test_a_delta_in_parts_is_the_same_delta(event: Tokens) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_events, "LARGE_DELTA", 3)
        parts = split_event(event)
    assert (len(parts) > 1) == (len(event.logprobs) > 1 and event_entries(event) > 3)
    assert all(isinstance(part, Tokens) for part in parts)
    last = parts[-1]
    assert [part.text for part in parts if isinstance(part, Tokens)] == [""] * (len(parts) - 1) + [event.text]  # type: ignore[attr-defined]
    assert [i for part in parts for i in part.token_ids] == list(event.token_ids)  # type: ignore[union-attr]
    assert [n for part in parts for n in part.logprobs] == list(event.logprobs)  # type: ignore[union-attr]
    assert {part.output_index for part in parts} == {event.output_index}  # type: ignore[union-attr]
    assert last.request_id == event.request_id


def columns(*token_ids: int) -> CandidateColumns:
    count = len(token_ids)
    return CandidateColumns(
        np.array(token_ids, np.int32), -np.arange(count, dtype=np.float32), np.arange(1, count + 1, dtype=np.int32)
    )


def test_words_stand_beside_tokens_and_candidates() -> None:
    number = TokenLogprob(-0.5, 1, columns(7, 8))
    words = {7: "seven", 8: "eight"}
    message = encode_event(Tokens("r", (7,), "seven", (number,), 2), words.__getitem__)
    assert message.token.output_index == 2
    (token,) = message.token.tokens
    assert (token.token, token.logprob, token.rank) == ("seven", -0.5, 1)
    assert [(c.token_id, c.token, c.logprob, c.rank) for c in token.candidates] == [
        (7, "seven", 0, 1),
        (8, "eight", -1, 2),
    ]
    message = encode_event(Prompt("r", (8, 7), (None, number)), words.__getitem__)
    first, second = message.prompt.tokens
    assert first.token == "eight"
    assert not first.HasField("logprob")
    assert not first.HasField("rank")
    assert second.candidates[0].token == "seven"


def test_without_words_none_are_asked_for() -> None:
    message = encode_event(Tokens("r", (7,), "seven", (TokenLogprob(-0.5, 1, columns(7)),)))
    assert message.token.text == "seven"
    assert message.token.tokens[0].token == message.token.tokens[0].candidates[0].token == ""


def test_what_does_not_fit_into_a_message_is_refused_and_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_events, "MAX_MESSAGE", 1000)
    monkeypatch.setattr(codec_events, "PROMPT_PIECE", 10)
    written: list[int] = []

    def word(token_id: int) -> str:
        written.append(token_id)
        return "x" * 20

    numbers = (None, *(TokenLogprob(-1.0, 1, columns(1, 2, 3)) for _ in range(999)))
    with pytest.raises(InvalidRequest, match=r"more than 1000 bytes; ask for fewer .*prompt_logprob_start"):
        write_event(Prompt("r", tuple(range(1000)), numbers), word)
    assert len(written) < 100  # it is found out before the rest is built
    assert len(write_event(Prompt("r", tuple(range(5)), numbers[:5]), word)) < 1000


def test_entries_are_tokens_and_candidates() -> None:
    number = TokenLogprob(-0.5, 1, columns(1, 2, 3))
    assert event_entries(Tokens("r", (1, 2), "", (number, number))) == 8
    assert event_entries(Prompt("r", (1, 2), (None, number))) == 5
    assert event_entries(Tokens("r", (1, 2))) == 2
    assert event_entries(Failed("r", Overloaded("full"))) == 1


def test_a_failure_comes_back_with_its_error() -> None:
    event = decode_event(encode_event(Failed("r", Overloaded("full"))))
    assert isinstance(event, Failed)
    assert type(event.error) is Overloaded
    assert str(event.error) == "full"


def test_an_event_has_what_the_shipping_client_requires() -> None:
    token = encode_event(Tokens("r", (0, 7)))
    assert token.token.HasField("output_index")
    assert [info.token_id for info in token.token.tokens] == [0, 7]
    assert not token.HasField("usage")
    finished = encode_event(Finished("r", FinishReason.STOP, Usage(5, 2, 0), EosToken(0)))
    assert finished.finished.HasField("output_index")
    assert finished.finished.stop_match.WhichOneof("match") == "eos_token_id"
    assert finished.usage.total_tokens == 7
    assert finished.usage.HasField("cached_prompt_tokens")


def test_a_session_leaves_by_a_codec_and_arrives_sealed() -> None:
    codec = SessionCodec()
    made = session(plan(40))
    event = PrefillReady("r", made, Usage(40, 3, 16))
    assert is_terminal(event)
    message = generation_pb2.GenerateResponse.FromString(write_event(event, None, codec))
    assert message.usage.total_tokens == 43
    assert message.usage.HasField("cached_prompt_tokens")
    back = decode_event(message)
    assert isinstance(back, PrefillReady)
    assert (back.request_id, back.usage) == (event.request_id, event.usage)
    assert isinstance(back.session, SealedSession)
    assert back.session.session_id == made.handle.session_id
    assert comparable_session(codec.decode(kv_pb2.KvSessionRef.FromString(back.session.data))) == comparable_session(
        made
    )
    assert encode_event(back) == message
    with pytest.raises(Internal, match="cannot hand one over"):
        encode_event(event)


def test_a_session_of_a_long_prompt_is_written_on_a_thread() -> None:
    assert event_entries(PrefillReady("r", session(plan(40)), Usage(40, 1, 0))) < 10
    assert event_entries(PrefillReady("r", session(plan(32768)), Usage(32768, 1, 0))) > codec_events.LARGE_EVENT
    assert event_entries(PrefillReady("r", SealedSession("s", b""), Usage(1, 1, 0))) == 1


def test_references_leave_by_a_codec_and_arrive_sealed_in_their_order() -> None:
    codec = ReferenceCodec()
    made = tuple(reference(name=name) for name in ("b", "a", "c"))
    event = EncoderReady("r", made, (Span("encode", 1.0, 2.0),))
    assert is_terminal(event)
    message = generation_pb2.GenerateResponse.FromString(write_event(event, references=codec))
    assert not message.HasField("usage")
    back = decode_event(message)
    assert isinstance(back, EncoderReady)
    assert back.request_id == "r"
    sealed = [one for one in back.references if isinstance(one, SealedReference)]
    assert [one.cache_id for one in sealed] == ["b", "a", "c"]
    read = [codec.decode(encoder_pb2.EncoderCacheRef.FromString(one.data)) for one in sealed]
    assert comparable_session(tuple(read)) == comparable_session(made)
    assert encode_event(back) == message
    with pytest.raises(Internal, match="cannot hand one over"):
        encode_event(event)


def test_no_references_are_an_event_as_well() -> None:
    back = decode_event(encode_event(EncoderReady("r", ())))
    assert isinstance(back, EncoderReady)
    assert back.references == ()


def test_an_item_that_is_too_large_for_a_reference_is_named() -> None:
    event = EncoderReady("r", (reference(), reference(steps(4097))))
    with pytest.raises(MediaError, match=r"^media item 1: limit: it has 4097 runs"):
        write_event(event, references=ReferenceCodec())


def test_many_references_are_written_on_a_thread() -> None:
    assert event_entries(EncoderReady("r", (reference(),) * 4)) < codec_events.LARGE_EVENT / 8
    assert event_entries(EncoderReady("r", (reference(),) * 100)) > codec_events.LARGE_EVENT
    assert event_entries(EncoderReady("r", (reference(steps(4096)),) * 2)) > codec_events.LARGE_EVENT


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "without an event"),
        ({"prefill_ready": generation_pb2.PrefillReady(kv_session=kv_pb2.KvSessionRef())}, "session without its id"),
        ({"encoder_ready": {"encoder_cache": [{"cache_id": "a"}, {}]}}, "encoder reference without its id"),
        ({"token": generation_pb2.TokenOutput()}, "without its index"),
        ({"token": generation_pb2.TokenOutput(output_index=2)}, "output 2 of a request for 2"),
        ({"finished": generation_pb2.GenerationFinished(output_index=2, reason=1)}, "output 2 of a request for 2"),  # type: ignore[arg-type]
        ({"token": {"output_index": 0, "tokens": [{"logprob": -1.0}, {}]}}, "without its log probability"),
        ({"token": {"output_index": 0, "tokens": [{"candidates": [{}]}]}}, "without its log probability"),
        ({"finished": generation_pb2.GenerationFinished(output_index=0)}, "unknown reason"),
        ({"finished": generation_pb2.GenerationFinished(output_index=0, reason=9)}, "unknown reason"),  # type: ignore[arg-type]
    ],
)
def test_an_engine_that_breaks_the_contract_is_named_as_such(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(Internal, match=why):
        decode_event(generation_pb2.GenerateResponse(request_id="r", **fields), outputs=2)


@given(st.lists(st.builds(Span, st.text(max_size=20), st.floats(0, 4e9), st.floats(0, 4e9)), max_size=20).map(tuple))
def test_spans_come_back_equal(spans: tuple[Span, ...]) -> None:
    back = decode_spans(encode_spans(spans))
    assert back == spans[: len(back)]
    assert len(back) == len(spans) or len(encode_spans(spans)) > MAX_SPANS_BYTES - 200


def test_spans_are_bounded() -> None:
    data = encode_spans(tuple(Span(f"stage {i}", 1.5e9 + i, 1.5e9 + i) for i in range(1000)))
    assert len(data) <= MAX_SPANS_BYTES
    assert len(decode_spans(data)) > 50


@pytest.mark.parametrize("data", [b"", b"{}", b"[[1,2,3]]", b'[["a",1]]', b"[" * 10000, b"\xff"])
def test_malformed_spans_are_none(data: bytes) -> None:
    assert decode_spans(data) == ()
