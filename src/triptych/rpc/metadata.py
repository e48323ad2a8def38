"""What callers may say in gRPC request metadata.

Keys that begin with ``openengine-`` are the contract's own, at most one value each. Those that this release does not
have are left alone: a later one may, and its clients must be able to talk to us. A routing key is for whoever stands
in front of the engine, and trace context (``traceparent``, ``tracestate``) is checked and then dropped: spans are
measured for each request and not exported under a caller's trace.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import InvalidRequest
from triptych.wire.channel import PRIORITY_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Pairs = Iterable[tuple[str, str | bytes]]

RESERVED_PREFIX = "openengine-"
ROUTING_KEY = "openengine-routing-key"
RANK_KEY = "openengine-target-dp-rank"
MAX_TRACE_MEMBERS = 32

# version - trace id - parent id - flags; zero ids and version ff mean nothing; later versions may append fields.
_TRACEPARENT = re.compile(
    r"(?P<version>(?!ff)[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?"
)
# key = value; the value is printable ASCII but for comma and equals sign, and ends in no space.
_TRACE_MEMBER = re.compile(r"(?P<key>[a-z0-9][a-z0-9_*/@-]{0,255})=[ !-+\--<>-~]{0,255}[!-+\--<>-~]")
_UINT = re.compile(r"[0-9]{1,10}")
_INT = re.compile(r"-?[0-9]{1,10}")


class CallMetadata(NamedTuple):
    """What a Generate call says beside its message."""

    priority: int
    """Higher is more urgent."""


def read_metadata(pairs: Pairs) -> CallMetadata:
    """Check what belongs to an Inference call, and take from it what counts.

    Raises:
        InvalidRequest: a value is malformed or is not for this engine, or a key of the contract is repeated.
    """
    pairs = tuple(pairs)
    check_trace(pairs)
    ours = _once(pairs, lambda key: key.startswith(RESERVED_PREFIX))
    if ours.get(ROUTING_KEY) == "":
        raise InvalidRequest(f"metadata {ROUTING_KEY} must not be empty")
    if (rank := ours.get(RANK_KEY)) is not None:
        _check_rank(rank)
    priority = ours.get(PRIORITY_KEY)
    return CallMetadata(priority=0 if priority is None else _read_priority(priority))


def check_trace(pairs: Pairs) -> None:
    """Check the trace context, which belongs to every call.

    Raises:
        InvalidRequest: a value is malformed, or a key is repeated.
    """
    found = _once(pairs, lambda key: key in ("traceparent", "tracestate"))
    if (parent := found.get("traceparent")) is not None:
        match = _TRACEPARENT.fullmatch(parent)
        if match is None or (match["version"] == "00" and match["more"] is not None):
            raise InvalidRequest(f"metadata traceparent is not a W3C trace context: {parent[:80]!r}")
    if (state := found.get("tracestate")) is not None:
        _check_tracestate(state)


def _once(pairs: Pairs, known: Callable[[str], bool]) -> dict[str, str]:
    """The text values of the known keys.

    Raises:
        InvalidRequest: one of them is repeated.
    """
    found = [(key, value) for key, value in pairs if known(key)]
    for key, count in Counter(key for key, _ in found).items():
        if count > 1:
            raise InvalidRequest(f"metadata {key} is given {count} times; at most once")
    return {key: value for key, value in found if isinstance(value, str)}


def _check_rank(value: str) -> None:
    if _UINT.fullmatch(value) is None or int(value) >= 2**32:
        raise InvalidRequest(f"metadata {RANK_KEY} must be a 32-bit number, not {value[:40]!r}")
    if int(value) != 0:
        raise InvalidRequest(f"metadata {RANK_KEY} {value}: this engine has rank 0 only")


def _read_priority(value: str) -> int:
    if _INT.fullmatch(value) is None or not -(2**31) <= int(value) < 2**31:
        raise InvalidRequest(f"metadata {PRIORITY_KEY} must be a signed 32-bit number, not {value[:40]!r}")
    return int(value)


def _check_tracestate(value: str) -> None:
    """A list of members, each key once; empty members and space around members are allowed."""
    members = [member for member in (part.strip(" \t") for part in value.split(",")) if member]
    if len(members) > MAX_TRACE_MEMBERS:
        raise InvalidRequest(f"metadata tracestate has {len(members)} members; at most {MAX_TRACE_MEMBERS}")
    keys = set()
    for member in members:
        match = _TRACE_MEMBER.fullmatch(member)
        if match is None:
            raise InvalidRequest(f"metadata tracestate has a member that is not key=value: {member[:80]!r}")
        if match["key"] in keys:
            raise InvalidRequest(f"metadata tracestate has the key {match['key'][:80]!r} twice")
        keys.add(match["key"])
