"""How an error leaves the server before acceptance: as a status, typed or not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NoReturn

from triptych.core.errors import Internal, TriptychError, forget_frames
from triptych.wire.status import as_typed, to_status

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)


def typed(error: Exception) -> TriptychError:
    """The error in our tree; one that should not have happened is logged with its traceback. It keeps nothing alive."""
    if not isinstance(error, TriptychError) or isinstance(error, Internal):
        log.error("unexpected error while serving a call", exc_info=error)
    forget_frames(error)
    return as_typed(error)


async def refuse(context: grpc.aio.ServicerContext, error: TriptychError) -> NoReturn:
    """End the call with the error's status. Raises what ``context.abort`` raises, always."""
    code, message, trailers = to_status(error)
    await context.abort(code, message, trailers)
    raise AssertionError("context.abort returned")
