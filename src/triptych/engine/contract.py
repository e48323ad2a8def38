"""What the loop asks of a scheduler and of a runner. What a plan and a result are is between these two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.errors import TriptychError
    from triptych.core.events import EngineEvent
    from triptych.core.kv_events import KvChange
    from triptych.core.load import Load


class Work(Protocol):
    """A request."""

    @property
    def request_id(self) -> str:
        """No other live request has it."""
        ...


class Ledgers(Protocol):
    """A snapshot of what was done."""

    def ledgers(self) -> dict[str, dict[str, float]]:
        """All counters, by the name of their ledger."""
        ...


W_contra = TypeVar("W_contra", bound=Work, contravariant=True)
P_co = TypeVar("P_co", covariant=True)
P_contra = TypeVar("P_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
R_contra = TypeVar("R_contra", contravariant=True)


class StepScheduler(Protocol[W_contra, P_co, R_contra]):
    """Decides. Pure; belongs to the engine thread but for what says otherwise."""

    def check(self, requests: Sequence[W_contra]) -> None:
        """Refuse a group that could never run here; safe from any thread."""
        ...

    def check_queue(self, arriving: int, count: int = 1) -> None:
        """Refuse ``count`` more requests while ``arriving`` others are on their way; safe from any thread."""
        ...

    def add(self, requests: Sequence[W_contra]) -> None:
        """Queue a group. All of it or, with an error, nothing."""
        ...

    def abort(self, request_id: str, now: float) -> tuple[EngineEvent, ...]:
        """End a request; nothing comes back of one in flight: ``apply`` then ends it."""
        ...

    def withdraw(self, session_id: str) -> None:
        """Nobody shall take this session any more."""
        ...

    def release(self, session_id: str) -> None:
        """The transport reads the blocks of this session no more."""
        ...

    def loaded(self, number: int, error: TriptychError | None, now: float) -> tuple[EngineEvent, ...]:
        """A load of a plan has ended."""
        ...

    @property
    def busy(self) -> bool:
        """Whether another step is due."""
        ...

    def plan(self, now: float) -> P_co:
        """Decide the next step."""
        ...

    def take_events(self) -> tuple[EngineEvent, ...]:
        """What the last plan decided."""
        ...

    def apply(self, result: R_contra, now: float) -> tuple[EngineEvent, ...]:
        """Account for the step in flight."""
        ...

    def take_kv_changes(self) -> tuple[KvChange, ...]:
        """What happened to cached blocks since the last call."""
        ...

    def load(self) -> Load:
        """How busy it is; safe from any thread."""
        ...

    def statistics(self) -> Ledgers:
        """Counters since the start; safe from any thread."""
        ...

    def check_integrity(self) -> None:
        """Compare every ledger with the requests."""
        ...


class StepRunner(Protocol[W_contra, P_contra, R_co]):
    """Obeys."""

    def check(self, request: W_contra) -> None:
        """Refuse what cannot be computed; safe from any thread."""
        ...

    def run(self, plan: P_contra) -> R_co:
        """Compute one step."""
        ...

    def statistics(self) -> dict[str, dict[str, float]]:
        """Ledgers of what it works with, by name; from any thread, without waiting."""
        ...
