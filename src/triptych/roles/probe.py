"""Whether an engine still answers: one real token through all of it."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from triptych.core.errors import Overloaded, TriptychError
from triptych.core.events import Failed, PrefillReady
from triptych.core.request import GenerateRequest, Sampling, Stopping
from triptych.core.session import KvSession
from triptych.roles.contract import HealthCheck, HealthState

if TYPE_CHECKING:
    from triptych.roles.contract import Role

PROBE_SECONDS = 30.0
"""How long an inference probe may take."""
NAME = "inference_probe"


class InferenceProbe:
    """Concurrent probes share one request.

    Args:
        role: what is probed.
        token: any token of the model; the prompt.
    """

    def __init__(self, role: Role, token: int) -> None:
        self._role = role
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
            model=self._role.model.served_name,
            prompt=(self._token,),
            sampling=Sampling(temperature=0),
            stopping=Stopping(max_tokens=1, ignore_eos=True),
            detokenize=False,
            priority=2**31 - 1,  # the engine is asked, not its queue
        )
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                answer = await self._role.accept(request)
                try:
                    async for event in answer:
                        match event:
                            case Failed(error=error):
                                return HealthCheck(NAME, HealthState.NOT_READY, str(error))
                            case PrefillReady(session=KvSession(handle=handle)):
                                await self._role.abort_session(handle.session_id)
                finally:
                    await answer.aclose()
        except TimeoutError:
            return HealthCheck(NAME, HealthState.DEGRADED, f"no token within {PROBE_SECONDS:.0f} s")
        except Overloaded as error:
            return HealthCheck(NAME, HealthState.DEGRADED, str(error))
        except TriptychError as error:
            return HealthCheck(NAME, HealthState.NOT_READY, str(error))
        return HealthCheck(NAME, HealthState.READY)
