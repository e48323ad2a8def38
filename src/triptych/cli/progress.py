"""Progress bars for people; silent where nobody looks."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


@contextmanager
def loading_bar(name: str) -> Generator[Callable[[int, int], None], None, None]:
    """A bar on stderr over bytes loaded; the callback takes (done, total)."""
    console = Console(file=sys.stderr)
    columns = (TextColumn(f"loading {name}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
