"""The stages of a request, from the clock of this process to everybody's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from triptych.core.events import Span

if TYPE_CHECKING:
    from collections.abc import Iterable

_UNIX_MINUS_MONOTONIC = time.time() - time.monotonic()


def in_unix_seconds(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same spans, which are in monotonic seconds."""
    return tuple(
        Span(span.name, span.start + _UNIX_MINUS_MONOTONIC, span.end + _UNIX_MINUS_MONOTONIC) for span in spans
    )
