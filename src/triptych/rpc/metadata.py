"""What callers may say in gRPC request metadata. Keys that begin with ``openengine-`` are the contract's own.

What is well-formed and can be honoured passes; nothing is taken from it. The one rank and the one priority are ours
anyway, a routing key is for whoever stands in front of the engine, and trace context (``traceparent``, ``tracestate``)
is checked and then dropped: spans are measured for each request and not exported under a caller's trace.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from triptych.core.errors import InvalidRequest, UnsupportedFeature

if TYPE_CHECKING:
    from collections.abc import Iterable

RESERVED_PREFIX = "openengine-"
TRACE_KEYS = ("traceparent", "tracestate")

# version - trace id - parent id - flags; zero ids and version ff mean nothing; later versions may append fields.
_TRACEPARENT = re.compile(
    r"(?P<version>(?!ff)[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?"
)
_UINT = re.compile(r"[0-9]{1,10}")
_INT = re.compile(r"-?[0-9]{1,10}")


def check_metadata(pairs: Iterable[tuple[str, str | bytes]], *, inference: bool) -> None:
    """Check the known keys of one call; unknown ones are left alone.

    Trace context belongs to every call, the contract's own keys to Inference only.

    Raises:
        InvalidRequest: a value is malformed, or a key of the contract is repeated.
        UnsupportedFeature: a value asks for what is not offered.
    """
    known = [
        (key, value) for key, value in pairs if key in TRACE_KEYS or (inference and key.startswith(RESERVED_PREFIX))
    ]
    for key, count in Counter(key for key, _ in known).items():
        if count > 1:
            raise InvalidRequest(f"metadata {key} is given {count} times; at most once")
    for key, value in known:
        match key, value:
            case "openengine-routing-key", "":
                raise InvalidRequest("metadata openengine-routing-key must not be empty")
            case "openengine-target-dp-rank", str():
                _check_rank(value)
            case "openengine-priority", str():
                _check_priority(value)
            case "traceparent", str():
                _check_traceparent(value)


def _check_rank(value: str) -> None:
    if _UINT.fullmatch(value) is None or int(value) >= 2**32:
        raise InvalidRequest(f"metadata openengine-target-dp-rank must be a 32-bit number, not {value[:40]!r}")
    if int(value) != 0:
        raise InvalidRequest(f"metadata openengine-target-dp-rank {value}: this engine has rank 0 only")


def _check_priority(value: str) -> None:
    if _INT.fullmatch(value) is None or not -(2**31) <= int(value) < 2**31:
        raise InvalidRequest(f"metadata openengine-priority must be a signed 32-bit number, not {value[:40]!r}")
    if int(value) != 0:
        raise UnsupportedFeature(f"metadata openengine-priority {value} is not supported by this engine; send 0")


def _check_traceparent(value: str) -> None:
    match = _TRACEPARENT.fullmatch(value)
    if match is None or (match["version"] == "00" and match["more"] is not None):
        raise InvalidRequest(f"metadata traceparent is not a W3C trace context: {value[:80]!r}")
