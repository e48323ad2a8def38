"""Where the time of the last requests went."""

from __future__ import annotations

import time
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from triptych.core.events import Span

REMEMBERED = 1000
"""Requests whose spans are kept."""


class SpanBody(msgspec.Struct, frozen=True):
    """One stage of a request in one process."""

    process: str
    """``gateway``, or ``engine``, ``encoder``, ``prefill`` or ``decode`` with the engine's address."""
    name: str
    start: float
    """Unix seconds."""
    end: float


class Timeline:
    """The spans of one request, as they come in."""

    def __init__(self) -> None:
        self.spans: list[SpanBody] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Measure a stage of the gateway's own, however it ends."""
        start = time.time()
        try:
            yield
        finally:
            self.measured(name, start)

    def measured(self, name: str, start: float) -> None:
        """A stage of the gateway's own that began at ``start`` and ends now."""
        self.spans.append(SpanBody("gateway", name, start, time.time()))

    def add(self, process: str, spans: Iterable[Span]) -> None:
        """Take what another process has measured, in Unix seconds."""
        self.spans.extend(SpanBody(process, span.name, span.start, span.end) for span in spans)


class Timelines:
    """The last requests' timelines by request id."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._by_id: OrderedDict[str, Timeline] = OrderedDict()

    def begin(self, request_id: str) -> Timeline:
        """A new timeline; the oldest is forgotten when there are too many."""
        timeline = self._by_id[request_id] = Timeline()
        if len(self._by_id) > self._limit:
            self._by_id.popitem(last=False)
        return timeline

    def get(self, request_id: str) -> Timeline | None:
        """A request's timeline, or None when it is not remembered."""
        return self._by_id.get(request_id)
