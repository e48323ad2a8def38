"""What a server deals with: an engine in some role.

    accept     -> the role's own file: aggregated, encoder, prefill, decode
    events     the engine's thread -> the event loop -> answers, and followers of the cached blocks
    control    aborts, sessions, encoder outputs, adapters, KV events, load, health
    drain      refuse, wait, abort the rest, stop

What becomes of a request is the role's own; all the rest is the same for each of them, and here.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from triptych.core.errors import Draining, KvSessionNotFound, ReferenceNotFound, RequestNotFound, UnsupportedFeature
from triptych.roles.contract import (
    AbortOutcome,
    EngineDescription,
    HealthCheck,
    HealthState,
    Load,
    ModelDescription,
    RoleName,
)
from triptych.roles.kv_feed import KvFeed
from triptych.roles.loop_lag import LoopLag
from triptych.roles.probe import InferenceProbe, one_picture, one_token

if TYPE_CHECKING:
    from triptych.core.adapter import AdapterInfo
    from triptych.core.events import EngineEvent
    from triptych.core.kv_events import KvChange
    from triptych.core.request import GenerateRequest
    from triptych.engine.loop import EncodeEngine, Engine
    from triptych.roles.contract import Answer, TransferOutcome
    from triptych.roles.intake import Intake
    from triptych.roles.known_items import KnownItems
    from triptych.roles.kv_subscription import Subscription
    from triptych.roles.leases import Leases
    from triptych.roles.live import LiveRequests


class Service(Protocol):
    """What a role does with requests."""

    async def accept(self, request: GenerateRequest) -> Answer:
        """See ``Role.accept``."""
        ...


class Desk:
    """Implements ``roles.contract.Role``. Construct it on the event loop that serves; it starts the engine.

    Args:
        description: the process.
        intake: what the service prepares requests with.
        engine: not yet started.
        live: the requests of this engine.
        service: what the role does with them.
        leases: what waits here for other engines, encoder outputs where it encodes, else sessions; None where nothing
            does.
        known: the media items that need not be opened again; None where it does not encode for others.
    """

    def __init__(
        self,
        description: EngineDescription,
        intake: Intake,
        engine: Engine | EncodeEngine,
        live: LiveRequests,
        service: Service,
        leases: Leases | None = None,
        known: KnownItems | None = None,
    ) -> None:
        self._description = description
        self._front = frontend = intake.frontend
        self._intake = intake
        self._engine = engine
        self._live = live
        self._service = service
        self._leases = leases
        self._known = known
        self._loop = asyncio.get_running_loop()
        self._kv_feed = KvFeed(
            description.kv_event_buffer, description.kv_event_heartbeat, before=time.time_ns() // 1000
        )
        self._drained: asyncio.Task[None] | None = None
        if description.encodes:
            self._probe = InferenceProbe(self, one_picture(frontend.model))
        else:
            self._probe = InferenceProbe(self, one_token(frontend.model, next(iter(frontend.eos_token_ids), 0)))
        engine.start(self._deliver)
        self._lag = LoopLag(self._loop)

    @property
    def model(self) -> ModelDescription:
        """The served model."""
        return self._front.model

    @property
    def engine(self) -> EngineDescription:
        """The process."""
        return self._description

    async def accept(self, request: GenerateRequest) -> Answer:
        """Validate and admit; see ``Role.accept``."""
        return await self._service.accept(request)

    def _deliver(self, events: tuple[EngineEvent, ...], kv_changes: tuple[KvChange, ...]) -> None:
        """Called on the engine's thread, once a step."""
        self._loop.call_soon_threadsafe(self._dispatch, events, kv_changes)

    def _dispatch(self, events: tuple[EngineEvent, ...], kv_changes: tuple[KvChange, ...]) -> None:
        self._live.take(events)
        self._kv_feed.take(kv_changes, self._live.client_id)

    # -- control ---------------------------------------------------------------------------------

    async def abort(self, request_id: str) -> AbortOutcome:
        """End one request; see ``Role.abort``."""
        waited = self._leases is not None and self._leases.abort_of(request_id) > 0
        try:
            outcome = self._live.abort(request_id)
        except RequestNotFound:
            if not waited:
                raise
            outcome = AbortOutcome.ABORTED  # it is not remembered, and its session was still there
        return AbortOutcome.ABORTED if waited else outcome

    async def abort_all(self) -> int:
        """End every request; see ``Role.abort_all``."""
        live = self._live.abort_all()
        return live if self._leases is None else live + self._leases.abort_all()

    async def abort_session(self, session_id: str) -> AbortOutcome:
        """Let go of a session; see ``Role.abort_session``."""
        if self._leases is None or self._description.encodes:
            raise UnsupportedFeature("Abort(kv_session): this engine makes no sessions; ask the one that made it")
        outcome = self._leases.abort(session_id)
        if outcome is None:
            raise KvSessionNotFound(f"no KV session {session_id[:80]!r}")
        return outcome

    async def abort_rows(self, cache_id: str) -> AbortOutcome:
        """Let go of an encoder output; see ``Role.abort_rows``."""
        outcome = self._outputs("Abort(encoder_cache)").abort(cache_id)
        if outcome is None:
            raise _unknown_output(cache_id)
        return outcome

    def transfer_outcome(self, cache_id: str) -> TransferOutcome:
        """What has become of an encoder output; see ``Role.transfer_outcome``."""
        outcome = self._outputs("TransferEncoderCache").outcome(cache_id)
        if outcome is None:
            raise _unknown_output(cache_id)
        return outcome

    def _outputs(self, asked: str) -> Leases:
        if self._leases is None or not self._description.encodes:
            raise UnsupportedFeature(f"{asked}: this engine encodes for no other; ask the one that made the output")
        return self._leases

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The loaded LoRA adapters."""
        return self._intake.adapters.infos

    async def load_adapter(self, info: AdapterInfo) -> bool:
        """Load a LoRA adapter; see ``Role.load_adapter``."""
        self._live.refuse_if_closed()
        return await self._intake.adapters.load(info)

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Forget a LoRA adapter; see ``Role.unload_adapter``."""
        return self._intake.adapters.unload(name)

    def subscribe_kv(self, *, snapshot: bool, start: int) -> Subscription:
        """Follow the cached KV blocks; see ``Role.subscribe_kv``."""
        self._live.refuse_if_closed()
        return self._kv_feed.subscribe(snapshot=snapshot, start=start)

    def load(self) -> Load:
        """How busy the engine is, at most one step old. Each output counts as a request, here as in the engine."""
        load = self._engine.load()
        return replace(load, queued_requests=load.queued_requests + self._live.preparing)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Every ledger's counters by ledger name."""
        intake = self._intake
        ledgers = {
            **self._engine.statistics(),
            **intake.statistics(),
            "adapters": intake.adapters.statistics(),
            "kv_events": self._kv_feed.statistics(),
            "event_loop": self._lag.statistics(),
        }
        if intake.compiler is not None:
            ledgers["grammars"] = intake.compiler.statistics()
        if self._leases is not None:
            ledgers["encoder_outputs" if self._description.encodes else "kv_sessions"] = self._leases.statistics()
        if self._known is not None:
            ledgers["known_items"] = self._known.statistics()
        if intake.rows is not None:
            ledgers["row_intake"] = intake.rows.statistics()
            ledgers["row_transport"] = intake.rows.transport_statistics()
        return ledgers

    async def health(self, *, probe: bool) -> tuple[HealthCheck, ...]:
        """Named checks; see ``Role.health``."""
        failure = self._engine.failure
        if failure is not None:
            engine = HealthCheck("scheduler", HealthState.NOT_READY, str(failure))
        elif self._live.draining:
            engine = HealthCheck("scheduler", HealthState.NOT_READY, "draining")
        else:
            engine = HealthCheck("scheduler", HealthState.READY)
        checks = [engine, HealthCheck("model", HealthState.READY, self.model.served_name)]
        if self._intake.rows is not None:
            checks.append(self._intake.rows.health())
        elif self._description.encodes:
            checks.append(HealthCheck("encoder_connector", HealthState.READY, self._description.row_backend))
        if probe:
            checks.append(await self._probe.check())
        return tuple(checks)

    # -- the beginning and the end ---------------------------------------------------------------------------------

    async def warm_up(self) -> None:
        """Start what the first request with media would else wait for; a decode engine hardly ever gets one.

        Raises:
            Internal: it cannot be started.
        """
        if self._intake.media is not None and self._description.role is not RoleName.DECODE:
            await self._intake.media.start()

    async def drain(self, grace: float) -> None:
        """Refuse, wait, abort the rest, stop; see ``Role.drain``."""
        self._live.draining = True
        self._kv_feed.close()
        if self._drained is None:
            self._drained = asyncio.create_task(self._drain(grace))
        await asyncio.shield(self._drained)

    async def _drain(self, grace: float) -> None:
        async with AsyncExitStack() as ends:  # all of them, whatever goes wrong before
            ends.callback(self._lag.close)
            ends.push_async_callback(self._intake.close)
            ends.push_async_callback(asyncio.to_thread, self._engine.stop)
            try:
                async with asyncio.timeout(grace):
                    await self._live.idle()
                    if self._leases is not None and self._engine.failure is None:
                        await self._leases.idle()
            except TimeoutError:
                self._live.fail_all(Draining("the engine is shutting down"))
            if self._intake.media is not None:
                self._intake.media.hurry()  # nobody waits any more for what is still being decoded
            await self._live.settled()
            if self._leases is not None:
                self._leases.abort_all()


def _unknown_output(cache_id: str) -> ReferenceNotFound:
    return ReferenceNotFound(f"no encoder output {cache_id[:80]!r}")
