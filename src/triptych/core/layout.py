"""Where one media item lives in the prompt, and the three lengths that are never mixed.

    prompt span     positions the item occupies, framing tokens included   (sum of run lengths)
    rows            encoder output rows = positions that receive a row     (span - framing)
    encoder tokens  pre-merge attention tokens                             (cost)

Split encoder output by rows, copy by mask, charge by encoder tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from triptych.core.media import Modality

CONTENT_KEY_BYTES = 32
MAX_SECONDS = 10_000_000.0
"""Of a time that a prompt says: its text is then short."""


class Run(NamedTuple):
    """A maximal stretch of consecutive prompt positions that belong to one item."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.length


class Grid(NamedTuple):
    """Patches along time, height and width, before merging."""

    t: int
    h: int
    w: int


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """One item's place in the expanded prompt. Built whole and valid; never changed."""

    modality: Modality
    runs: tuple[Run, ...]
    """In prompt order, not overlapping."""
    rows: int
    """Embedding rows that the encoder returns for the item."""
    encoder_tokens: int
    """Pre-merge attention tokens: the scheduling cost."""
    grid: Grid
    content_key: bytes
    """256-bit identity of everything that determines the item's rows."""
    framing: tuple[int, ...] = ()
    """Absolute positions inside the runs that hold framing tokens and receive no row; ascending."""
    times: tuple[float, ...] = ()
    """Seconds at which each step of a video's grid is shown, where its prompt says them; what is written between its
    runs follows from them. Empty once that is written, and of stills."""

    def __post_init__(self) -> None:
        """Refuse a layout that contradicts itself.

        Raises:
            InvalidRequest: with the rule that is broken.
        """
        if not self.runs:
            raise InvalidRequest("an item layout needs at least one run")
        previous_end = 0
        for run in self.runs:
            if run.start < previous_end or run.length <= 0:
                raise InvalidRequest(f"runs must be ascending, non-empty and apart: {self.runs}")
            previous_end = run.end
        if any(b <= a for a, b in zip(self.framing, self.framing[1:], strict=False)):
            raise InvalidRequest(f"framing positions must be ascending: {self.framing}")
        starts = [run.start for run in self.runs]
        holders = (self.runs[bisect_right(starts, at) - 1] for at in self.framing)
        if any(not run.start <= at < run.end for at, run in zip(self.framing, holders, strict=True)):
            raise InvalidRequest(f"framing positions must lie inside the runs: {self.framing}")
        if self.rows <= 0 or self.rows != self.span - len(self.framing):
            raise InvalidRequest(f"{self.rows} rows for {self.span} positions, {len(self.framing)} of them framing")
        if self.encoder_tokens <= 0 or min(self.grid) <= 0:
            raise InvalidRequest(f"encoder tokens and grid must be positive: {self.encoder_tokens}, {self.grid}")
        if self.times and len(self.times) != self.grid.t:
            raise InvalidRequest(f"{len(self.times)} times for {self.grid.t} steps")
        wrong = next((at for at in self.times if not 0 <= at <= MAX_SECONDS), None)
        if wrong is not None:
            raise InvalidRequest(f"a step is shown after 0 to {MAX_SECONDS:.0f} seconds, not {wrong}")
        if len(self.content_key) != CONTENT_KEY_BYTES:
            raise InvalidRequest(f"a content key has {CONTENT_KEY_BYTES} bytes, not {len(self.content_key)}")

    @property
    def span(self) -> int:
        """Prompt positions that the item occupies, framing included."""
        return sum(run.length for run in self.runs)

    @property
    def start(self) -> int:
        """First prompt position."""
        return self.runs[0].start

    @property
    def end(self) -> int:
        """One past the last prompt position."""
        return self.runs[-1].end

    def cells(self, merge: int) -> Grid | None:
        """The merged cells that each run holds, one row a cell; runs share the time steps. None where they do not.

        Args:
            merge: patches along one side of a merged cell.
        """
        t, rest = divmod(self.grid.t, len(self.runs))
        h, w = self.grid.h // merge, self.grid.w // merge
        whole = not (rest or self.grid.h % merge or self.grid.w % merge)
        return Grid(t, h, w) if whole and all(run.length == t * h * w for run in self.runs) else None

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any position of the item lies in ``[start, end)``."""
        return any(run.start < end and start < run.end for run in self.runs)


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Rotary positions of the whole prompt, and how they go on after it.

    The position after the prompt is not the KV length: with mRoPE a picture of many rows advances
    the position by its longer side only. Token ``k`` (0-based, ``k >= prompt length``) stands at
    ``k + delta`` on every axis.
    """

    table: npt.NDArray[np.int32]
    """Shape [axes, prompt length]; 1 axis for plain rotary, 3 (time, height, width) for mRoPE."""
    delta: int
    """Constant of the sequence: next position minus next index."""
