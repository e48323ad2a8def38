"""Who starts in a pass.

The queue goes by key; the first that cannot start blocks those behind it.

A request that goes on from another engine's work is not queued, because that engine holds memory for it: in its first
pass it is admitted or refused. It is refused when there are too few places or blocks, or when somebody with a lower key
waits for some; one who waits for nothing but a budget of tokens, which it does not need, it may pass. So nobody is
starved by such requests either: from the moment at which the lowest key of the queue finds too little, nobody but those
with lower keys is admitted until it has started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import Overloaded

if TYPE_CHECKING:
    from triptych.core.config import SchedulerConfig
    from triptych.core.errors import InvalidRequest
    from triptych.engine.resumption import Resumption
    from triptych.engine.roster import Roster
    from triptych.engine.sequence import Sequence
    from triptych.engine.step_pass import StepPass


class Admitted(NamedTuple):
    """What a pass has done about those that waited."""

    started: list[Sequence]
    """Out of the queue; their tokens are in the step."""
    loading: list[Resumption]
    refused: list[Resumption]
    """There was no room; they are as they were."""
    impossible: list[tuple[Sequence, InvalidRequest]]
    """Out of the queue, and why they cannot go on."""


def admit(work: StepPass, roster: Roster, config: SchedulerConfig) -> Admitted:
    """Start waiting requests in order, as far as there is room."""
    outcome = Admitted([], [], [], [])
    arrived = sorted(roster.resumptions.arrived, key=lambda resumption: resumption.key)
    blocked = False  # whether somebody of the queue found no room
    while True:
        head = None if blocked or not work.budget else roster.waiting.head()
        if arrived and (head is None or arrived[0].key < head.key):
            resumption = arrived.pop(0)
            admitted = not blocked and _fits(roster, config, len(resumption.members)) and roster.resume(resumption)
            (outcome.loading if admitted else outcome.refused).append(resumption)
        elif head is None:
            return outcome
        else:
            blocked = not _start(work, roster, config, head, outcome)


def _fits(roster: Roster, config: SchedulerConfig, count: int) -> bool:
    return roster.places + count <= config.max_running_requests


def _start(work: StepPass, roster: Roster, config: SchedulerConfig, sequence: Sequence, outcome: Admitted) -> bool:
    """Take the head of the queue out of it; False when there is no room for it."""
    size = config.block_size
    if not _fits(roster, config, 1 + len(sequence.followers)):
        return False
    spare = roster.spare
    if spare <= 0:
        return False
    hits = roster.find_prefix(sequence)
    missing = -(-sequence.known // size) - len(hits)
    if missing + roster.pool.idle(hits) > spare:
        return False
    start = len(hits) * size
    selection = work.encoder.select(sequence, start, min(sequence.known, start + work.budget))
    if selection.error is not None:
        roster.retire(sequence)
        outcome.impossible.append((sequence, selection.error))
        return True
    if selection.end == start:
        return False
    roster.admit(sequence, hits, missing)
    work.slice(sequence, selection)
    outcome.started.append(sequence)
    return True


def no_room(resumption: Resumption, roster: Roster, config: SchedulerConfig) -> Overloaded:
    """Why one was refused."""
    pool = roster.pool
    return Overloaded(
        f"no room for a prompt of {resumption.handle.blocks} KV blocks that another engine computed: {pool.held} of "
        f"{pool.total} blocks (--kv-cache-bytes) and {roster.places} of {config.max_running_requests} places "
        "(--max-running-requests) are taken, or older requests wait for some; try another engine, or retry later"
    )
