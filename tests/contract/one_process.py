"""One process that decodes, and what tests of it share."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.corpus.drawn import RGB
from tests.corpus.picture_files import PNG_RGB, png
from triptych.core.config import MediaLimits
from triptych.core.errors import MediaError
from triptych.core.media_options import PictureOptions
from triptych.media.decode import admit_picture
from triptych.media.limits import RequestBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from triptych.media.decode_host import DecodeProcess

LIMITS = MediaLimits()
OPTIONS = PictureOptions()
GOOD = png(RGB, PNG_RGB)


def decode(worker: DecodeProcess, data: bytes = GOOD) -> np.ndarray:
    return worker.picture(0, data, admit_picture(0, data, RequestBudget(LIMITS)), OPTIONS).pixels


def descriptors() -> int:
    """That are open."""
    return len(os.listdir("/proc/self/fd"))


def settled() -> int:
    """The same, without those of what earlier tests have left."""
    gc.collect()
    return descriptors()


def is_gone(pid: int) -> bool:
    """Whether it has ended; what nobody waits for may still be listed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_stopped(pid: int) -> bool:
    return "T (stopped)" in Path(f"/proc/{pid}/status").read_text()


def until(condition: Callable[[], bool]) -> None:
    """Wait for it, and not for ever."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it has not come to that within 60 s"
        time.sleep(0.005)


@contextmanager
def refusals(worker: DecodeProcess) -> Iterator[list[MediaError]]:
    """A picture is decoded beside the block; why it was not, once the block is left."""
    errors: list[MediaError] = []

    def run() -> None:
        try:
            decode(worker)
        except MediaError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield errors
    thread.join()


def was_asked(worker: DecodeProcess) -> bool:
    """Whether the process was sent its first task; the answer is then waited for."""
    return worker._child is not None and worker._child.channel.asked
