"""Sessions through the wire, through JSON, and through hands that should not touch them."""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sessions import FIRST, LAYOUT, logprob, picture, plain, plan, session
from triptych.core.errors import InvalidRequest, StartupError, Unauthenticated
from triptych.core.handles import MAX_HANDLE_STATE, Handle
from triptych.core.session import FirstToken, KvSession
from triptych.wire import portable_plan
from triptych.wire.codec_session import (
    HANDOFF_PROFILE,
    MAX_ATTRIBUTES,
    MAX_ENDPOINTS,
    MAX_SENT_BYTES,
    MAX_SESSION_BYTES,
    Endpoint,
    SessionCodec,
    seal,
    session_content,
    unseal,
)
from triptych.wire.gen import kv_pb2
from triptych.wire.handoff_signature import HandoffSigner, checksum
from triptych.wire.status import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = "correct horse battery staple"
ENDPOINTS = (Endpoint("prefill.example", 50051, "grpc"), Endpoint("::1", 9, "nixl"))
PLAN = plan(40, picture(3, 2, 3), picture(20, 1, 1, key=2))
OPEN = SessionCodec(ENDPOINTS)
SIGNED = SessionCodec(ENDPOINTS, HandoffSigner(SECRET))


def through_json(message: kv_pb2.KvSessionRef) -> kv_pb2.KvSessionRef:
    """What a client between the engines does: five fields, the attributes as JSON with numbers as doubles."""
    attributes = json_format.MessageToDict(message.attributes_struct)
    between = json.dumps(
        {
            "session_id": message.session_id,
            "transfer_backend": message.transfer_backend,
            "endpoints": [{"host": e.host, "port": e.port, "protocol": e.protocol} for e in message.endpoints],
            "dp_rank": message.dp_rank,
            "attributes": attributes,
        },
        allow_nan=False,
        ensure_ascii=False,
    )
    read = json.loads(between, parse_int=float)
    back = kv_pb2.KvSessionRef(
        session_id=read["session_id"], transfer_backend=read["transfer_backend"], dp_rank=int(read["dp_rank"])
    )
    for e in read["endpoints"]:
        back.endpoints.add(host=e["host"], port=int(e["port"]), protocol=e["protocol"])
    back.attributes_struct.update(read["attributes"])
    return kv_pb2.KvSessionRef.FromString(back.SerializeToString())


UINT64 = st.integers(0, 2**64 - 1)
NAMES = st.text(min_size=1, max_size=30)
DIGESTS = st.binary(min_size=32, max_size=32)


@st.composite
def sessions(draw: st.DrawFn) -> KvSession:
    prompt = draw(st.sampled_from([None, plan(1), PLAN, plan(48), plan(49)]))
    layout = dataclasses.replace(
        LAYOUT, layers=draw(st.integers(1, 2**20)), dtype=draw(st.sampled_from(["f", "bfloat16"]))
    )
    base = session(
        prompt,
        first=draw(st.sampled_from([FIRST, FIRST[:1]])),
        seed=draw(UINT64),
        cached_prompt_tokens=draw(st.integers(0, 1 if prompt is not None else 2**31 - 1)),
        model=draw(DIGESTS),
        adapter=draw(st.just(b"") | DIGESTS),
        expires_unix_nanos=draw(UINT64),
    )
    state = draw(st.binary(max_size=100))
    return dataclasses.replace(
        base, handle=Handle(draw(NAMES), draw(NAMES), draw(NAMES), layout, base.handle.blocks, state)
    )


@given(sessions(), st.sampled_from([OPEN, SIGNED]))
def test_a_session_comes_back_equal_through_the_wire_and_through_json(value: KvSession, codec: SessionCodec) -> None:
    message = codec.encode(value)
    data = kv_pb2.KvSessionRef.FromString(message.SerializeToString())
    assert plain(codec.decode(data)) == plain(value)
    assert plain(codec.decode(through_json(message))) == plain(value)


def test_what_others_see_of_a_session() -> None:
    message = SIGNED.encode(session(PLAN))
    assert (message.session_id, message.transfer_backend, message.dp_rank) == ("prefill-1/17", "memory", 0)
    assert [(e.host, e.port, e.protocol) for e in message.endpoints] == [tuple(e) for e in ENDPOINTS]
    assert message.handoff_profile == HANDOFF_PROFILE == "triptych.prompt_plan.v1"
    assert message.HasField("attributes_struct")
    fields = message.attributes_struct.fields
    assert all(key.startswith("triptych_") and fields[key].WhichOneof("kind") == "string_value" for key in fields)
    assert fields["triptych_seed"].string_value == "9223372049200454709"


def test_what_others_add_is_left_alone() -> None:
    message = SIGNED.encode(session(PLAN))
    message.attributes_struct.update({"router": "r1", "deep": [[[{"a": [None, 1e300]}]]], "triptychon": 3})
    message.handoff_profile = "somebody.else.v1"
    message.bootstrap.room_id = 3
    assert plain(SIGNED.decode(message)) == plain(session(PLAN))


def test_there_is_room_for_what_others_add_to_the_largest_session() -> None:
    assert MAX_SENT_BYTES + 100_000 < MAX_SESSION_BYTES
    message = OPEN.encode(session(PLAN))
    message.attributes_struct.fields["router"].string_value = "x" * (MAX_SENT_BYTES + 100_000 - message.ByteSize())
    assert plain(OPEN.decode(message)) == plain(session(PLAN))


def nested(depth: int) -> struct_pb2.Value:
    value = struct_pb2.Value(null_value=struct_pb2.NULL_VALUE)
    for _ in range(depth):
        value = struct_pb2.Value(list_value=struct_pb2.ListValue(values=[value]))
    return value


def test_deep_attributes_of_others_are_not_looked_into() -> None:
    message = OPEN.encode(session(PLAN))
    message.attributes_struct.fields["deep"].CopyFrom(nested(40))
    assert plain(OPEN.decode(message)) == plain(session(PLAN))
    message.attributes_struct.fields["triptych_seed"].CopyFrom(nested(40))
    with pytest.raises(InvalidRequest, match="triptych_seed must be a string"):
        OPEN.decode(message)


def test_a_plan_that_is_too_large_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_plan, "MAX_PLAN_CHARACTERS", 100)
    message = OPEN.encode(session(PLAN))
    assert "triptych_plan" not in message.attributes_struct.fields
    assert plain(OPEN.decode(message)) == plain(session(None))


def test_a_plan_of_a_later_version_is_none() -> None:
    later = base64.b64encode(b"\x02anything").decode()
    assert OPEN.decode(forged(triptych_plan=later)).plan is None


def test_log_probabilities_that_are_too_much_are_refused_and_say_what_helps() -> None:
    first = [FirstToken(1, logprob(*range(150_000)))]
    assert plain(OPEN.decode(OPEN.encode(session(PLAN, first=first))).first) == plain(tuple(first))
    with pytest.raises(InvalidRequest, match=r"session has \d+ bytes .* response\.output_candidates"):
        OPEN.encode(session(PLAN, first=first * 2))


def test_a_session_that_is_handed_on_is_not_changed() -> None:
    message = SIGNED.encode(session(PLAN))
    message.attributes_struct.update({"router": [1, {}]})
    sealed = seal(message)
    assert sealed.session_id == message.session_id
    back = kv_pb2.KvSessionRef()
    unseal(sealed, back)
    assert back == message


# -- what is ours and wrong -------------------------------------------------------------------------


def attributes_of(message: kv_pb2.KvSessionRef) -> dict[str, str]:
    return {key: value.string_value for key, value in message.attributes_struct.fields.items()}


def resealed(message: kv_pb2.KvSessionRef, attributes: dict[str, Any], signer: HandoffSigner | None = None) -> None:
    """Put other attributes in, with a checksum that fits: what a forger can do."""
    own = {k: v for k, v in attributes.items() if k not in ("triptych_checksum", "triptych_signature")}
    texts = {k: v for k, v in own.items() if isinstance(v, str) and k.startswith("triptych_")}
    content = session_content(message, texts)
    own["triptych_checksum"] = checksum(content)
    if signer is not None:
        own["triptych_signature"] = signer.sign(content)
    message.attributes_struct.Clear()
    message.attributes_struct.update(own)


def forged(value: KvSession | None = None, **changes: Any) -> kv_pb2.KvSessionRef:
    """A session with other attributes; None takes one away."""
    message = OPEN.encode(session(PLAN) if value is None else value)
    attributes: dict[str, Any] = {**attributes_of(message), **changes}
    resealed(message, {key: new for key, new in attributes.items() if new is not None})
    return message


HEX = "ab" * 32
CASES: list[tuple[str, Any, str]] = [
    ("version", "1", "triptych_version is '1'; '2' is known here"),
    ("version", "", "triptych_version is ''"),
    ("version", "1" * 1000, "triptych_version is '11111111111111111111'"),
    ("version", None, "was not made by a Triptych engine"),
    ("version", 1.0, "triptych_version must be a string"),
    ("version", [], "triptych_version must be a string"),
    ("instance", None, "triptych_instance is absent"),
    ("instance", "", "triptych_instance has 0 bytes"),
    ("instance", "é" * 129, "triptych_instance has 258 bytes; it must have between 1 and 256"),
    ("layout", None, "triptych_layout is absent"),
    ("layout", "", "triptych_layout is ''"),
    ("layout", "2 3 16 16 float32", "triptych_layout is"),
    ("layout", "2 3 16 16 float32 4 ", "triptych_layout is"),
    ("layout", "2 3 16 16 Float32 4", "triptych_layout is"),
    ("layout", "0 3 16 16 float32 4", r"triptych_layout: a KV layout's layers must be in \[1, 2\^20\], not 0"),
    ("layout", "2 3 16 0 float32 4", "triptych_layout: a KV layout's block_size"),
    ("layout", "2 3 16 9999999 float32 4", "triptych_layout: a KV layout's block_size"),
    ("layout", "2 3 16 8 float32 4", "triptych_blocks is 3; the plan's 40 tokens fill 5 blocks of 8"),
    ("layout", "2 3 16 ١٦ float32 4", "triptych_layout is"),
    ("layout", "1 " * 100_000, "triptych_layout is '1 1 "),
    ("blocks", None, "triptych_blocks is absent"),
    ("blocks", "0", r"triptych_blocks must be a number in \[1, 2147483647\], not '0'"),
    ("blocks", "2", "triptych_blocks is 2; the plan's 40 tokens fill 3 blocks of 16"),
    ("blocks", "4", "triptych_blocks is 4"),
    ("blocks", "2147483648", "triptych_blocks must be a number"),
    ("blocks", "-3", "triptych_blocks must be a number"),
    ("blocks", "03", "triptych_blocks must be a number"),
    ("blocks", "3.0", "triptych_blocks must be a number"),
    ("blocks", "3\n", "triptych_blocks must be a number"),
    ("blocks", "٣", "triptych_blocks must be a number"),
    ("blocks", 3, "triptych_blocks must be a string"),
    ("state", None, "triptych_state is absent"),
    ("state", "A", "triptych_state: it is not base64"),
    ("state", "AAAA=", "triptych_state: it is not base64"),
    ("state", "é", "triptych_state: it is not base64"),
    ("state", "A" * 87_384, "triptych_state has 65538 bytes; at most 65536"),
    ("state", "====", "triptych_state: it is not base64"),
    ("first", None, "triptych_first is absent"),
    ("first", "", "triptych_first: there is no output"),
    ("first", "AAAA", "triptych_first: output 0 is cut short"),
    ("first", "!", "triptych_first: it is not base64"),
    ("seed", None, "triptych_seed is absent"),
    ("seed", "", "triptych_seed must be a number"),
    ("seed", "18446744073709551616", "triptych_seed must be a number"),
    ("seed", "9" * 1000, "triptych_seed must be a number in .*, not '999999999999999999999999'"),
    ("seed", 7.0, "triptych_seed must be a string"),
    ("cached", None, "triptych_cached is absent"),
    ("cached", "41", "triptych_cached is 41 of a plan of 40 tokens"),
    ("cached", "1e3", "triptych_cached must be a number"),
    ("model", None, "triptych_model is absent"),
    ("model", "", "triptych_model must be a digest of 32 bytes"),
    ("model", HEX[:-2], "triptych_model must be a digest"),
    ("model", HEX.upper(), "triptych_model must be a digest"),
    ("model", "é" * 64, "triptych_model must be a digest"),
    ("prompt", None, "triptych_prompt is absent"),
    ("prompt", HEX + "00", "triptych_prompt must be a digest of 32 bytes"),
    ("adapter", None, "triptych_adapter is absent"),
    ("adapter", "ab", "triptych_adapter must be a digest"),
    ("adapter", HEX + "00", "triptych_adapter must be a digest"),
    ("expires", None, "triptych_expires is absent"),
    ("expires", "soon", "triptych_expires must be a number"),
    ("expires", "18446744073709551616", "triptych_expires must be a number"),
    ("plan", "", "triptych_plan: the plan is empty"),
    ("plan", "AQ==", "triptych_plan: the plan is cut short"),
    ("plan", "A", "triptych_plan: it is not base64"),
    ("plan", None, ""),
    ("plan", True, "triptych_plan must be a string"),
]


@pytest.mark.parametrize(("key", "new", "why"), CASES)
def test_a_forged_attribute_is_refused_by_name(key: str, new: Any, why: str) -> None:
    message = forged(**{f"triptych_{key}": new})
    if not why:
        assert OPEN.decode(message).plan is None
        return
    with pytest.raises(InvalidRequest, match=f"^kv.session.*{why}") as caught:
        OPEN.decode(message)
    assert len(str(caught.value)) < 400


def test_every_attribute_has_been_forged() -> None:
    keys = {key.removeprefix("triptych_") for key in attributes_of(OPEN.encode(session(PLAN)))}
    assert keys == {key for key, _, _ in CASES} | {"checksum"}


def change_id(message: kv_pb2.KvSessionRef) -> None:
    message.session_id = ""


def change_backend(message: kv_pb2.KvSessionRef) -> None:
    message.transfer_backend = "x" * 257


def change_rank(message: kv_pb2.KvSessionRef) -> None:
    message.dp_rank = 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (change_id, "session_id has 0 bytes"),
        (change_backend, "transfer_backend has 257 bytes"),
        (change_rank, "dp_rank is 1"),
    ],
)
def test_a_forged_field_is_refused_by_name(change: Callable[[kv_pb2.KvSessionRef], None], why: str) -> None:
    message = OPEN.encode(session(PLAN))
    change(message)
    resealed(message, attributes_of(message))
    with pytest.raises(InvalidRequest, match=why):
        OPEN.decode(message)


def test_sizes_are_bounded_before_anything_is_read() -> None:
    message = OPEN.encode(session(PLAN))
    message.attributes_struct.fields["other"].string_value = "x" * MAX_SESSION_BYTES
    with pytest.raises(InvalidRequest, match=r"kv.session has 3\d+ bytes; at most 3145728"):
        OPEN.decode(message)
    message = OPEN.encode(session(PLAN))
    for number in range(MAX_ATTRIBUTES):
        message.attributes_struct.fields[f"triptych_{number}"].string_value = "x"
    with pytest.raises(InvalidRequest, match=r"kv.session has 2\d\d attributes; at most 256"):
        OPEN.decode(message)
    message = OPEN.encode(session(PLAN))
    for _ in range(MAX_ENDPOINTS):
        message.endpoints.add(host="h")
    with pytest.raises(InvalidRequest, match="18 endpoints; at most 16"):
        OPEN.decode(message)


def test_the_largest_state_passes() -> None:
    value = session(PLAN)
    handle = dataclasses.replace(value.handle, state=bytes(MAX_HANDLE_STATE))
    assert OPEN.decode(OPEN.encode(dataclasses.replace(value, handle=handle))).handle.state == handle.state


@pytest.mark.parametrize("codec", [OPEN, SIGNED])
def test_a_session_of_another_engine_is_named_as_such(codec: SessionCodec) -> None:
    message = kv_pb2.KvSessionRef(session_id="12", transfer_backend="NIXL")
    with pytest.raises(InvalidRequest, match="not made by a Triptych engine"):
        codec.decode(message)
    message.attributes_struct.update({"opaque_state": "AAAA", "first_gen_tokens": [1], "ctx_dp_rank": 0})
    with pytest.raises(InvalidRequest, match="not made by a Triptych engine"):
        codec.decode(message)


# -- what was changed on the way --------------------------------------------------------------------


def text_mutations(message: kv_pb2.KvSessionRef) -> list[kv_pb2.KvSessionRef]:
    """The same message with each field and each attribute changed, one by one."""
    changed = []
    for key in attributes_of(message):
        other = kv_pb2.KvSessionRef()
        other.CopyFrom(message)
        value = other.attributes_struct.fields[key]
        value.string_value = value.string_value[:-1] + ("0" if value.string_value[-1:] != "0" else "1")
        changed.append(other)
    for name, new in (("session_id", "prefill-1/18"), ("transfer_backend", "memorz"), ("dp_rank", 1)):
        other = kv_pb2.KvSessionRef()
        other.CopyFrom(message)
        setattr(other, name, new)
        changed.append(other)
    for part, at in (("host", "evil.example"), ("port", 1), ("protocol", "x")):
        other = kv_pb2.KvSessionRef()
        other.CopyFrom(message)
        setattr(other.endpoints[0], part, at)
        changed.append(other)
    other = kv_pb2.KvSessionRef()
    other.CopyFrom(message)
    del other.endpoints[1]
    extra = kv_pb2.KvSessionRef()
    extra.CopyFrom(message)
    extra.attributes_struct.fields["triptych_new"].string_value = ""
    return [*changed, other, extra]


def test_every_change_breaks_the_checksum() -> None:
    for message in text_mutations(OPEN.encode(session(PLAN))):
        with pytest.raises(InvalidRequest, match=r"checksum does not fit|triptych_version is"):
            OPEN.decode(message)
        with pytest.raises(InvalidRequest):
            OPEN.decode(through_json(message))


def test_every_change_breaks_the_signature() -> None:
    for message in text_mutations(SIGNED.encode(session(PLAN))):
        if (
            message.attributes_struct.fields["triptych_checksum"]
            != SIGNED.encode(session(PLAN)).attributes_struct.fields["triptych_checksum"]
        ):
            continue  # the signature stands for the checksum, too
        with pytest.raises(Unauthenticated, match="signature is wrong"):
            SIGNED.decode(message)


def test_a_forger_without_the_secret_gets_nowhere() -> None:
    for message in text_mutations(SIGNED.encode(session(PLAN))):
        attributes = attributes_of(message)
        signature = attributes["triptych_signature"]
        resealed(message, attributes, HandoffSigner(SECRET + "?"))
        with pytest.raises(Unauthenticated, match="signature is wrong"):
            SIGNED.decode(message)
        resealed(message, attributes)
        with pytest.raises(Unauthenticated, match="signature is absent"):
            SIGNED.decode(message)
        message.attributes_struct.fields["triptych_signature"].string_value = signature[:-1] + "é"
        with pytest.raises(Unauthenticated, match="signature is wrong"):
            SIGNED.decode(message)


def test_a_signature_comes_before_everything_else() -> None:
    message = SIGNED.encode(session(PLAN))
    message.attributes_struct.fields["triptych_version"].string_value = "7"
    message.attributes_struct.fields["triptych_plan"].string_value = "!"
    with pytest.raises(Unauthenticated):
        SIGNED.decode(message)


def test_without_a_secret_signatures_are_not_looked_at() -> None:
    message = SIGNED.encode(session(PLAN))
    assert plain(OPEN.decode(message)) == plain(session(PLAN))
    message.attributes_struct.fields["triptych_signature"].string_value = "whatever"
    assert plain(OPEN.decode(message)) == plain(session(PLAN))


def test_fields_do_not_run_into_each_other() -> None:
    one = kv_pb2.KvSessionRef(session_id="ab", transfer_backend="c")
    two = kv_pb2.KvSessionRef(session_id="a", transfer_backend="bc")
    assert session_content(one, {}) != session_content(two, {})
    assert session_content(one, {"a": "bc"}) != session_content(one, {"ab": "c"})
    assert session_content(one, {"a": "", "b": ""}) != session_content(one, {"a": "b"})
    assert session_content(one, {"a": "1", "b": "2"}) == session_content(one, {"b": "2", "a": "1"})


def test_the_secret_is_shown_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    signer = HandoffSigner(SECRET)
    codec = SessionCodec(ENDPOINTS, signer)
    with caplog.at_level(logging.DEBUG), pytest.raises(Unauthenticated) as caught:
        codec.decode(OPEN.encode(session(PLAN)))
    shown = [repr(signer), str(signer), repr(codec), str(caught.value), caplog.text, str(codec.encode(session(PLAN)))]
    assert not any(SECRET in text for text in shown)
    assert not hasattr(signer, "__dict__")


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(StartupError, match="has 15 bytes; it needs at least 16") as caught:
        HandoffSigner("fifteen letters")
    assert "fifteen letters" not in str(caught.value)
    assert HandoffSigner("sixteen letters!").sign(b"x") != HandoffSigner("sixteen letters?").sign(b"x")


# -- abort ------------------------------------------------------------------------------------------


def test_the_name_of_a_session_that_is_to_be_aborted() -> None:
    message = kv_pb2.KvSessionRef(session_id="prefill-1/17")
    assert OPEN.session_id(message) == "prefill-1/17"
    with pytest.raises(InvalidRequest, match="not made by a Triptych"):
        SIGNED.session_id(message)
    with pytest.raises(Unauthenticated):
        SIGNED.session_id(OPEN.encode(session(PLAN)))
    assert SIGNED.session_id(SIGNED.encode(session(PLAN))) == "prefill-1/17"
    for name in ("", "x" * 257):
        with pytest.raises(InvalidRequest, match="session_id has"):
            OPEN.session_id(kv_pb2.KvSessionRef(session_id=name))


# -- anything at all --------------------------------------------------------------------------------


def refusal(codec: SessionCodec, message: kv_pb2.KvSessionRef) -> str:
    """Why it is refused; empty when it is not."""
    try:
        codec.decode(message)
    except (InvalidRequest, Unauthenticated) as error:
        return str(error)
    return ""


BASE = OPEN.encode(session(PLAN)).SerializeToString(deterministic=True)


@settings(max_examples=300)
@given(st.data())
def test_any_bytes_have_an_outcome(data: st.DataObject) -> None:
    changed = bytearray(BASE)
    for _ in range(data.draw(st.integers(1, 5))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = kv_pb2.KvSessionRef.FromString(bytes(changed))
    except UNREADABLE:
        return
    for codec in (OPEN, SIGNED):
        assert len(refusal(codec, message)) < 500


KEYS = st.sampled_from(sorted({f"triptych_{key}" for key, _, _ in CASES}))
TEXTS = (
    st.text(max_size=40)
    | st.integers(-(2**70), 2**70).map(str)
    | st.binary(max_size=90).map(lambda data: base64.b64encode(data).decode())
)


@settings(max_examples=300)
@given(st.dictionaries(KEYS, TEXTS, min_size=1, max_size=3))
def test_any_attributes_have_an_outcome(changes: dict[str, str]) -> None:
    message = forged(**changes)
    if why := refusal(OPEN, message):
        assert len(why) < 500
        return
    value = OPEN.decode(message)
    assert plain(OPEN.decode(OPEN.encode(value))) == plain(value)


def test_a_sealed_session_is_the_same_in_whatever_order_its_attributes_came() -> None:
    names = [f"name-{number}" for number in range(20)]
    forwards, backwards = (kv_pb2.KvSessionRef(session_id="s") for _ in range(2))
    for name in names:
        forwards.attributes_struct.update({name: "value"})
    for name in reversed(names):
        backwards.attributes_struct.update({name: "value"})
    assert seal(forwards) == seal(backwards)
