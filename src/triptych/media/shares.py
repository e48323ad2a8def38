"""Who gets shares in the preparation of media, and who waits for them. Pure: it knows no clock, and nothing waits here.

Who has one share is light, who has more is heavy. With only one share all are light.

    heavy     the first who weighs begins if one share stays free then, or if somebody light is at work:
              so the heavy never have all shares, and one is left to the light
    light     nobody weighs       any free share: who comes back first, then the line
              somebody weighs     the same, while nobody light is at work: one at a time
                                  nobody of the line, while too many encoded bytes are held

So a thumbnail does not wait for what is huge, and what is huge waits only for those who are at work, not for all the
thumbnails that come meanwhile. Among those who wait for the same it is first come, first served.

    full      nobody, while too much that was prepared is not used yet; but who holds some of that goes on, else all
              might wait for each other
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable


class Claim(Protocol):
    """One request's."""

    size: int
    """Encoded bytes that came with the request."""
    shares: int
    """What it has."""
    needs: int
    """What it waits for, while it does."""
    holds_prepared: bool
    """Whether it has prepared media while it waits."""


One = TypeVar("One", bound=Claim)


class Shares(Generic[One]):
    """Hands them out, in order, so that nobody can overtake their like.

    Args:
        total: of all work at once.
        crowded: whether so many encoded bytes are held that nobody of the line shall pass those who weigh.
        full: whether so much is prepared that nobody shall prepare more.
    """

    def __init__(self, total: int, crowded: Callable[[], bool], full: Callable[[], bool]) -> None:
        self.total = total
        self.free = total
        self.line: deque[One] = deque()
        """Who has not begun."""
        self.line_bytes = 0
        """Encoded bytes that came with those in line."""
        self.weighing: deque[One] = deque()
        """Who has begun and waits for as many shares as it weighs."""
        self.returning: deque[One] = deque()
        """Who has begun and waits for one."""
        self.admitted = 0
        """Whose turn came in line."""
        self._heaviest = max(1, total - 1)
        """Shares that the heavy have together, at most."""
        self._light = 0
        """Who has one share."""
        self._crowded = crowded
        self._full = full

    @property
    def waiting(self) -> int:
        """How many do, whatever for."""
        return len(self.line) + len(self.weighing) + len(self.returning)

    def enter(self, claim: One) -> None:
        """It waits in line for its first share."""
        self.line.append(claim)
        self.line_bytes += claim.size

    def weigh(self, claim: One, weight: int) -> bool:
        """Whether it must wait for as many: then it has given back what it had. Who has enough keeps it."""
        needs = min(weight, self._heaviest)
        if needs <= claim.shares:
            return False
        self.take_back(claim)
        self.come_back(claim, needs)
        return True

    def come_back(self, claim: One, needs: int = 1) -> None:
        """It has no share, and waits for some again."""
        claim.needs = needs
        (self.weighing if needs > 1 else self.returning).append(claim)

    def leave(self, claim: One) -> bool:
        """It waits for nothing any more; whether it was in line."""
        for queue in (self.weighing, self.returning):
            if claim in queue:
                queue.remove(claim)
        if claim not in self.line:
            return False
        self._leave_line(claim)
        return True

    def _leave_line(self, claim: One) -> None:
        self.line.remove(claim)
        self.line_bytes -= claim.size

    def take_back(self, claim: One) -> None:
        """All that it has."""
        self._light -= claim.shares == 1
        self.free += claim.shares
        claim.shares = 0

    def serve(self) -> One | None:
        """Who gets now what it waits for; ask until there is nobody."""
        return self._serve_heavy() or self._serve_light()

    def _serve_heavy(self) -> One | None:
        claim = self._first(self.weighing)
        left = self.total - self._heaviest if not self._light else 0
        if claim is None or claim.needs > self.free - left:
            return None
        self.weighing.remove(claim)
        return self._given(claim)

    def _serve_light(self) -> One | None:
        if not self._takes_light():
            return None
        claim = self._first(self.returning)
        if claim is not None:
            self.returning.remove(claim)
        elif self.line and self.takes_newcomers():
            claim = self.line[0]
            self._leave_line(claim)
            self.admitted += 1
        else:
            return None
        return self._given(claim)

    def _first(self, queue: deque[One]) -> One | None:
        """Whose turn it is."""
        if queue and self._full():
            return next((claim for claim in queue if claim.holds_prepared), None)
        return queue[0] if queue else None

    def _takes_light(self) -> bool:
        return self.free > 0 and not (self.weighing and self._light)

    def takes_newcomers(self) -> bool:
        """Whether the first in line would have a share at once."""
        return self._takes_light() and not (self.weighing and self._crowded()) and not self._full()

    def _given(self, claim: One) -> One:
        self.free -= claim.needs
        self._light += claim.needs == 1
        claim.shares = claim.needs
        return claim
