"""Progress bars for people; silent where nobody looks."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rich.progress import Task, TaskID


class _Bytes(DownloadColumn):
    """Bytes once there is a total; before that libraries are being imported."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total else Text("starting")


@contextmanager
def loading_bar(name: str) -> Generator[Callable[[int, int], None], None, None]:
    """A bar on stderr over bytes loaded; the callback takes (done, total)."""
    with loading_bars([name]) as (bar,):
        yield bar


@contextmanager
def loading_bars(names: Sequence[str]) -> Generator[list[Callable[[int, int], None]], None, None]:
    """A bar for each name."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("loading {task.description}"), BarColumn(), _Bytes(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield [_report(progress, progress.add_task(escape(name), total=None)) for name in names]


def _report(progress: Progress, task: TaskID) -> Callable[[int, int], None]:
    return lambda done, total: progress.update(task, completed=done, total=total)
