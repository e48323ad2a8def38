"""Requests whose items go to several encoders, each of which has only so much memory for what it has encoded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

import pytest

from tests.chat_files import write_chat_files
from tests.rpc.gateway_harness import asking, running, until, uri
from tests.rpc.gateway_parts import Encoder, Reader, Shelf

if TYPE_CHECKING:
    from pathlib import Path

ITEMS = range(12)
"""Some of them go to each of two encoders."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_files(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.gateway.route.REFRESH_SECONDS", 0.01)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


class Room(asyncio.Event):
    """A step that waits until nothing waits on the shelf that this encoder has made."""

    def __init__(self, shelf: Shelf, address: str) -> None:
        super().__init__()
        self._shelf = shelf
        self._own = f"{address}/"

    async def wait(self) -> Literal[True]:
        fates = self._shelf.fates
        await until(lambda: all(fates[name] for name in fates if name.startswith(self._own)))
        return True


async def test_two_requests_never_wait_for_what_the_other_one_holds(
    directory: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each encoder has room for the items of one request."""
    monkeypatch.setattr("triptych.gateway.encode.PATIENCE_SECONDS", 0.05)
    encoders = Encoder(directory, shelf), Encoder(directory, shelf, "e:2"), Encoder(directory, shelf, "e:3")
    for encoder in encoders:
        encoder.before = [Room(shelf, encoder.address)]
    async with running(*encoders, Reader(directory, shelf=shelf)) as run:
        await run.all_ready()
        for _ in range(3):
            questions = [asking(*(3 * number + item for item in ITEMS)) for number in range(12)]
            answers = await asyncio.gather(*(run.chat(messages=question) for question in questions))
            assert [answer.status_code for answer in answers] == [200] * len(answers)
        await until(run.nothing_is_held)
        assert shelf.each("used", "released")


async def test_where_somebody_else_is_encoders_are_asked_one_after_the_other(directory: Path, shelf: Shelf) -> None:
    encoders = Encoder(directory, shelf), Encoder(directory, shelf, "e:2")
    reader = Reader(directory, shelf=shelf)
    async with running(*encoders, reader) as run:
        await run.all_ready()
        gates = [asyncio.Event(), asyncio.Event()]
        for encoder, gate in zip(encoders, gates, strict=True):
            encoder.before = [gate]
        first = asyncio.create_task(run.chat(messages=asking(*ITEMS)))
        await until(lambda: all(encoder.requests for encoder in encoders))  # both at once: nobody else is there
        second = asyncio.create_task(run.chat(messages=asking(*ITEMS)))
        await until(lambda: len(encoders[0].requests) == 2)
        assert len(encoders[1].requests) == 1
        gates[0].set()
        await until(lambda: len(encoders[1].requests) == 2)
        gates[1].set()
        assert [(await asked).status_code for asked in (first, second)] == [200, 200]
        for offered in reader.offered:
            assert [shelf.items[name] for name in offered] == [uri(number) for number in ITEMS]
        await until(run.nothing_is_held)
        assert shelf.each("used")


async def test_what_is_there_does_not_wait_for_ever(
    directory: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is let go, and the encoder that did not answer is told; then they are asked in turn, with all patience."""
    monkeypatch.setattr("triptych.gateway.encode.PATIENCE_SECONDS", 0.0)
    one, two = Encoder(directory, shelf), Encoder(directory, shelf, "e:2")
    gate = asyncio.Event()
    two.before = [gate]
    reader = Reader(directory, shelf=shelf)
    async with running(one, two, reader) as run:
        await run.all_ready()
        asked = asyncio.create_task(run.chat(messages=asking(*ITEMS)))
        await until(lambda: len(two.requests) == 2)
        assert [len(one.requests), two.aborted] == [2, [two.requests[0].request_id]]
        assert one.released == [f"e:1/0/{index}" for index in range(len(one.requests[0].media))]
        assert not asked.done()
        gate.set()
        assert (await asked).status_code == 200
        assert [shelf.items[name] for name in reader.offered[0]] == [uri(number) for number in ITEMS]
        await until(run.nothing_is_held)
        assert shelf.each("used", "released")
