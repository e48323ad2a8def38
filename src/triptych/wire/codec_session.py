"""KV sessions: protobuf <-> core, both ways.

What is ours lies in the attributes, as strings: clients between the engines take a session apart into its five fields,
through JSON, and put it together again. Other attributes are somebody else's and are not read.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import astuple
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import InvalidRequest, Unauthenticated
from triptych.core.handles import MAX_HANDLE_STATE, Handle, KvHandle, KvLayout
from triptych.core.session import KvSession, SealedSession
from triptych.wire.base64_text import from_base64, to_base64
from triptych.wire.first_tokens import decode_first, encode_first
from triptych.wire.gen import kv_pb2 as pb
from triptych.wire.handoff_signature import HandoffSigner, checksum, signed_content
from triptych.wire.portable_plan import decode_plan, encode_plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from triptych.core.plan import PromptPlan

HANDOFF_PROFILE = "triptych.prompt_plan.v1"
"""Names this contract where there is a field for it; clients between the engines may lose it."""
MAX_SENT_BYTES = 3_000_000
"""Of a session as a message when it leaves; what the clients in between are known to carry."""
MAX_SESSION_BYTES = 3 * 1024 * 1024
"""The same when it arrives: there is room for what they add."""
MAX_ATTRIBUTES = 256
MAX_ENDPOINTS = 16
MAX_NAME_BYTES = 256
"""Of a session's id, its engine's and its transport's."""

_DOMAIN = "triptych.session.v1"
_VERSION_KEY = "triptych_version"
_CHECKSUM_KEY = "triptych_checksum"
_SIGNATURE_KEY = "triptych_signature"
_VERSION = "2"
_PREFIX = "triptych_"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,19}")
_LAYOUT = re.compile(r"([0-9]{1,7}) ([0-9]{1,7}) ([0-9]{1,7}) ([0-9]{1,7}) ([a-z][a-z0-9_]{0,31}) ([0-9]{1,7})")
_DIGEST_BYTES = 32


class Endpoint(NamedTuple):
    """Where a session's engine can be reached."""

    host: str
    port: int
    protocol: str


class SessionCodec:
    """Writes and reads the sessions of one engine.

    Args:
        endpoints: where this engine answers ``Abort(kv_session)``.
        signer: None: sessions are not signed, and signatures are not looked at.
    """

    def __init__(self, endpoints: tuple[Endpoint, ...] = (), signer: HandoffSigner | None = None) -> None:
        self.endpoints = endpoints
        self._signer = signer

    def encode(self, session: KvSession) -> pb.KvSessionRef:
        """Write a session. A plan that is too large to travel is left out.

        Raises:
            InvalidRequest: the log probabilities of its first tokens are too much for one message.
        """
        handle = session.handle
        message = pb.KvSessionRef(
            session_id=handle.session_id,
            transfer_backend=handle.backend,
            endpoints=[pb.KvEndpoint(host=e.host, port=e.port, protocol=e.protocol) for e in self.endpoints],
            handoff_profile=HANDOFF_PROFILE,
        )
        attributes = _attributes(session)
        content = session_content(message, attributes)
        attributes[_CHECKSUM_KEY] = checksum(content)
        if self._signer is not None:
            attributes[_SIGNATURE_KEY] = self._signer.sign(content)
        for key, value in attributes.items():
            message.attributes_struct.fields[key].string_value = value
        size = message.ByteSize()
        if size > MAX_SENT_BYTES:
            raise InvalidRequest(
                f"the session has {size} bytes and can have {MAX_SENT_BYTES}; ask for fewer candidates with "
                "response.output_candidates"
            )
        return message

    def decode(self, message: pb.KvSessionRef) -> KvSession:
        """Read a session, wherever it comes from.

        Raises:
            InvalidRequest: another engine made it, or it is malformed or contradicts itself; says where.
            Unauthenticated: it is not signed with this engine's secret.
        """
        return _session(message, self._own(message))

    def session_id(self, message: pb.KvSessionRef) -> str:
        """The name of a session that is to be aborted; without a secret nothing else of it is needed.

        Raises:
            InvalidRequest: it has none.
            Unauthenticated: it is not signed with this engine's secret.
        """
        if self._signer is not None:
            self._own(message)
        return _name("session_id", message.session_id)

    def _own(self, message: pb.KvSessionRef) -> dict[str, str]:
        """Our attributes, once they are known to be what their engine wrote."""
        own = _own_attributes(message)
        signature, sum_ = own.pop(_SIGNATURE_KEY, ""), own.pop(_CHECKSUM_KEY, "")
        content = session_content(message, own)
        if self._signer is not None and not self._signer.matches(content, signature):
            raise Unauthenticated(
                f"kv.session: its signature is {'wrong' if signature else 'absent'}; "
                "both engines need the same hand-off secret"
            )
        version = own.pop(_VERSION_KEY)
        if version != _VERSION:
            raise InvalidRequest(f"kv.session: {_VERSION_KEY} is {version[:20]!r}; {_VERSION!r} is known here")
        if sum_ != checksum(content):
            raise InvalidRequest(f"kv.session: {_CHECKSUM_KEY} does not fit; something was changed on the way")
        return own


def session_content(message: pb.KvSessionRef, attributes: Mapping[str, str]) -> bytes:
    """The bytes of a session that are signed.

    Args:
        message: its attributes are not read, since others may have added some.
        attributes: ours, without the checksum and the signature.
    """
    fields = [message.session_id, message.transfer_backend, str(message.dp_rank), str(len(message.endpoints))]
    for endpoint in message.endpoints:
        fields += [endpoint.host, str(endpoint.port), endpoint.protocol]
    for key in sorted(attributes):
        fields += [key, attributes[key]]
    return signed_content(_DOMAIN, fields)


def seal(message: pb.KvSessionRef) -> SealedSession:
    """A session that is only handed on."""
    return SealedSession(message.session_id, message.SerializeToString(deterministic=True))


def unseal(session: SealedSession, message: pb.KvSessionRef) -> None:
    """Write a session that was only handed on."""
    message.MergeFromString(session.data)


def _attributes(session: KvSession) -> dict[str, str]:
    handle = session.handle
    attributes = {
        _VERSION_KEY: _VERSION,
        "triptych_instance": handle.instance_id,
        "triptych_layout": " ".join(map(str, astuple(handle.layout))),
        "triptych_blocks": str(handle.blocks),
        "triptych_state": to_base64(handle.state),
        "triptych_prompt": session.prompt.hex(),
        "triptych_first": to_base64(encode_first(session.first)),
        "triptych_seed": str(session.seed),
        "triptych_cached": str(session.cached_prompt_tokens),
        "triptych_model": session.model.hex(),
        "triptych_adapter": session.adapter.hex(),
        "triptych_expires": str(session.expires_unix_nanos),
    }
    plan = None if session.plan is None else encode_plan(session.plan)
    if plan is not None:
        attributes["triptych_plan"] = plan
    return attributes


def _own_attributes(message: pb.KvSessionRef) -> dict[str, str]:
    """Our attributes as they came, within bounds.

    Raises:
        InvalidRequest: there are none, or too much of anything.
    """
    size = message.ByteSize()
    if size > MAX_SESSION_BYTES:
        raise InvalidRequest(f"kv.session has {size} bytes; at most {MAX_SESSION_BYTES}")
    fields = message.attributes_struct.fields
    for name, count, most in (
        ("endpoints", len(message.endpoints), MAX_ENDPOINTS),
        ("attributes", len(fields), MAX_ATTRIBUTES),
    ):
        if count > most:
            raise InvalidRequest(f"kv.session has {count} {name}; at most {most}")
    own = {}
    for key in fields:
        if key.startswith(_PREFIX):
            value = fields[key]
            if value.WhichOneof("kind") != "string_value":
                raise InvalidRequest(f"kv.session: {key[:40]} must be a string")
            own[key] = value.string_value
    if _VERSION_KEY not in own:
        raise InvalidRequest(f"kv.session was not made by a Triptych engine: its attributes have no {_VERSION_KEY}")
    return own


def _session(message: pb.KvSessionRef, own: Mapping[str, str]) -> KvSession:
    if message.dp_rank:
        raise InvalidRequest(f"kv.session: dp_rank is {message.dp_rank}; engines have one rank, 0")
    handle = Handle(
        session_id=_name("session_id", message.session_id),
        backend=_name("transfer_backend", message.transfer_backend),
        instance_id=_name("triptych_instance", _text(own, "triptych_instance")),
        layout=_layout(own),
        blocks=_number(own, "triptych_blocks", 1, 2**31 - 1),
        state=_binary(own, "triptych_state", MAX_HANDLE_STATE),
    )
    outputs = _binary(own, "triptych_first", MAX_SESSION_BYTES)
    with _named("triptych_first"):
        first = decode_first(outputs)
    with _named("triptych_plan"):
        plan = decode_plan(own["triptych_plan"]) if "triptych_plan" in own else None
    cached = _number(own, "triptych_cached", 0, 2**31 - 1)
    if plan is not None:
        _check_plan(plan, handle, cached)
    return KvSession(
        handle=handle,
        plan=plan,
        prompt=_digest(own, "triptych_prompt", (_DIGEST_BYTES,)),
        first=first,
        seed=_number(own, "triptych_seed", 0, 2**64 - 1),
        cached_prompt_tokens=cached,
        model=_digest(own, "triptych_model", (_DIGEST_BYTES,)),
        adapter=_digest(own, "triptych_adapter", (0, _DIGEST_BYTES)),
        expires_unix_nanos=_number(own, "triptych_expires", 0, 2**64 - 1),
    )


def _check_plan(plan: PromptPlan, handle: KvHandle, cached: int) -> None:
    wanted = -(-len(plan) // handle.layout.block_size)
    if handle.blocks != wanted:
        raise InvalidRequest(
            f"kv.session: triptych_blocks is {handle.blocks}; the plan's {len(plan)} tokens fill {wanted} blocks of "
            f"{handle.layout.block_size}"
        )
    if cached > len(plan):
        raise InvalidRequest(f"kv.session: triptych_cached is {cached} of a plan of {len(plan)} tokens")


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Names the attribute in what is said about its inside."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"kv.session: {key}: {error}") from None


def _text(own: Mapping[str, str], key: str) -> str:
    if key not in own:
        raise InvalidRequest(f"kv.session: {key} is absent")
    return own[key]


def _name(field: str, text: str) -> str:
    size = len(text.encode())
    if not 1 <= size <= MAX_NAME_BYTES:
        raise InvalidRequest(f"kv.session: {field} has {size} bytes; it must have between 1 and {MAX_NAME_BYTES}")
    return text


def _number(own: Mapping[str, str], key: str, least: int, most: int) -> int:
    """An integer as decimal text: a double would lose digits."""
    text = _text(own, key)
    number = int(text) if _NUMBER.fullmatch(text) else -1
    if not least <= number <= most:
        raise InvalidRequest(f"kv.session: {key} must be a number in [{least}, {most}], not {text[:24]!r}")
    return number


def _binary(own: Mapping[str, str], key: str, most: int) -> bytes:
    text = _text(own, key)
    size = len(text) // 4 * 3 - text[-2:].count("=")
    if size > most:
        raise InvalidRequest(f"kv.session: {key} has {size} bytes; at most {most}")
    with _named(key):
        return from_base64(text)


def _digest(own: Mapping[str, str], key: str, sizes: tuple[int, ...]) -> bytes:
    text = _text(own, key)
    if len(text) not in [2 * size for size in sizes] or re.fullmatch("[0-9a-f]*", text) is None:
        raise InvalidRequest(f"kv.session: {key} must be a digest of {_DIGEST_BYTES} bytes, in hexadecimal")
    return bytes.fromhex(text)


def _layout(own: Mapping[str, str]) -> KvLayout:
    text = _text(own, "triptych_layout")
    match = _LAYOUT.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"kv.session: triptych_layout is {text[:80]!r}")
    layers, kv_heads, head_size, block_size, dtype, itemsize = match.groups()
    with _named("triptych_layout"):
        return KvLayout(int(layers), int(kv_heads), int(head_size), int(block_size), dtype, int(itemsize))
