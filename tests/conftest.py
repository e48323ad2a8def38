from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# A test is never timed: a busy machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def ordinary_priority() -> Iterator[None]:
    """No test leaves the process at another priority: at a real-time one, who spins starves whom it waits for."""
    before, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    yield
    after = os.sched_getscheduler(0)
    os.sched_setscheduler(0, before, priority)
    assert after == before, "the test has changed how this process is scheduled"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a random float32 checkpoint of the named shape, written on first use. Read only."""
    from tests.checkpoints import write_checkpoint

    written: dict[str, Path] = {}

    def of(shape: str) -> Path:
        if shape not in written:
            written[shape] = write_checkpoint(shape, tmp_path_factory.mktemp(shape))
        return written[shape]

    return of
