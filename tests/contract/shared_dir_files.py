"""What the tests of ``shared-dir`` alone need: its files, and a hold on its system calls."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.contract.transports import PATIENCE, TRANSPORTS, wait_until
from triptych.transport.shared_dir import owner_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.transports import Sides
    from triptych.core.handles import Handle

ROW = TRANSPORTS["shared-dir"]


def names(both: Sides, state: str) -> list[Path]:
    return [path for path in Path(both.place).iterdir() if path.name.endswith(f".{state}")]


def ready_file(both: Sides, handle: Handle[Any]) -> Path:
    """The claimable file of a session, once it is there."""
    path = Path(both.place) / f"{handle.state.hex()}.{owner_of('producer', both.instance)}.ready"
    wait_until(path.exists, "the session never became claimable")
    return path


def taken_file(both: Sides, handle: Handle[Any], taker: str) -> Path:
    """What the file is called while ``taker`` has it."""
    return Path(both.place) / f"{handle.state.hex()}.{owner_of('producer', both.instance)}.{taker}.taken"


class Gate:
    """Holds a system call until it is opened."""

    def __init__(self, call: Callable[..., int]) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._call = call

    def __call__(self, *arguments: Any) -> int:
        self.reached.set()
        assert self.opened.wait(PATIENCE)
        return self._call(*arguments)
