"""What a run tells: a progress bar in a terminal, plain lines elsewhere, and a log file always."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

LINE_EVERY = 100


class Reporter:
    """Reports steps and lines."""

    def __init__(self, log: Path, total: int, done: int) -> None:
        self.log = log.open("a")
        self.sums = [0.0, 0.0, 0]
        self.bar = None
        if sys.stdout.isatty():
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self.bar = Progress(*columns)
            self.task = self.bar.add_task("", total=total, completed=done)

    def __enter__(self) -> Reporter:
        """Show the bar."""
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Leave the terminal as it was."""
        if self.bar:
            self.bar.stop()
        self.log.close()

    def step(self, step: int, dense: float, answers: float, seconds: float) -> None:
        """Count a step; every hundredth prints the mean losses."""
        self.sums = [self.sums[0] + dense, self.sums[1] + answers, self.sums[2] + 1]
        if self.bar:
            self.bar.update(self.task, completed=step, description=f"tower {dense:.2f} answers {answers:.2f}")
        if step % LINE_EVERY == 0:
            n = self.sums[2]
            self.line(f"step {step}  tower {self.sums[0] / n:.3f}  answers {self.sums[1] / n:.3f}  {seconds:.0f} s")
            self.sums = [0.0, 0.0, 0]

    def line(self, text: str) -> None:
        """Say a line and log it."""
        self.log.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        self.log.flush()
        (self.bar.console.print if self.bar else print)(text)
        sys.stdout.flush()
