from __future__ import annotations

import asyncio

import pytest

from triptych.media.incoming import Incoming


class Transport(asyncio.Transport):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[object] = []

    def pause_reading(self) -> None:
        self.asked.append("pause")

    def resume_reading(self) -> None:
        self.asked.append("resume")

    def write(self, data: object) -> None:
        self.asked.append(data)

    def abort(self) -> None:
        self.asked.append("abort")


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
def incoming(transport: Transport) -> Incoming:
    incoming = Incoming()
    incoming.connection_made(transport)
    return incoming


async def test_pieces_come_in_order_and_then_the_end(incoming: Incoming) -> None:
    incoming.data_received(b"a")
    incoming.data_received(b"b")
    incoming.eof_received()
    assert [await incoming.read() for _ in range(4)] == [b"a", b"b", b"", b""]


async def test_a_reader_waits(incoming: Incoming) -> None:
    reading = asyncio.create_task(incoming.read())
    await asyncio.sleep(0)
    assert not reading.done()
    incoming.data_received(b"a")
    incoming.data_received(b"b")
    assert await reading == b"a"
    assert await incoming.read() == b"b"


async def test_what_came_before_a_break_is_read_first(incoming: Incoming) -> None:
    incoming.data_received(b"a")
    incoming.connection_lost(ConnectionResetError("gone"))
    assert await incoming.read() == b"a"
    for _ in range(2):
        with pytest.raises(ConnectionResetError):
            await incoming.read()


async def test_a_break_wakes_the_reader(incoming: Incoming) -> None:
    reading = asyncio.create_task(incoming.read())
    await asyncio.sleep(0)
    incoming.connection_lost(None)
    assert await reading == b""


async def test_the_peer_waits_while_much_is_unread(incoming: Incoming, transport: Transport) -> None:
    for _ in range(4):
        incoming.data_received(bytes(64 * 1024))
    assert transport.asked == []
    incoming.data_received(b"x")
    assert transport.asked == ["pause"]
    await incoming.read()
    assert transport.asked == ["pause", "resume"]


async def test_a_reader_may_leave_and_another_come(incoming: Incoming) -> None:
    reading = asyncio.create_task(incoming.read())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    incoming.data_received(b"a")
    assert await incoming.read() == b"a"


def test_before_there_is_a_connection_nothing_is_sent_or_aborted() -> None:
    incoming, transport = Incoming(), Transport()
    incoming.send(b"x")
    incoming.abort()
    incoming.connection_made(transport)
    incoming.send(b"y")
    incoming.abort()
    assert transport.asked == [b"y", "abort"]
