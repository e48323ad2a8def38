"""What is refused before protobuf sees it, and that nothing else is."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest
from triptych.wire.gen import generation_pb2 as pb
from triptych.wire.gen import lifecycle_pb2
from triptych.wire.scan import MAX_FIELDS, Limits, scan
from triptych.wire.status import UNREADABLE

LIMITS = Limits(1 << 20, {"media": 1 << 30})


def joined(*parts: pb.GenerateRequest) -> bytes:
    """Protobuf merges messages laid end to end."""
    return b"".join(part.SerializeToString() for part in parts)


GUIDED = pb.GuidedDecoding
SELECTION = pb.CandidateTokenSelection
TWICE = {
    "prompt and token_ids": (pb.GenerateRequest(prompt="a"), pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))),
    "guided.regex and guided.json_schema": (
        pb.GenerateRequest(guided=GUIDED(regex="a")),
        pb.GenerateRequest(guided=GUIDED(json_schema="{}")),
    ),
    "guided.choice and guided.json_object": (
        pb.GenerateRequest(guided=GUIDED(choice=pb.ChoiceConstraint(choices=["a"]))),
        pb.GenerateRequest(guided=GUIDED(json_object=pb.JsonObjectConstraint())),
    ),
    "response.output_candidates.top_n and response.output_candidates.all": (
        pb.GenerateRequest(response=pb.ResponseOptions(output_candidates=SELECTION(top_n=1))),
        pb.GenerateRequest(response=pb.ResponseOptions(output_candidates=SELECTION(all=pb.AllCandidates()))),
    ),
}


@pytest.mark.parametrize("names", TWICE)
def test_two_choices_are_named(names: str) -> None:
    first, second = names.split(" and ")
    with pytest.raises(InvalidRequest, match=f"{first} and {second} are both set"):
        scan(joined(*TWICE[names]), pb.GenerateRequest, LIMITS)
    for one in TWICE[names]:
        scan(joined(one, one), pb.GenerateRequest, LIMITS)


def test_repeated_messages_choose_each_for_itself() -> None:
    request = pb.GenerateRequest()
    request.stopping.conditions.add(stop_text="a")
    request.stopping.conditions.add(stop_token_id=1)
    request.media.add(url="http://a")
    request.media.add(raw_bytes=b"a")
    scan(request.SerializeToString(), pb.GenerateRequest, LIMITS)
    both = pb.StopCondition(stop_text="a").SerializeToString() + pb.StopCondition(stop_token_id=1).SerializeToString()
    inner = b"\x1a" + bytes([len(both)]) + both  # StoppingOptions.conditions
    outer = b"\x32" + bytes([len(inner)]) + inner  # GenerateRequest.stopping
    pb.GenerateRequest.FromString(outer)
    with pytest.raises(InvalidRequest, match=r"stop_text and stopping\.conditions\.stop_token_id"):
        scan(outer, pb.GenerateRequest, LIMITS)


def test_an_abort_has_one_target() -> None:
    first = lifecycle_pb2.AbortRequest(request_id="a")
    second = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
    with pytest.raises(InvalidRequest, match="request_id and all_requests"):
        scan(first.SerializeToString() + second.SerializeToString(), lifecycle_pb2.AbortRequest, LIMITS)


EMPTIES = {
    "media": b"\x52\x00",
    "stopping.conditions": b"\x1a\x00",
    "extra": b"\x0a\x00",
    "unknown": b"\xa8\x7d\x00",
    "tokens, not packed": b"\x08\x01",
}
INSIDE = {"stopping.conditions": 6, "extra": 12, "tokens, not packed": 4}
"""Field of GenerateRequest that they stand in."""


@pytest.mark.parametrize("kind", EMPTIES)
def test_the_number_of_fields_is_bounded(kind: str) -> None:
    def message(count: int) -> bytes:
        data = EMPTIES[kind] * count
        if kind not in INSIDE:
            return data
        size = len(data)
        length = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14])
        return bytes([INSIDE[kind] << 3 | 2]) + length + data

    scan(message(MAX_FIELDS - 2), pb.GenerateRequest, LIMITS)
    with pytest.raises(InvalidRequest, match="more than"):
        scan(message(MAX_FIELDS + 1), pb.GenerateRequest, LIMITS)


def test_sizes_are_bounded_by_field() -> None:
    large = "a" * ((1 << 20) + 1)
    with pytest.raises(InvalidRequest, match="prompt has 1048577 bytes; at most 1048576"):
        scan(pb.GenerateRequest(prompt=large).SerializeToString(), pb.GenerateRequest, LIMITS)
    item = pb.MediaItem(raw_bytes=bytes(3 << 20))
    scan(pb.GenerateRequest(media=[item]).SerializeToString(), pb.GenerateRequest, LIMITS)


def test_depth_is_bounded() -> None:
    data = b""
    for _ in range(150):  # Value.list_value.values, as many lists in one another
        inner = b"\x32" + _length(data) + data
        data = b"\x0a" + _length(inner) + inner
    value = b"\x32" + _length(data) + data
    entry = b"\x12" + _length(value) + value
    struct = b"\x0a" + _length(entry) + entry
    request = b"\x62" + _length(struct) + struct
    with pytest.raises(InvalidRequest, match="nested deeper"):
        scan(request, pb.GenerateRequest, LIMITS)


def _length(data: bytes) -> bytes:
    return bytes([len(data) & 0x7F | 0x80, len(data) >> 7])


def test_unknown_fields_and_groups_are_passed_over() -> None:
    # field 99 as a group that holds field 3 as text, and another group
    group = b"\x9b\x06" + b"\x1a\x01a" + b"\x0b\x0d\0\0\0\0\x0c" + b"\x09" + bytes(8) + b"\x9c\x06"
    data = group + pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])).SerializeToString()
    assert pb.GenerateRequest.FromString(data).token_ids.ids == [1]
    scan(data, pb.GenerateRequest, LIMITS)


@given(st.binary(max_size=200))
@example(b"\x0a\xff\xff\xff\xff\x0f")
@example(b"\xff" * 20)
@example(b"\x0a")
def test_bytes_are_refused_or_scanned(data: bytes) -> None:
    with suppress(InvalidRequest):
        scan(data, pb.GenerateRequest, LIMITS)


@given(st.binary(max_size=100))
def test_what_parses_is_only_refused_for_two_choices(data: bytes) -> None:
    with suppress(*UNREADABLE):
        pb.GenerateRequest.FromString(data)
        try:
            scan(data, pb.GenerateRequest, LIMITS)
        except InvalidRequest as error:
            refusal = str(error)
        else:
            return
        assert "both set" in refusal or "bytes" in refusal
