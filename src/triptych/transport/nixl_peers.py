"""The producers that a consumer is connected to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from triptych.core.errors import StartupError, one_line
from triptych.transport.nixl_agent import PeerLost
from triptych.transport.nixl_peer import SETTLE_ROUNDS, NixlPeer

if TYPE_CHECKING:
    from triptych.transport.contract import BlockMemory
    from triptych.transport.nixl_agent import NixlOptions
    from triptych.transport.nixl_state import NixlPlace

MAX_PEERS = 32
"""Connected at once; who was not needed for longest goes first."""
PEER_IDLE_SECONDS = 60.0
"""After which a peer that nobody needs is disconnected: its producer may have ended without a word."""
SETTLE_PAUSE = 0.001
COLD_SECONDS = 0.5
"""How long a producer that was lost is not connected again: who has many of its sessions fails fast."""


class NixlPeers:
    """Connects, keeps, and disconnects. Used by the fetcher's thread alone."""

    def __init__(self, pool: BlockMemory, instance_id: str, options: NixlOptions) -> None:
        self._pool = pool
        self._instance_id = instance_id
        self._options = options
        self._connections = 0
        self._peers: dict[bytes, NixlPeer] = {}
        """By the stamp of the producer's start; least recently needed first."""
        self._leaving: list[NixlPeer] = []
        """Lost or not needed, and not closed yet."""
        self._cold: dict[bytes, float] = {}
        """Until when, by the same."""

    def get(self, place: NixlPlace, now: float) -> NixlPeer:
        """The producer at ``place``, connected.

        Raises:
            PeerLost: it is not there, or was not a moment ago, or there are too many that do not answer.
        """
        peer = self._peers.pop(place.stamp, None)
        if peer is None:
            if self._cold.get(place.stamp, now) > now:
                raise PeerLost("it could not be reached a moment ago")
            self._make_room()
            peer = self._connect(place, now)
        self._peers[place.stamp] = peer
        peer.needed = now
        return peer

    def poll(self, now: float) -> bool:
        """Move on all that is under way, and close what can be; whether anything has changed."""
        changed = False
        for key, peer in list(self._peers.items()):
            changed |= peer.poll()
            if peer.lost:
                self._cold[key] = now + COLD_SECONDS
                self._leaving.append(self._peers.pop(key))
            elif not peer.users and not peer.busy and now > peer.needed + PEER_IDLE_SECONDS:
                self._leaving.append(self._peers.pop(key))
        for peer in list(self._leaving):
            changed |= peer.poll()
            if peer.settle():
                self._leaving.remove(peer)
                peer.close()
                changed = True
        for key in [key for key, until in self._cold.items() if until <= now]:
            del self._cold[key]
        return changed

    @property
    def busy(self) -> bool:
        """Whether there is anything to move on."""
        return bool(self._leaving) or any(peer.busy for peer in self._peers.values())

    @property
    def count(self) -> int:
        """How many are not closed."""
        return len(self._peers) + len(self._leaving)

    def close(self) -> None:
        """Disconnect from all; those with something under way are left as they are."""
        for peer in (*self._peers.values(), *self._leaving):
            for _ in range(SETTLE_ROUNDS):
                if settled := peer.settle():
                    break
                time.sleep(SETTLE_PAUSE)
            if settled:
                peer.close()
            else:
                peer.abandon()
        self._peers.clear()
        self._leaving.clear()

    def _make_room(self) -> None:
        if len(self._peers) + sum(peer.busy for peer in self._leaving) < MAX_PEERS:
            return
        for key, peer in self._peers.items():
            if not peer.users and not peer.busy:
                self._leaving.append(self._peers.pop(key))
                return
        raise PeerLost(f"{MAX_PEERS} other producers are connected and needed, or do not answer")

    def _connect(self, place: NixlPlace, now: float) -> NixlPeer:
        self._connections += 1
        try:
            return NixlPeer(self._pool, f"{self._instance_id}/{self._connections}", self._options, place)
        except StartupError as error:
            raise PeerLost(one_line(error)) from error
        except PeerLost:
            self._cold[place.stamp] = now + COLD_SECONDS
            raise
