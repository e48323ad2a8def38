"""Processes that decode, for the tests that try one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.contract.one_process import LIMITS
from triptych.core.config import DecodeConfig
from triptych.media.decode_host import DecodeProcess

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def worker() -> Iterator[DecodeProcess]:
    """One whose tasks may take half a second of a processor."""
    worker = DecodeProcess(LIMITS, DecodeConfig(decode_seconds=0.5))
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def other_worker() -> Iterator[DecodeProcess]:
    """One for many tests, each of which it does not survive."""
    worker = DecodeProcess(LIMITS, DecodeConfig())
    yield worker
    worker.close()
