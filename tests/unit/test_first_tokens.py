"""First tokens through their bytes and back, and forged ones."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sessions import FIRST, logprob, plain
from triptych.core.errors import InvalidRequest
from triptych.core.finish import EosToken, FinishReason, StopMatch, StopText, StopToken
from triptych.core.logprobs import CandidateColumns, TokenLogprob
from triptych.core.session import FirstToken
from triptych.wire.first_tokens import MAX_OUTPUTS, decode_first, encode_first

TOKEN = st.integers(0, 2**31 - 1)
UINT32 = st.integers(0, 2**32 - 1)
RANK = st.integers(1, 2**31 - 1)
DOUBLE = st.floats(allow_nan=False, allow_infinity=False)
SINGLE = st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def logprobs(draw: st.DrawFn) -> TokenLogprob:
    rows = draw(st.lists(st.tuples(TOKEN, SINGLE, RANK), min_size=1, max_size=5) | st.none())
    if rows is None:
        return TokenLogprob(draw(DOUBLE), draw(RANK))
    ids, numbers, ranks = zip(*rows, strict=True)
    columns = CandidateColumns(np.array(ids, np.int32), np.array(numbers, np.float32), np.array(ranks, np.int32))
    return TokenLogprob(draw(DOUBLE), draw(RANK), columns)


@st.composite
def first_tokens(draw: st.DrawFn) -> FirstToken:
    finish = draw(st.none() | st.sampled_from(FinishReason))
    stop: StopMatch | None = None
    if finish is FinishReason.STOP:
        stop = draw(
            st.none()
            | st.builds(StopToken, UINT32)
            | st.builds(EosToken, UINT32)
            | st.builds(StopText, st.text(max_size=9))
        )
    return FirstToken(draw(TOKEN), draw(st.none() | logprobs()), finish, stop)


@given(st.lists(first_tokens(), min_size=1, max_size=4).map(tuple))
def test_first_tokens_come_back_equal(first: tuple[FirstToken, ...]) -> None:
    assert plain(decode_first(encode_first(first))) == plain(first)


def test_the_lowest_finite_number_survives() -> None:
    """What an engine reports where a probability is zero."""
    lowest = float(np.finfo(np.float32).min)
    columns = CandidateColumns(np.array([3], np.int32), np.array([lowest], np.float32), np.array([9], np.int32))
    (read,) = decode_first(encode_first([FirstToken(3, TokenLogprob(lowest, 9, columns))]))
    assert read.logprob is not None
    assert read.logprob.candidates is not None
    assert (read.logprob.logprob, read.logprob.candidates.logprobs[0]) == (lowest, lowest)


def test_a_whole_vocabulary_is_a_matter_of_copying() -> None:
    number = logprob(*range(150_000))
    (read,) = decode_first(encode_first([FirstToken(7, number)]))
    assert plain(read.logprob) == plain(number)


def output(
    token: int = 7,
    finish: int = 0,
    stop: int = 0,
    mark: int = 0,
    value: int = 0,
    candidates: int = 0,
    rest: bytes = b"",
) -> bytes:
    """The format, written a second time."""
    return struct.pack("<IBBBII", token, finish, stop, mark, value, candidates) + rest


def number(own: float = -1.0, rank: int = 1, *, ids: Any = (), logprobs: Any = (), ranks: Any = ()) -> bytes:
    columns = struct.pack(f"<{len(ids)}I", *ids) + struct.pack(f"<{len(logprobs)}f", *logprobs)
    return struct.pack("<dI", own, rank) + columns + struct.pack(f"<{len(ranks)}I", *ranks)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (output(), FirstToken(7)),
        (output(finish=2), FirstToken(7, None, FinishReason.LENGTH)),
        (output(finish=1, stop=2, value=9), FirstToken(7, None, FinishReason.STOP, EosToken(9))),
        (output(finish=1, stop=3, value=2, rest=b"\xc3\xa9"), FirstToken(7, None, FinishReason.STOP, StopText("é"))),
        (output(mark=1, rest=number(-0.5, 3)), FirstToken(7, TokenLogprob(-0.5, 3))),
        (
            output(
                mark=1, candidates=2, rest=number(-0.1, 1, ids=[4, 5], logprobs=[0, np.float32(-1) / 3], ranks=[1, 2])
            ),
            FirstToken(7, logprob(4, 5)),
        ),
    ],
)
def test_the_format_is_the_one_that_is_described(data: bytes, first: FirstToken) -> None:
    assert plain(decode_first(data)) == plain((first,))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "there is no output"),
        (output() + b"\x00", "output 1 is cut short"),
        (output() * (MAX_OUTPUTS + 1), "more than 1024 outputs"),
        (output(token=2**31), "output 0: token id 2147483648 is beyond"),
        (output() + output(finish=4), "output 1: finish reason is number 4"),
        (output(finish=1, stop=4), "output 0: kind of stop is number 4"),
        (output(stop=1), "output 0: it names a stop and has not stopped"),
        (output(finish=2, stop=3), "output 0: it names a stop and has not stopped"),
        (output(finish=1, stop=3, value=1), "output 0 is cut short"),
        (output(finish=1, stop=3, value=2**32 - 1), "output 0: the stop text has 4294967295 bytes"),
        (output(finish=1, stop=3, value=1, rest=b"\xff"), "output 0: the stop text is not UTF-8"),
        (output(mark=2), "output 0: candidates without a log probability, or its mark"),
        (output(candidates=1), "output 0: candidates without a log probability"),
        (output(mark=1), "output 0 is cut short"),
        (output(mark=1, candidates=2**32 - 1, rest=number()), "output 0 is cut short"),
        (output(mark=1, rest=number(NAN)), "output 0: a log probability is not finite"),
        (output(mark=1, rest=number(-INF)), "output 0: a log probability is not finite"),
        (output(mark=1, rest=number(rank=0)), "output 0: a rank is outside"),
        (output(mark=1, rest=number(rank=2**31)), "output 0: a rank is outside"),
        (output(mark=1, candidates=1, rest=number(ids=[1], logprobs=[NAN], ranks=[1])), "not finite"),
        (output(mark=1, candidates=1, rest=number(ids=[1], logprobs=[INF], ranks=[1])), "not finite"),
        (output(mark=1, candidates=1, rest=number(ids=[1], logprobs=[0], ranks=[0])), "a rank is outside"),
        (output(mark=1, candidates=1, rest=number(ids=[1], logprobs=[0], ranks=[2**31])), "a rank is outside"),
        (output(mark=1, candidates=1, rest=number(ids=[2**31], logprobs=[0], ranks=[1])), "candidate's token id"),
    ],
)
def test_forged_bytes_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        decode_first(data)


def test_every_cut_has_an_outcome() -> None:
    data = encode_first(FIRST)
    whole = plain(decode_first(data))[1]
    for size in range(len(data)):
        try:
            read = decode_first(data[:size])
        except InvalidRequest:
            continue
        assert plain(read)[1] == whole[: len(read)]


@settings(max_examples=300)
@given(st.data())
def test_any_bytes_changed_have_an_outcome(data: st.DataObject) -> None:
    changed = bytearray(encode_first(FIRST))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = decode_first(bytes(changed))
    except InvalidRequest:
        return
    assert encode_first(read)
