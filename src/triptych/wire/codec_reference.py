"""Encoder references: protobuf <-> core, both ways.

    opaque_state  = version, checksum | blocks, bytes of a block and of a row, number format | the transport's own
    plan          = the item, see portable_item
    signature     = over all fields and the state, but for the checksum

What another release of ours wrote is refused and not guessed at: a request that comes with references has no media to
fall back on. Messages name the field; whoever reads several references names the one.
"""

from __future__ import annotations

import re
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.encoded import EncodedItem, EncoderReference, SealedReference
from triptych.core.errors import InvalidRequest, Unauthenticated
from triptych.core.handles import Handle, RowLayout
from triptych.wire.codec_session import MAX_ENDPOINTS, MAX_NAME_BYTES, Endpoint
from triptych.wire.gen import encoder_pb2 as pb
from triptych.wire.gen import kv_pb2
from triptych.wire.handoff_signature import HandoffSigner, checksum, signed_content
from triptych.wire.portable_item import PortableItem, decode_item, encode_item

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_REFERENCE_BYTES = 64 * 1024
"""Of a reference as a message."""

_DOMAIN = "triptych.reference.v1"
_VERSION = 1
_HEAD = struct.Struct("<B16s")
_ROWS = struct.Struct("<IIIB")
_DTYPE = re.compile(rb"[a-z][a-z0-9_]{0,31}")


class _Rows(NamedTuple):
    """What the state says of the rows."""

    blocks: int
    block_bytes: int
    row_bytes: int
    dtype_bytes: int
    """How many bytes its name has, which follows."""


class ReferenceCodec:
    """Writes and reads the references of one engine.

    Args:
        endpoints: where this engine answers ``Abort(encoder_cache)`` and ``TransferEncoderCache``.
        signer: None: references are not signed, and signatures are not looked at.
    """

    def __init__(self, endpoints: tuple[Endpoint, ...] = (), signer: HandoffSigner | None = None) -> None:
        self.endpoints = endpoints
        self._signer = signer

    def encode(self, reference: EncoderReference) -> pb.EncoderCacheRef:
        """Write a reference.

        Raises:
            InvalidRequest: the item is too large for one.
        """
        item = reference.item
        handle = item.handle
        message = pb.EncoderCacheRef(
            cache_id=handle.session_id,
            instance_id=handle.instance_id,
            transfer_backend=handle.backend,
            endpoints=[kv_pb2.KvEndpoint(host=e.host, port=e.port, protocol=e.protocol) for e in self.endpoints],
            expires_unix_nanos=reference.expires_unix_nanos,
            plan=encode_item(PortableItem(item.layout, reference.fingerprint)),
        )
        dtype = item.dtype.encode("ascii")
        rows = _Rows(handle.blocks, handle.layout.block_bytes, item.row_bytes, len(dtype))
        body = _ROWS.pack(*rows) + dtype + handle.state
        content = reference_content(message, _VERSION, body)
        message.opaque_state = _HEAD.pack(_VERSION, bytes.fromhex(checksum(content))) + body
        if self._signer is not None:
            message.signature = bytes.fromhex(self._signer.sign(content))
        size = message.ByteSize()
        if size > MAX_REFERENCE_BYTES:
            raise InvalidRequest(
                f"its reference has {size} bytes and can have {MAX_REFERENCE_BYTES}; send it smaller or shorter"
            )
        return message

    def decode(self, message: pb.EncoderCacheRef, where: str = "encoder_cache") -> EncoderReference:
        """Read a reference, wherever it comes from.

        Args:
            message: what came.
            where: the field that it came in.

        Raises:
            InvalidRequest: another engine made it, or it is malformed or contradicts itself; says where.
            Unauthenticated: it is not signed with this engine's secret.
        """
        with _named(where):
            return _reference(message, self._own_state(message))

    def _own_state(self, message: pb.EncoderCacheRef) -> bytes:
        """What follows the checksum in the state, once all of the message is known to be what its engine wrote."""
        size = message.ByteSize()
        if size > MAX_REFERENCE_BYTES:
            raise InvalidRequest(f"it has {size} bytes; at most {MAX_REFERENCE_BYTES}")
        if len(message.endpoints) > MAX_ENDPOINTS:
            raise InvalidRequest(f"endpoints: there are {len(message.endpoints)}; at most {MAX_ENDPOINTS}")
        state = message.opaque_state
        if len(state) < _HEAD.size:
            raise InvalidRequest("opaque_state: it is cut short, or was not made by a Triptych engine")
        version, sum_ = _HEAD.unpack_from(state)
        body = state[_HEAD.size :]
        content = reference_content(message, version, body)
        if self._signer is not None and not self._signer.matches(content, message.signature.hex()):
            raise Unauthenticated(
                f"signature: it is {'wrong' if message.signature else 'absent'}; "
                "both engines need the same hand-off secret"
            )
        if version != _VERSION:
            raise InvalidRequest(f"opaque_state: its version is {version}; {_VERSION} is known here")
        if sum_.hex() != checksum(content):
            raise InvalidRequest("opaque_state: the checksum does not fit; something was changed on the way")
        return body


def reference_content(message: pb.EncoderCacheRef, version: int, body: bytes) -> bytes:
    """The bytes of a reference that are signed.

    Args:
        message: its ``opaque_state`` and ``signature`` are not read.
        version: of the state.
        body: the state behind its checksum.
    """
    fields: list[str | bytes] = [
        message.cache_id,
        message.instance_id,
        message.transfer_backend,
        str(len(message.endpoints)),
    ]
    for endpoint in message.endpoints:
        fields += [endpoint.host, str(endpoint.port), endpoint.protocol]
    fields += [str(message.expires_unix_nanos), message.plan, str(version), body]
    return signed_content(_DOMAIN, fields)


def seal_reference(message: pb.EncoderCacheRef) -> SealedReference:
    """A reference that is only handed on."""
    return SealedReference(message.cache_id, message.SerializeToString(deterministic=True))


def unseal_reference(reference: SealedReference, message: pb.EncoderCacheRef) -> None:
    """Write a reference that was only handed on."""
    message.MergeFromString(reference.data)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Says of which thing an error speaks."""
    try:
        yield
    except (InvalidRequest, Unauthenticated) as error:
        raise type(error)(f"{where}: {error}") from None


def _reference(message: pb.EncoderCacheRef, body: bytes) -> EncoderReference:
    with _named("plan"):
        layout, fingerprint = decode_item(message.plan)
    with _named("opaque_state"):
        if len(body) < _ROWS.size:
            raise InvalidRequest("it is cut short")
        rows = _Rows(*_ROWS.unpack_from(body))
        dtype, state = body[_ROWS.size :][: rows.dtype_bytes], body[_ROWS.size + rows.dtype_bytes :]
        if len(dtype) < rows.dtype_bytes or _DTYPE.fullmatch(dtype) is None:
            raise InvalidRequest(f"its number format is {dtype[:40]!r}")
        if not rows.row_bytes:
            raise InvalidRequest("its rows have 0 bytes")
        blocks = RowLayout(rows.block_bytes)
        wanted = blocks.blocks(layout.rows * rows.row_bytes)
        if rows.blocks != wanted:
            raise InvalidRequest(
                f"its blocks are {rows.blocks}; {layout.rows} rows of {rows.row_bytes} bytes fill {wanted} of "
                f"{rows.block_bytes} bytes"
            )
    handle = Handle(
        session_id=_name("cache_id", message.cache_id),
        backend=_name("transfer_backend", message.transfer_backend),
        instance_id=_name("instance_id", message.instance_id),
        layout=blocks,
        blocks=rows.blocks,
        state=state,
    )
    item = EncodedItem(layout, handle, rows.row_bytes, dtype.decode("ascii"))
    return EncoderReference(item, fingerprint, message.expires_unix_nanos)


def _name(field: str, text: str) -> str:
    size = len(text.encode())
    if not 1 <= size <= MAX_NAME_BYTES:
        raise InvalidRequest(f"{field}: it has {size} bytes; it must have between 1 and {MAX_NAME_BYTES}")
    return text
