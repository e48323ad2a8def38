"""What opens media in tests: the real thing, without processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.decoding_here import InProcess
from triptych.core.media_options import OptionLayer
from triptych.media.workers import MediaPool
from triptych.roles.media_intake import MediaIntake

if TYPE_CHECKING:
    from triptych.roles.frontend import Frontend
    from triptych.roles.media_intake import Fetcher

WORKERS = 2


def media_intake(frontend: Frontend, fetcher: Fetcher | None = None, server: OptionLayer | None = None) -> MediaIntake:
    """Decodes on threads. Call it on the event loop."""
    pool = MediaPool([InProcess(frontend.limits) for _ in range(WORKERS)], 1024)
    return MediaIntake(frontend, pool, fetcher, server or OptionLayer())
