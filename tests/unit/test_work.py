"""Work on other threads: its caller, cancelled at any moment, leaves when nothing of it goes on."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

import pytest

from tests.stepping import Steps
from triptych.media.work import on_thread, until_ended

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class ByHand(Executor):
    """Does nothing until it is told to."""

    def __init__(self) -> None:
        self.work: Future[Any] = Future()
        self._call: Callable[[], object] = bool

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._call = lambda: fn(*args, **kwargs)
        return self.work

    def begin(self) -> bool:
        return self.work.set_running_or_notify_cancel()

    def end(self) -> None:
        try:
            self.work.set_result(self._call())
        except Exception as error:
            self.work.set_exception(error)


def halve(number: int, *, by: int = 2) -> float:
    return number / by


def on_hand(by: int = 2) -> tuple[Steps, ByHand, asyncio.Task[float]]:
    loop, threads = Steps(), ByHand()
    with loop.running():
        caller = loop.create_task(on_thread(threads, halve, 6, by=by))
    loop.settle()
    return loop, threads, caller


def test_the_result_is_that_of_the_function() -> None:
    loop, threads, caller = on_hand(by=3)
    threads.begin()
    threads.end()
    loop.settle()
    assert caller.result() == 2


def test_what_it_raises_is_raised() -> None:
    loop, threads, caller = on_hand(by=0)
    threads.begin()
    threads.end()
    loop.settle()
    assert isinstance(caller.exception(), ZeroDivisionError)


def test_work_that_has_not_begun_is_taken_back() -> None:
    loop, threads, caller = on_hand()
    caller.cancel()
    loop.settle()
    assert caller.cancelled()
    assert not threads.begin()
    assert not loop.pending()


@pytest.mark.parametrize("by", [2, 0])
def test_work_that_has_begun_is_waited_for_however_often_its_caller_is_cancelled(by: int) -> None:
    loop, threads, caller = on_hand(by)
    threads.begin()
    for _ in range(3):
        caller.cancel()
        loop.settle()
        assert not caller.done()
    threads.end()
    loop.settle()
    assert caller.cancelled()
    assert not loop.pending()
    del caller, threads
    loop.forget()
    assert not loop.errors  # what nobody waited for goes to no log


def test_work_is_asked_to_stop_once() -> None:
    loop, asked = Steps(), []
    work = loop.create_future()
    with loop.running():
        caller = loop.create_task(until_ended(work, lambda: asked.append(1)))
    for _ in range(3):
        loop.settle()
        caller.cancel()
    work.set_result(None)
    loop.settle()
    assert caller.cancelled()
    assert len(asked) == 1


def test_a_caller_that_is_cancelled_as_the_work_ends_is_cancelled() -> None:
    loop, threads, caller = on_hand()
    threads.begin()
    threads.end()
    caller.cancel()
    loop.settle()
    assert caller.cancelled()
    assert not loop.pending()
