"""What a process that was taken over can do with the memory that it is lent: nothing, once it has answered."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING

import pytest

from tests.contract.forged import (
    FRAMES,
    PIXELS,
    PPM,
    SAMPLES,
    Ask,
    clip,
    film,
    picture,
    sound,
    tone,
    while_another_answers,
)
from tests.contract.one_process import decode
from tests.corpus.drawn import RGB
from triptych.core.errors import MediaError
from triptych.core.media import Picture
from triptych.media.decode_output import Output

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.media.decode_host import DecodeProcess
    from triptych.media.decode_wire import Answer


F_SEAL_FUTURE_WRITE = 0x10
"""As Linux numbers it: pages that are mapped may be written to as before."""


PAGES: list[mmap.mmap] = []
"""That somebody keeps, to write to them later."""


def keep_pages(output: int) -> None:
    PAGES[:] = [mmap.mmap(output, len(PPM))]


def seal(seals: int) -> Callable[[int], object]:
    return lambda output: fcntl.fcntl(output, fcntl.F_ADD_SEALS, seals)


@pytest.mark.parametrize(
    ("ask", "message", "content"), [(picture, PIXELS, PPM), (clip, FRAMES, film()), (sound, SAMPLES, tone())]
)
@pytest.mark.parametrize(
    "then",
    [
        keep_pages,
        lambda output: os.ftruncate(output, 0),
        lambda output: os.ftruncate(output, len(PPM) - 1),
        seal(fcntl.F_SEAL_SHRINK),
        seal(fcntl.F_SEAL_SEAL),
        seal(fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL),
    ],
)
def test_what_cannot_be_taken_for_good_is_no_answer(
    other_worker: DecodeProcess, ask: Ask, message: Answer, content: bytes, then: Callable[[int], object]
) -> None:
    with pytest.raises(MediaError, match="gives no sane answer: what it wrote cannot be taken: "):
        while_another_answers(other_worker, ask, [message], content, then)
    PAGES.clear()
    assert (decode(other_worker) == RGB).all()


@pytest.mark.parametrize(
    "then", [seal(fcntl.F_SEAL_WRITE), seal(F_SEAL_FUTURE_WRITE), lambda output: os.ftruncate(output, len(PPM))]
)
def test_what_a_process_does_with_its_memory_besides_does_no_harm(
    worker: DecodeProcess, then: Callable[[int], object]
) -> None:
    taken = while_another_answers(worker, picture, [PIXELS], PPM, then)
    assert isinstance(taken, Picture)
    assert taken.pixels.shape == (2, 4, 3)


def test_what_is_cut_while_it_is_taken_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    add = fcntl.fcntl
    with Output(100) as output:

        def cut_first(descriptor: int, *what: int) -> object:
            os.ftruncate(descriptor, 5)
            return add(descriptor, *what)

        monkeypatch.setattr(fcntl, "fcntl", cut_first)
        with pytest.raises(ValueError, match="what it wrote was cut"):
            output.taken(10)


def test_no_more_comes_out_than_there_is_room_for() -> None:
    with Output(100) as output:
        assert os.fstat(output.descriptor).st_blocks == 0
        for grow in (
            lambda: os.pwrite(output.descriptor, bytes(101), 0),
            lambda: os.ftruncate(output.descriptor, 101),
            lambda: os.posix_fallocate(output.descriptor, 0, 101),
        ):
            with pytest.raises(PermissionError):
                grow()
        with pytest.raises(ValueError, match="cannot be taken"):
            output.taken(101)


def test_nobody_changes_what_was_taken(worker: DecodeProcess) -> None:
    kept: list[int] = []
    taken = while_another_answers(worker, picture, [PIXELS], PPM, lambda output: kept.append(os.dup(output)))
    assert isinstance(taken, Picture)
    for change in (
        lambda: os.pwrite(kept[0], b"x", 20),
        lambda: os.ftruncate(kept[0], 0),
        lambda: os.ftruncate(kept[0], 1 << 20),
        lambda: os.posix_fallocate(kept[0], 0, 1 << 20),
        lambda: fcntl.fcntl(kept[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL),
        lambda: mmap.mmap(kept[0], len(PPM)),
    ):
        with pytest.raises(PermissionError):
            change()
    os.close(kept[0])
    assert not taken.pixels.any()
