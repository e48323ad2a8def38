"""Two members of one oneof are found in the bytes; one, or the same one twice, is no matter."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest
from triptych.wire.choices import MAX_FIELDS, refuse_two_choices
from triptych.wire.gen import generation_pb2 as pb
from triptych.wire.gen import lifecycle_pb2
from triptych.wire.status import UNREADABLE


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
        refuse_two_choices(joined(*TWICE[names]), pb.GenerateRequest)
    for one in TWICE[names]:
        refuse_two_choices(joined(one, one), pb.GenerateRequest)


def test_repeated_messages_choose_each_for_itself() -> None:
    request = pb.GenerateRequest()
    request.stopping.conditions.add(stop_text="a")
    request.stopping.conditions.add(stop_token_id=1)
    request.media.add(url="http://a")
    request.media.add(raw_bytes=b"a")
    refuse_two_choices(request.SerializeToString(), pb.GenerateRequest)
    both = pb.StopCondition(stop_text="a").SerializeToString() + pb.StopCondition(stop_token_id=1).SerializeToString()
    inner = b"\x1a" + bytes([len(both)]) + both  # StoppingOptions.conditions
    outer = b"\x32" + bytes([len(inner)]) + inner  # GenerateRequest.stopping
    pb.GenerateRequest.FromString(outer)
    with pytest.raises(InvalidRequest, match=r"stop_text and stopping\.conditions\.stop_token_id"):
        refuse_two_choices(outer, pb.GenerateRequest)


def test_an_abort_has_one_target() -> None:
    first = lifecycle_pb2.AbortRequest(request_id="a")
    second = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
    with pytest.raises(InvalidRequest, match="request_id and all_requests"):
        refuse_two_choices(first.SerializeToString() + second.SerializeToString(), lifecycle_pb2.AbortRequest)


def test_the_number_of_fields_is_bounded() -> None:
    fields = pb.GenerateRequest(request_id="a").SerializeToString()
    refuse_two_choices(fields * MAX_FIELDS, pb.GenerateRequest)
    with pytest.raises(InvalidRequest, match="more than"):
        refuse_two_choices(fields * (MAX_FIELDS + 1), pb.GenerateRequest)


def test_unknown_fields_and_groups_are_passed_over() -> None:
    # field 99 as a group that holds field 3 as text, and another group
    group = b"\x9b\x06" + b"\x1a\x01a" + b"\x0b\x0d\0\0\0\0\x0c" + b"\x09" + bytes(8) + b"\x9c\x06"
    data = group + pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])).SerializeToString()
    assert pb.GenerateRequest.FromString(data).token_ids.ids == [1]
    refuse_two_choices(data, pb.GenerateRequest)


@given(st.binary(max_size=200))
def test_whatever_parses_can_be_scanned(data: bytes) -> None:
    try:
        pb.GenerateRequest.FromString(data)
    except UNREADABLE:
        return
    with suppress(InvalidRequest):
        refuse_two_choices(data, pb.GenerateRequest)
