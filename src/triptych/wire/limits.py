"""Sizes on which both ends of a connection agree."""

from __future__ import annotations

MAX_MESSAGE = 64 * 1024 * 1024
"""Bytes of one message, each way, on both sides."""
LARGE_MESSAGE = 1024 * 1024
"""Bytes from which a message is written and read on a thread; smaller ones take the event loop a few milliseconds."""
