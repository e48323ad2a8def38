"""The cached KV blocks of an engine, told to whoever follows them.

    engine    changes of a step -> take        numbered, under the clients' names for requests
    history   batches, and what is findable    the one buffer from which every subscriber reads
    feed      a subscriber's place in it       whoever falls out of the buffer is told so and dropped

A subscriber costs a number, not a queue: slow readers take no memory. Only a snapshot that is being read does.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from triptych.core.errors import Draining, InvalidRequest, Overloaded, WrongState
from triptych.core.kv_events import BlockStored
from triptych.roles.kv_history import KvHistory
from triptych.roles.kv_subscription import Subscription

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.core.kv_events import KvChange

MAX_SUBSCRIBERS = 64
MAX_SNAPSHOTS = 8
"""Snapshots that are being read at once: each holds a table of the blocks, about 60 bytes a block."""


class KvFeed:
    """Belongs to the event loop.

    Args:
        buffer: batches that can be replayed; 0 switches the feed off.
        heartbeat: seconds of silence after which a subscriber is told that nothing has happened.
        before: the first batch has the number after this one. When it grows from one start of the engine to the next,
            faster than batches can, a follower who has missed the restart is refused instead of being given the
            batches of another history.
    """

    def __init__(self, buffer: int, heartbeat: float, before: int = 0) -> None:
        self._on = buffer > 0
        self._before = before
        self._history = KvHistory(buffer, before)
        self._heartbeat = heartbeat
        self._subscriptions: set[Subscription] = set()
        self._lost = 0

    def take(self, changes: tuple[KvChange, ...], client_id: Callable[[str], str]) -> None:
        """Take the changes of one step.

        Args:
            changes: in the order in which they happened; often none.
            client_id: from the engine's name for a request to the client's, empty for one that is unknown.
        """
        if not changes or not self._on:
            return
        named = tuple(
            replace(change, request_id=client_id(change.request_id)) if isinstance(change, BlockStored) else change
            for change in changes
        )
        self._history.append(named, time.time_ns())
        for subscription in list(self._subscriptions):
            if subscription.next < self._history.oldest:
                self._lost += 1
                subscription.end(
                    Overloaded(
                        f"batch {subscription.next} was not read before it left the buffer; begin again with a snapshot"
                    )
                )
            else:
                subscription.wake()

    def subscribe(self, *, snapshot: bool, start: int) -> Subscription:
        """Follow; see ``Role.subscribe_kv``."""
        if not self._on:
            raise WrongState("KV events are switched off (--no-kv-events)")
        if len(self._subscriptions) >= MAX_SUBSCRIBERS:
            raise Overloaded(f"{MAX_SUBSCRIBERS} subscribers follow the KV events already; retry later")
        history = self._history
        if snapshot:
            if sum(other.in_snapshot for other in self._subscriptions) >= MAX_SNAPSHOTS:
                raise Overloaded(f"{MAX_SNAPSHOTS} snapshots are being read already; retry later")
            begin, before = history.latest + 1, history.snapshot(time.time_ns())
        else:
            begin, before = start or history.latest + 1, None
            if not history.oldest <= begin <= history.latest + 1:
                raise InvalidRequest(
                    f"start_sequence_number is {start}, but the batches of this engine can be had from number "
                    f"{history.oldest} on and the next one is {history.latest + 1}; start with one of these, or with a "
                    "snapshot"
                )
        subscription = Subscription(
            history, begin, before, heartbeat=self._heartbeat, on_end=self._subscriptions.discard
        )
        self._subscriptions.add(subscription)
        return subscription

    def close(self) -> None:
        """End every subscription, since the engine ends; there must be no new ones."""
        for subscription in list(self._subscriptions):
            subscription.end(Draining("the engine is shutting down"))

    def statistics(self) -> dict[str, float]:
        """Counts as of now."""
        return {
            "subscribers": len(self._subscriptions),
            "too_slow": self._lost,
            "batches": self._history.latest - self._before,
            "latest": self._history.latest,
            "kept": self._history.kept,
            "blocks": self._history.present,
        }
