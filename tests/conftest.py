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


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Takes what a test has measured and does not judge; the run prints it at its end."""
    return lambda text: record_property("measured", text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    ended = [report for report in reports if isinstance(report, pytest.TestReport) and report.when == "call"]
    said = [value for report in ended for name, value in report.user_properties if name == "measured"]
    if said:
        terminalreporter.section("measured")
    for text in said:
        terminalreporter.write_line(str(text))


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
