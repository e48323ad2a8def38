"""Whether an engine still answers: one real token through all of it."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from triptych.core.errors import TriptychError
from triptych.core.events import Failed
from triptych.core.request import GenerateRequest, Sampling, Stopping
from triptych.roles.contract import HealthCheck, HealthState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from triptych.roles.contract import Answer

PROBE_SECONDS = 30.0
"""How long an inference probe may take."""
NAME = "inference_probe"


class InferenceProbe:
    """Concurrent probes share one request.

    Args:
        accept: the role's.
        model: the served name.
        token: any token of the model; the prompt.
    """

    def __init__(self, accept: Callable[[GenerateRequest], Awaitable[Answer]], model: str, token: int) -> None:
        self._accept = accept
        self._model = model
        self._token = token
        self._running: asyncio.Task[HealthCheck] | None = None

    async def check(self) -> HealthCheck:
        """Ask for a token, or wait for the one that was asked for already."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._infer_once())
        return await asyncio.shield(self._running)

    async def _infer_once(self) -> HealthCheck:
        request = GenerateRequest(
            request_id=f"health-probe-{uuid.uuid4().hex}",
            model=self._model,
            prompt=(self._token,),
            sampling=Sampling(temperature=0),
            stopping=Stopping(max_tokens=1, ignore_eos=True),
            detokenize=False,
        )
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                answer = await self._accept(request)
                try:
                    async for event in answer:
                        if isinstance(event, Failed):
                            return HealthCheck(NAME, HealthState.NOT_READY, str(event.error))
                finally:
                    await answer.aclose()
        except TimeoutError:
            return HealthCheck(NAME, HealthState.DEGRADED, f"no token within {PROBE_SECONDS:.0f} s")
        except TriptychError as error:
            return HealthCheck(NAME, HealthState.NOT_READY, str(error))
        return HealthCheck(NAME, HealthState.READY)
