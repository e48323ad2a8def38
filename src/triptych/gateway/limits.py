"""The gateway's bounds."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.config import GIB, MIB


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """What one request, and all of them together, may hold of the gateway."""

    max_body_bytes: int = 64 * MIB
    """Of one request. An engine takes no larger message."""
    max_held_bytes: int = 1 * GIB
    """Bodies of all live requests together; more are refused as overloaded."""
    body_seconds: float = 120.0
    """How long a client may take to send its body."""
    stall_seconds: float = 30.0
    """How long a client may leave what was sent to it unread."""
    worker_threads: int = 2
    """Threads that parse, render and tokenise."""
    max_pending_work: int = 256
    """Pieces of such work, running and waiting; more are refused as overloaded."""
    encode_seconds: float = 300.0
    """How long an encoder engine may take with the media of one request, waiting for its turn included."""
