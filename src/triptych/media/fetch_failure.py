"""Why one item could not be fetched. Raised and caught inside this package: it does not know the item's index."""

from __future__ import annotations

from triptych.core.errors import MediaError, MediaUnavailable
from triptych.core.media import Stage


class FetchFailure(Exception):
    """Expected. ``reason`` names the host, never a path, a query or a credential: messages are logged and shown."""

    def __init__(self, reason: str, *, stage: Stage = Stage.FETCH, retryable: bool = False, after: float = 0.0) -> None:
        """``after`` is how many seconds the server asks to be left alone."""
        super().__init__(reason)
        self.reason = reason
        self.stage = stage
        self.retryable = retryable
        self.after = after

    def error(self, index: int) -> MediaError:
        """What the client is told."""
        return (MediaUnavailable if self.retryable else MediaError)(index, self.reason, self.stage)
