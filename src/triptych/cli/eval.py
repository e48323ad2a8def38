"""``triptych eval parity``: do engines apart answer as one does? In this process, over whatever model is there."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from triptych.cli.loaded import load
from triptych.cli.media import MediaFlags
from triptych.cli.options import EngineOptions
from triptych.cli.parity import Compared, Sides, Topology
from triptych.cli.parity_cases import GROUPS, TITLES, Case, Material
from triptych.cli.progress import loading_bar
from triptych.cli.transports import NIXL, SHARED_DIR, SHARED_MEMORY, Nixl, SharedDir, Transport
from triptych.core.config import MIB
from triptych.transport.memory import BACKEND as MEMORY
from triptych.transport.memory import MemoryExchange, MemoryFetcher, MemoryPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from triptych.cli.loaded import LoadedModel
    from triptych.cli.transports import Tell
    from triptych.transport.contract import BlockMemory, Fetcher, Publisher

Kind = Literal["memory", "shared-dir", "nixl"]

OPTIONS = EngineOptions(dtype="float32", kv_cache_bytes=64 * MIB, max_running_requests=16, max_loras=0, kv_events=False)
"""Of each of the engines. Equal tokens are a promise of float32: what is coarser rounds by the batch."""
MEDIA = MediaFlags(decode_workers=1, fetch_hosts=())
SESSION_SECONDS = 60.0
SHOWN = 10
"""Differences that are shown."""


class Memory:
    """Within this process."""

    backend = MEMORY

    def __init__(self) -> None:
        self._exchange = MemoryExchange()

    def publisher(self, pool: BlockMemory, instance_id: str, tell: Tell) -> Publisher:
        """The producer's side."""
        return MemoryPublisher(pool, instance_id, tell, self._exchange)

    def fetcher(self, pool: BlockMemory, instance_id: str) -> Fetcher:
        """The consumer's side."""
        return MemoryFetcher(pool, self._exchange)


def run(model: str, topology: Topology, kind: Kind, only: Sequence[str]) -> int:
    """Print a row for each group of cases; returns 1 if any differed."""
    with loading_bar(model) as bar:
        loaded = load(model, OPTIONS, bar, MEDIA)
    material = Material(loaded)
    groups = {
        name: [case for case in GROUPS[name](material) if possible(case, topology)]
        for name in GROUPS
        if name in only or not only
    }
    with _transport(kind) as transport, _bar(sum(map(len, groups.values()))) as advance:
        compared = asyncio.run(_compare(loaded, transport, topology, groups, material.placeholder, advance))
    console = Console(highlight=False)
    console.print(f"one engine against {topology} over {kind}: {escape(loaded.frontend.model.served_name)}")
    console.print(_table(compared))
    wrong = [one for results in compared.values() for one in results if one.differences]
    for one in wrong[:SHOWN]:
        console.print(f"{escape(one.case.name)}: {escape(one.differences[0])}", soft_wrap=True)
    if len(wrong) > SHOWN:
        console.print(f"and {len(wrong) - SHOWN} more")
    return int(bool(wrong))


def possible(case: Case, topology: Topology) -> bool:
    """Whether there is an engine that could have what the case wants cached."""
    return case.reuse is None or not case.reuse.on_decode or topology.endswith("+d")


@contextmanager
def _transport(kind: Kind) -> Generator[Transport, None, None]:
    if kind == MEMORY:
        yield Memory()
    elif kind == NIXL:
        yield Nixl(secrets.token_hex(32))
    else:
        base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else None
        with tempfile.TemporaryDirectory(prefix="triptych-eval-", dir=base) as directory:
            yield SharedDir(Path(directory) / SHARED_DIR, SESSION_SECONDS)


@contextmanager
def _bar(total: int) -> Generator[Callable[[], None], None, None]:
    """A bar on stderr; the callback is for each case that is done."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("comparing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


async def _compare(
    loaded: LoadedModel,
    transport: Transport,
    topology: Topology,
    groups: dict[str, list[Case]],
    placeholder: int | None,
    advance: Callable[[], None],
) -> dict[str, list[Compared]]:
    """All cases; those that follow one another with one size of step have the same engines."""
    results: dict[str, list[Compared]] = {name: [] for name in groups}
    cases = [(name, case) for name, cases in groups.items() for case in cases]
    for chunk, same in groupby(cases, lambda pair: pair[1].chunk):
        async with Sides(loaded, transport, topology, chunk) as sides:
            for name, case in same:
                results[name].append(await sides.compare(case, placeholder))
                advance()
    return results


def _table(compared: dict[str, list[Compared]]) -> Table:
    table = Table("cases of", "cases", "tokens", "reused", "result", box=None, padding=(0, 2))
    for column in table.columns[1:4]:
        column.justify = "right"
    for name, results in compared.items():
        wrong = sum(bool(one.differences) for one in results)
        result = f"[red]{wrong} differ[/red]" if wrong else "[green]equal[/green]" if results else "not possible here"
        tokens, reused = sum(one.tokens for one in results), sum(one.reused for one in results)
        table.add_row(TITLES[name], str(len(results)), str(tokens), str(reused), result)
    everything = [one for results in compared.values() for one in results]
    table.add_section()
    table.add_row("all", str(len(everything)), str(sum(one.tokens for one in everything)), "", "")
    return table
