"""Encoder references through the wire, and through hands that should not touch them."""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.references import BLOCK, ROW, layouts, reference
from tests.sessions import picture, plain, video
from triptych.core.encoded import EncodedItem, EncoderReference
from triptych.core.errors import InvalidRequest, Unauthenticated
from triptych.core.handles import MAX_ROW_BLOCK, Handle, RowLayout
from triptych.wire.codec_reference import (
    MAX_REFERENCE_BYTES,
    ReferenceCodec,
    reference_content,
    seal_reference,
    unseal_reference,
)
from triptych.wire.codec_session import MAX_ENDPOINTS, MAX_NAME_BYTES, Endpoint
from triptych.wire.gen import encoder_pb2
from triptych.wire.handoff_signature import HandoffSigner, checksum, signed_content
from triptych.wire.status import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = "correct horse battery staple"
ENDPOINTS = (Endpoint("encoder.example", 50051, "grpc"), Endpoint("::1", 9, "nixl"))
OPEN = ReferenceCodec(ENDPOINTS)
SIGNED = ReferenceCodec(ENDPOINTS, HandoffSigner(SECRET))
FIELDS = list(encoder_pb2.EncoderCacheRef.DESCRIPTOR.fields_by_name)

NAMES = st.text(min_size=1, max_size=30)


@st.composite
def references(draw: st.DrawFn) -> EncoderReference:
    layout, row_bytes = draw(layouts()), draw(st.integers(1, 2**32 - 1))
    rows = RowLayout(draw(st.integers(max(1, row_bytes // 2**20), MAX_ROW_BLOCK)))
    handle = Handle(
        draw(NAMES), draw(NAMES), draw(NAMES), rows, rows.blocks(layout.rows * row_bytes), draw(st.binary(max_size=100))
    )
    item = EncodedItem(layout, handle, row_bytes, draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])))
    return EncoderReference(item, draw(st.binary(min_size=32, max_size=32)), draw(st.integers(0, 2**64 - 1)))


@given(references(), st.sampled_from([OPEN, SIGNED]))
def test_a_reference_comes_back_equal(value: EncoderReference, codec: ReferenceCodec) -> None:
    data = codec.encode(value).SerializeToString()
    assert plain(codec.decode(encoder_pb2.EncoderCacheRef.FromString(data))) == plain(value)


def test_what_others_see_of_a_reference() -> None:
    message = SIGNED.encode(reference())
    assert (message.cache_id, message.instance_id, message.transfer_backend) == ("encoder-1/17", "instance-1", "memory")
    assert [(e.host, e.port, e.protocol) for e in message.endpoints] == [tuple(e) for e in ENDPOINTS]
    assert message.expires_unix_nanos == 1_790_000_000_123_456_789
    assert len(message.signature) == 32
    assert message.ByteSize() < 400
    assert not OPEN.encode(reference()).signature


def test_what_a_later_release_adds_is_left_alone() -> None:
    message = SIGNED.encode(reference())
    message.MergeFromString(b"\x9a\x3e\x01x")  # a field of number 995
    assert plain(SIGNED.decode(message)) == plain(reference())


def test_a_reference_that_is_handed_on_is_not_changed() -> None:
    message = SIGNED.encode(reference())
    message.MergeFromString(b"\x9a\x3e\x01x")
    sealed = seal_reference(message)
    assert sealed.cache_id == message.cache_id
    back = encoder_pb2.EncoderCacheRef()
    unseal_reference(sealed, back)
    assert back.SerializeToString(deterministic=True) == message.SerializeToString(deterministic=True) == sealed.data


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b\\c", "\x00", "é😀", " ", "-rf"])
def test_a_name_is_a_name_and_nothing_else(name: str) -> None:
    assert SIGNED.decode(SIGNED.encode(reference(name=name))).item.handle.session_id == name


# -- what is ours and wrong -------------------------------------------------------------------------

HEAD = 17
"""Version and checksum."""


def resealed(message: encoder_pb2.EncoderCacheRef, signer: HandoffSigner | None = None) -> encoder_pb2.EncoderCacheRef:
    """The same with a checksum that fits: what a forger can do."""
    version, body = message.opaque_state[0], message.opaque_state[HEAD:]
    content = reference_content(message, version, body)
    message.opaque_state = bytes([version]) + bytes.fromhex(checksum(content)) + body
    message.signature = b"" if signer is None else bytes.fromhex(signer.sign(content))
    return message


def forged(value: EncoderReference | None = None, **changes: Any) -> encoder_pb2.EncoderCacheRef:
    """A reference with other fields; ``version`` and ``body`` are those of its state."""
    message = OPEN.encode(reference() if value is None else value)
    version = changes.pop("version", message.opaque_state[0])
    body = changes.pop("body", message.opaque_state[HEAD:])
    message.opaque_state = bytes([version]) + bytes(16) + body
    for name, new in changes.items():
        setattr(message, name, new)
    return resealed(message)


def body(blocks: int = 3, block: int = BLOCK, row: int = ROW, dtype: bytes = b"float32", size: int = -1) -> bytes:
    """What follows the checksum: 6 rows of 400 bytes in 3 blocks of 1024."""
    return struct.pack("<IIIB", blocks, block, row, len(dtype) if size < 0 else size) + dtype + b"state"


CASES: list[tuple[dict[str, Any], str]] = [
    ({"cache_id": ""}, "cache_id: it has 0 bytes; it must have between 1 and 256"),
    ({"cache_id": "é" * 129}, "cache_id: it has 258 bytes"),
    ({"instance_id": ""}, "instance_id: it has 0 bytes"),
    ({"instance_id": "x" * (MAX_NAME_BYTES + 1)}, "instance_id: it has 257 bytes"),
    ({"transfer_backend": ""}, "transfer_backend: it has 0 bytes"),
    ({"transfer_backend": "x" * 60_000}, "transfer_backend: it has 60000 bytes"),
    ({"plan": b""}, "plan: it is empty"),
    ({"plan": b"\x01" * 100}, "plan: its version is 1"),
    ({"plan": b"\x02" * 100}, "plan: it has 33686018 runs"),
    ({"version": 0}, "opaque_state: its version is 0; 1 is known here"),
    ({"version": 2}, "opaque_state: its version is 2; 1 is known here"),
    ({"body": b""}, "opaque_state: it is cut short"),
    ({"body": body()[:12]}, "opaque_state: it is cut short"),
    ({"body": body(size=13)}, "opaque_state: its number format is b'float32state'"),
    ({"body": body(size=0, dtype=b"")}, "opaque_state: its number format is b''"),
    ({"body": body(dtype=b"Float32")}, "opaque_state: its number format is b'Float32'"),
    ({"body": body(dtype=b"float32\n")}, "opaque_state: its number format"),
    ({"body": body(dtype=b"f" * 33)}, "opaque_state: its number format is b'fff"),
    ({"body": body(dtype="floaté".encode())}, "opaque_state: its number format"),
    ({"body": body(row=0)}, "opaque_state: its rows have 0 bytes"),
    ({"body": body(row=2**32 - 1)}, r"opaque_state: its blocks are 3; 6 rows of 4294967295 bytes fill 25165824 of"),
    ({"body": body(block=0)}, "opaque_state: a block of encoder rows has 0 bytes"),
    ({"body": body(block=MAX_ROW_BLOCK + 1)}, "opaque_state: a block of encoder rows has 1073741825 bytes"),
    ({"body": body(blocks=0)}, "opaque_state: its blocks are 0; 6 rows of 400 bytes fill 3 of 1024 bytes"),
    ({"body": body(blocks=4)}, "opaque_state: its blocks are 4"),
    ({"body": body(blocks=2**32 - 1)}, "opaque_state: its blocks are 4294967295"),
]


@pytest.mark.parametrize(("changes", "why"), CASES)
def test_a_forged_field_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^encoder_cache: {why}") as caught:
        OPEN.decode(forged(**changes))
    assert len(str(caught.value)) < 200
    with pytest.raises(InvalidRequest, match=r"^encoder_cache\[7\]: [a-z_]+: "):
        OPEN.decode(forged(**changes), "encoder_cache[7]")


def test_every_field_has_been_forged() -> None:
    forgeries = {name for changes, _ in CASES for name in changes} - {"version", "body"} | {"opaque_state"}
    assert forgeries == set(FIELDS) - {"endpoints", "signature", "expires_unix_nanos"}  # whatever they are is well


@pytest.mark.parametrize("expires", [0, 1, 2**64 - 1])
def test_whether_it_has_expired_is_not_said_here(expires: int) -> None:
    assert OPEN.decode(forged(expires_unix_nanos=expires)).expires_unix_nanos == expires


def test_sizes_are_bounded_before_anything_is_read() -> None:
    message = OPEN.encode(reference())
    message.plan += bytes(MAX_REFERENCE_BYTES)
    with pytest.raises(InvalidRequest, match=r"^encoder_cache: it has 65\d+ bytes; at most 65536"):
        OPEN.decode(message)
    message = OPEN.encode(reference())
    message.MergeFromString(b"\x9a\x3e" + b"\x80\x80\x04" + bytes(MAX_REFERENCE_BYTES))  # what nobody knows counts, too
    with pytest.raises(InvalidRequest, match="it has 65"):
        OPEN.decode(message)
    message = OPEN.encode(reference())
    for _ in range(MAX_ENDPOINTS):
        message.endpoints.add(host="h")
    with pytest.raises(InvalidRequest, match="encoder_cache: endpoints: there are 18; at most 16"):
        OPEN.decode(resealed(message))


def test_the_largest_reference_that_is_written_is_read() -> None:
    value = reference()
    free = MAX_REFERENCE_BYTES - SIGNED.encode(value).ByteSize() - 4  # lengths of more digits
    handle = dataclasses.replace(value.item.handle, state=value.item.handle.state + bytes(free))
    large = dataclasses.replace(value, item=dataclasses.replace(value.item, handle=handle))
    message = SIGNED.encode(large)
    assert MAX_REFERENCE_BYTES - 4 <= message.ByteSize() <= MAX_REFERENCE_BYTES
    assert plain(SIGNED.decode(message)) == plain(large)
    handle = dataclasses.replace(handle, state=bytes(MAX_REFERENCE_BYTES))
    large = dataclasses.replace(value, item=dataclasses.replace(value.item, handle=handle))
    with pytest.raises(InvalidRequest, match=r"its reference has 65\d+ bytes and can have 65536; send it smaller"):
        SIGNED.encode(large)


@pytest.mark.parametrize("codec", [OPEN, SIGNED])
def test_a_reference_of_another_engine_is_named_as_such(codec: ReferenceCodec) -> None:
    for state in (b"", b"opaque", b"\x01" * (HEAD - 1)):
        message = encoder_pb2.EncoderCacheRef(cache_id="12", transfer_backend="NIXL", opaque_state=state)
        with pytest.raises(InvalidRequest, match="not made by a Triptych engine"):
            codec.decode(message)


# -- what was changed on the way --------------------------------------------------------------------


def copy(message: encoder_pb2.EncoderCacheRef) -> encoder_pb2.EncoderCacheRef:
    other = encoder_pb2.EncoderCacheRef()
    other.CopyFrom(message)
    return other


def mutations(message: encoder_pb2.EncoderCacheRef) -> Iterator[encoder_pb2.EncoderCacheRef]:
    """The same message with each field changed, one by one; not its signature."""
    for field in FIELDS:
        if field in ("endpoints", "signature"):
            continue
        value = getattr(message, field)
        match value:
            case str():
                others: list[Any] = [f"{value}x", value[:-1], ""]
            case bytes():
                others = [value + b"\x00", value[:-1], value[1:], b""]
            case _:
                others = [value + 1, 0]
        for new in others:
            other = copy(message)
            setattr(other, field, new)
            yield other
    for part, new in (("host", "evil.example"), ("port", 1), ("protocol", "x")):
        other = copy(message)
        setattr(other.endpoints[0], part, new)
        yield other
    for change in (lambda all_: all_.pop(), lambda all_: all_.add(), lambda all_: all_.reverse()):
        other = copy(message)
        change(other.endpoints)
        yield other


def test_every_change_breaks_the_checksum() -> None:
    for message in mutations(OPEN.encode(reference())):
        with pytest.raises(InvalidRequest, match=r"checksum does not fit|cut short|its version is"):
            OPEN.decode(message)


def test_every_change_breaks_the_signature() -> None:
    for message in mutations(SIGNED.encode(reference())):
        whole = len(message.opaque_state) >= HEAD
        with pytest.raises(Unauthenticated if whole else InvalidRequest, match=r"signature: it is wrong|cut short"):
            SIGNED.decode(message)


def test_a_forger_without_the_secret_gets_nowhere() -> None:
    for message in mutations(SIGNED.encode(reference())):
        if len(message.opaque_state) < HEAD:
            continue
        with pytest.raises(Unauthenticated, match=r"^encoder_cache: signature: it is wrong"):
            SIGNED.decode(resealed(copy(message), HandoffSigner(SECRET + "?")))
        with pytest.raises(Unauthenticated, match=r"^encoder_cache: signature: it is absent"):
            SIGNED.decode(resealed(copy(message)))


def test_a_signature_is_right_as_a_whole_only() -> None:
    message = SIGNED.encode(reference())
    right = message.signature
    for wrong in (right[:-1], right + b"\x00", right[::-1], b"\x00", right.hex().encode()):
        message.signature = wrong
        with pytest.raises(Unauthenticated, match="signature: it is wrong"):
            SIGNED.decode(message)


def test_a_signature_comes_before_everything_else() -> None:
    message = SIGNED.encode(reference())
    message.opaque_state = b"\x07" + message.opaque_state[1:]
    message.plan = b"!"
    with pytest.raises(Unauthenticated):
        SIGNED.decode(message)


def test_without_a_secret_signatures_are_not_looked_at() -> None:
    message = SIGNED.encode(reference())
    message.signature = b"whatever"
    assert plain(OPEN.decode(message)) == plain(reference())


def decoded(codec: ReferenceCodec, data: bytes) -> EncoderReference | None:
    """None where the bytes are refused."""
    try:
        return codec.decode(encoder_pb2.EncoderCacheRef.FromString(data))
    except (*UNREADABLE, InvalidRequest, Unauthenticated):
        return None


@pytest.mark.parametrize("codec", [OPEN, SIGNED])
def test_every_truncation_is_refused(codec: ReferenceCodec) -> None:
    data = codec.encode(reference(video(0, 3, 1, 2))).SerializeToString(deterministic=True)
    assert decoded(codec, data) is not None
    assert [size for size in range(len(data)) if decoded(codec, data[:size]) is not None] == []


@pytest.mark.parametrize("codec", [OPEN, SIGNED])
def test_every_bit_counts(codec: ReferenceCodec) -> None:
    data = codec.encode(reference(video(0, 3, 1, 2))).SerializeToString(deterministic=True)
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            assert decoded(codec, bytes(changed)) is None, (at, bit)


def test_names_that_are_no_text_are_no_message() -> None:
    data = OPEN.encode(reference()).SerializeToString().replace(b"encoder-1/17", b"encoder-1\xff17")
    with pytest.raises(UNREADABLE):
        encoder_pb2.EncoderCacheRef.FromString(data)


def test_fields_do_not_run_into_each_other() -> None:
    one = encoder_pb2.EncoderCacheRef(cache_id="ab", instance_id="c", plan=b"de")
    two = encoder_pb2.EncoderCacheRef(cache_id="a", instance_id="bc", plan=b"de")
    assert reference_content(one, 1, b"") != reference_content(two, 1, b"")
    two = encoder_pb2.EncoderCacheRef(cache_id="ab", instance_id="c", plan=b"d")
    assert reference_content(one, 1, b"f") != reference_content(two, 1, b"ef")
    assert reference_content(one, 1, b"f") != reference_content(one, 2, b"f")
    two = encoder_pb2.EncoderCacheRef(cache_id="ab", instance_id="c", plan=b"de", opaque_state=b"x", signature=b"y")
    assert reference_content(one, 1, b"f") == reference_content(two, 1, b"f")


@given(st.lists(st.text(max_size=5) | st.binary(max_size=5), max_size=5))
def test_what_is_signed_as_a_session_is_no_reference(fields: list[str | bytes]) -> None:
    assert signed_content("triptych.session.v1", fields) != signed_content("triptych.reference.v1", fields)
    assert reference_content(encoder_pb2.EncoderCacheRef(), 1, b"").startswith(
        signed_content("triptych.reference.v1", [])
    )


# -- anything at all --------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.data(), st.sampled_from([OPEN, SIGNED]))
def test_any_bytes_have_an_outcome(data: st.DataObject, codec: ReferenceCodec) -> None:
    base = codec.encode(reference()).SerializeToString(deterministic=True)
    changed = bytearray(base)
    for _ in range(data.draw(st.integers(1, 5))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    assert decoded(codec, bytes(changed)) is None or bytes(changed) == base


FORGERIES: dict[str, st.SearchStrategy[Any]] = {
    "plan": st.binary(max_size=150) | st.binary(max_size=150).map(lambda data: b"\x02" + data),
    "body": st.binary(max_size=60)
    | st.builds(body, *(st.integers(0, 2**32 - 1) | st.integers(0, 9) for _ in range(3)), st.binary(max_size=40)),
    "version": st.integers(0, 255),
    "cache_id": st.text(max_size=40),
    "expires_unix_nanos": st.integers(0, 2**64 - 1),
}


@settings(max_examples=300)
@given(st.fixed_dictionaries({}, optional=FORGERIES))
def test_any_forgery_has_an_outcome(changes: dict[str, Any]) -> None:
    value = decoded(OPEN, forged(**changes).SerializeToString())
    if value is not None:
        assert plain(OPEN.decode(OPEN.encode(value))) == plain(value)


@pytest.mark.parametrize("make", [lambda: picture(0, 1, 1), lambda: video(0, 384, 2, 2), lambda: video(0, 1, 100, 100)])
def test_items_of_every_size(make: Callable[[], Any]) -> None:
    message = SIGNED.encode(reference(make()))
    assert message.ByteSize() < 4096
    assert plain(SIGNED.decode(message)) == plain(reference(make()))
