"""Rows on their way in, over a transport that the test plays: who waits, who gets room, and when it is free."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.roles.fake_engine import frontend
from tests.roles.row_fakes import LAYOUT, ROW_BYTES, Encoder, Held, layout_of, numbers, reference, terms, until
from triptych.core.errors import (
    Cancelled,
    Internal,
    InvalidRequest,
    Overloaded,
    ReferenceNotFound,
    RowTransferFailed,
    StartupError,
    TriptychError,
)
from triptych.roles import row_intake
from triptych.roles.contract import HealthState
from triptych.roles.row_intake import Landing, RowIntake, RowLimits
from triptych.transport.contract import FetchOutcome

if TYPE_CHECKING:
    from tests.roles.row_fakes import HeldFetch
    from triptych.core.encoded import EncoderReference
    from triptych.roles.row_ticket import RowTicket

FAILURES = ("refused", "crowded", "gone", "failed", "damaged", "given_up", "in_vain")


def big(key: int = 1) -> EncoderReference:
    """Of 3 blocks."""
    return reference(layout_of(8, 8, key))


async def turns(count: int = 5) -> None:
    """Let everything happen that can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def failure(ticket: RowTicket) -> TriptychError:
    with pytest.raises(TriptychError) as caught:
        await ticket.take()
    assert "\n" not in str(caught.value)
    return caught.value


def bring(fetch: HeldFetch, layout_key: int, h: int = 8, w: int = 8) -> None:
    fetch.finish(numbers(layout_of(h, w, layout_key)))


def failures(held: Held) -> dict[str, float]:
    now = held.rows.statistics()
    return {name: now[name] for name in FAILURES if now[name]}


# -- rows that come ----------------------------------------------------------------------------------------------------


async def test_each_item_comes_by_itself_and_all_come_out_in_order() -> None:
    held = Held.of()
    layouts = [layout_of(8, 8, 1), layout_of(1, 1, 2), layout_of(5, 9, 3)]
    given = [reference(layout) for layout in layouts]
    ticket = held.rows.line_up(given)
    assert [fetch.handle for fetch in held.fetcher.begun] == [one.item.handle for one in given]
    assert [len(fetch.moves) for fetch in held.fetcher.begun] == [3, 1, 3]
    assert [[move.source for move in fetch.moves] for fetch in held.fetcher.begun] == [[0, 1, 2], [0], [0, 1, 2]]
    taking = asyncio.create_task(ticket.take())
    for index in (2, 0, 1):  # as they come
        await turns()
        assert not taking.done()
        held.fetcher.begun[index].finish(numbers(layouts[index]))
    rows = await taking
    for own, layout in zip(rows, layouts, strict=True):
        assert own.dtype == np.uint8
        assert own.shape == (layout.rows, ROW_BYTES)
        assert own.tobytes() == numbers(layout).tobytes()
        assert not np.shares_memory(own, held.landing.memory.memory)
    assert held.nothing()
    now = held.rows.statistics()
    assert (now["taken"], now["taken_bytes"]) == (3, sum(layout.rows for layout in layouts) * ROW_BYTES)
    assert failures(held) == {}
    held.integrity()


async def test_rows_by_a_real_transport() -> None:
    encoder = Encoder()
    landing = Landing.of(12 * 1024, LAYOUT)
    rows = RowIntake(terms(), landing, encoder.fetcher(landing))
    for key in range(20):  # the arena is used again and again
        layouts = [layout_of(8, 8, 2 * key), layout_of(3, 4, 2 * key + 1)]
        given = [encoder.encode(layout) for layout in layouts]
        own = await rows.line_up(given).take()
        assert [each.tobytes() for each in own] == [numbers(layout).tobytes() for layout in layouts]
        assert not any(encoder.waits(one) for one in given)
    assert rows.statistics()["held_bytes"] == 0
    await rows.close()


async def test_a_block_is_free_as_soon_as_its_item_is_copied() -> None:
    held = Held.of(blocks=6)
    ticket = held.rows.line_up([big(1), big(2)])
    other = held.rows.line_up([big(3)])
    assert len(held.fetcher.begun) == 2
    bring(held.fetcher.begun[0], 1)
    await until(lambda: len(held.fetcher.begun) == 3)  # the other one has room now
    held.integrity()
    bring(held.fetcher.begun[1], 2)
    bring(held.fetcher.begun[2], 3)
    assert len(await ticket.take()) == 2
    assert len(await other.take()) == 1
    assert held.nothing()


async def test_the_callback_comes_from_another_thread() -> None:
    held = Held.of()
    ticket = held.rows.line_up([big()])
    thread = threading.Thread(target=bring, args=(held.fetcher.begun[0], 1))
    thread.start()
    (own,) = await ticket.take()
    thread.join()
    assert own.tobytes() == numbers(layout_of(8, 8)).tobytes()


# -- the line ----------------------------------------------------------------------------------------------------------


async def test_who_came_first_gets_room_first() -> None:
    held = Held.of(blocks=6)
    first = held.rows.line_up([big(1), big(2)])
    second = held.rows.line_up([big(3), big(4)])
    small = held.rows.line_up([reference(layout_of(1, 1, 5))])
    assert len(held.fetcher.begun) == 2
    bring(held.fetcher.begun[0], 1)
    await until(lambda: held.rows.statistics()["held_bytes"] == 3 * 1024)
    assert held.rows.statistics()["waiting"] == 2  # there is room for the small one, but it came last
    bring(held.fetcher.begun[1], 2)
    await first.take()
    assert len(held.fetcher.begun) == 4
    for index, key in ((2, 3), (3, 4)):
        bring(held.fetcher.begun[index], key)
    await second.take()
    bring(held.fetcher.begun[4], 5, 1, 1)
    await small.take()
    assert held.nothing()


async def test_a_request_holds_all_of_its_blocks_or_none() -> None:
    """So no two of them wait for each other."""
    held = Held.of(blocks=6)
    tickets = [held.rows.line_up([big(2 * key), big(2 * key + 1)]) for key in range(3)]
    for number, ticket in enumerate(tickets):
        assert len(held.fetcher.begun) == 2 * (number + 1)
        assert held.rows.statistics()["held_bytes"] == 6 * 1024
        for index in (1, 0):
            bring(held.fetcher.begun[2 * number + index], 2 * number + index)
        await ticket.take()


async def test_the_line_is_bounded() -> None:
    held = Held.of(blocks=3, limits=RowLimits(max_waiting=2))
    tickets = [held.rows.line_up([big(key)]) for key in range(3)]
    with pytest.raises(Overloaded, match=r"2 requests already wait .* --encoder-quota"):
        held.rows.line_up([big(9)])
    assert failures(held) == {"refused": 1}
    tickets[1].give_up()
    waiting = held.rows.line_up([big(9)])
    for ticket in (*tickets, waiting):
        ticket.give_up()
    held.fetcher.begun[0].end(FetchOutcome.CANCELLED)
    await turns()
    assert held.nothing()


async def test_a_place_in_line_has_a_time() -> None:
    held = Held.of(blocks=3, limits=RowLimits(wait_seconds=0))
    first, second = held.rows.line_up([big(1)]), held.rows.line_up([big(2)])
    error = await failure(second)
    assert isinstance(error, Overloaded)
    assert "no room for the request's 3072 bytes" in str(error)
    assert "3072 of 3072 bytes are in use; retry with the same references, or raise --encoder-quota" in str(error)
    assert len(held.fetcher.begun) == 1  # nothing of the second was touched
    bring(held.fetcher.begun[0], 1)
    await first.take()  # who has left the line has left its time behind
    assert failures(held) == {"crowded": 1}
    assert held.nothing()


async def test_who_leaves_the_line_lets_the_next_one_in() -> None:
    held = Held.of(blocks=4)
    first = held.rows.line_up([big(1)])
    large = held.rows.line_up([big(2)])
    small = held.rows.line_up([reference(layout_of(1, 1, 3))])
    large.give_up()
    large.give_up()
    assert len(held.fetcher.begun) == 2
    assert isinstance(await failure(large), Cancelled)
    bring(held.fetcher.begun[0], 1)
    bring(held.fetcher.begun[1], 3, 1, 1)
    await asyncio.gather(first.take(), small.take())
    assert failures(held) == {"given_up": 1}
    assert held.nothing()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "error", "counted"),
    [
        (FetchOutcome.GONE, ReferenceNotFound, "gone"),
        (FetchOutcome.FAILED, RowTransferFailed, "failed"),
        (FetchOutcome.CANCELLED, RowTransferFailed, "failed"),  # by a transport that ends
    ],
)
async def test_one_item_that_fails_ends_the_others(
    outcome: FetchOutcome, error: type[TriptychError], counted: str
) -> None:
    held = Held.of()
    ticket = held.rows.line_up([big(1), big(2), big(3)])
    bring(held.fetcher.begun[0], 1)
    await until(lambda: held.rows.statistics()["held_bytes"] == 6 * 1024)
    held.fetcher.begun[1].end(outcome, "taken already")
    caught = await failure(ticket)
    assert type(caught) is error
    assert str(caught) == (
        "media item 1: taken already; encode it again (so must be media item(s) 0, which had come already)"
    )
    assert caught.retryable
    assert held.fetcher.begun[2].cancels == 1
    assert held.rows.statistics()["held_bytes"] == 3 * 1024  # nothing is free before its time
    held.integrity()
    held.fetcher.begun[2].end(FetchOutcome.CANCELLED)
    await turns()
    assert failures(held) == {counted: 1}
    assert held.nothing()


async def test_an_item_that_comes_although_it_was_cancelled_is_dropped() -> None:
    held = Held.of()
    ticket = held.rows.line_up([big(1), big(2)])
    held.fetcher.begun[0].end(FetchOutcome.GONE, "expired")
    assert str(await failure(ticket)) == "media item 0: expired; encode it again"
    bring(held.fetcher.begun[1], 2)
    await until(held.nothing)
    assert failures(held) == {"gone": 1, "in_vain": 1}


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000])
async def test_numbers_that_are_not_finite_are_no_rows(bits: int) -> None:
    held = Held.of()
    ticket = held.rows.line_up([big(1), big(2)])
    rows = numbers(layout_of(8, 8, 2)).copy()
    rows.view(np.uint32)[63, 11] = bits
    bring(held.fetcher.begun[0], 1)
    held.fetcher.begun[1].finish(rows)
    caught = await failure(ticket)
    assert type(caught) is RowTransferFailed
    assert str(caught).startswith("media item 1: its rows hold numbers that are not finite; encode it again")
    await until(held.nothing)
    assert failures(held)["damaged"] == 1


async def test_what_lies_behind_the_rows_is_not_looked_at() -> None:
    """The last block is partly filled, and another request's bytes are left in it."""
    held = Held.of()
    held.landing.memory.memory.fill(0xFF)
    ticket = held.rows.line_up([reference(layout_of(1, 1))])
    bring(held.fetcher.begun[0], 1, 1, 1)
    (own,) = await ticket.take()
    assert own.tobytes() == numbers(layout_of(1, 1)).tobytes()


async def test_a_transport_that_moved_less_than_it_says_is_found_out() -> None:
    held = Held.of()
    ticket = held.rows.line_up([big(1)])
    held.fetcher.begun[0].finish(numbers(layout_of(8, 8)), moved=2048)
    caught = await failure(ticket)
    assert type(caught) is RowTransferFailed
    assert "2048 of 3072 bytes came" in str(caught)
    assert held.nothing()
    assert failures(held) == {"damaged": 1}


async def test_a_fetch_that_cannot_be_begun_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    held = Held.of()
    held.fetcher.breaks_at = 1
    ticket = held.rows.line_up([big(1), big(2), big(3)])
    caught = await failure(ticket)
    assert type(caught) is Internal
    assert str(caught).startswith("media item 1: taking its rows failed")
    assert "a bug" in caplog.text
    assert len(held.fetcher.begun) == 1
    assert held.fetcher.begun[0].cancels == 1
    assert held.rows.statistics()["held_bytes"] == 3 * 1024
    held.fetcher.begun[0].end(FetchOutcome.CANCELLED)
    await turns()
    assert held.nothing()


@pytest.mark.parametrize(("trouble", "error"), [(MemoryError(), Overloaded), (RuntimeError("a bug"), Internal)])
async def test_rows_that_cannot_be_copied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: Exception, error: type[TriptychError]
) -> None:
    def copied(*_: object) -> None:
        raise trouble

    monkeypatch.setattr(row_intake, "copied_rows", copied)
    held = Held.of()
    ticket = held.rows.line_up([big(1)])
    bring(held.fetcher.begun[0], 1)
    caught = await failure(ticket)
    assert type(caught) is error
    assert str(caught).startswith("media item 0: ")
    assert ("a bug" in caplog.text) == (error is Internal)
    assert held.nothing()


async def test_what_the_transport_refuses_names_the_item() -> None:
    held = Held.of()
    assert len(held.rows.check([big(1)], frontend().processor, 0)) == 1
    held.fetcher.refuse = "its state has 3 bytes"
    with pytest.raises(InvalidRequest, match=r"^media item 0: its state has 3 bytes$"):
        held.rows.check([big(1)], frontend().processor, 0)


# -- whoever leaves ----------------------------------------------------------------------------------------------------


async def test_giving_up_while_it_is_fetched_is_heard_at_once_and_frees_nothing_early() -> None:
    held = Held.of(blocks=6)
    ticket = held.rows.line_up([big(1), big(2)])
    taking = asyncio.create_task(ticket.take())
    await turns()
    ticket.give_up()
    ticket.give_up()
    with pytest.raises(Cancelled):
        await taking
    assert [fetch.cancels for fetch in held.fetcher.begun] == [1, 1]
    other = held.rows.line_up([big(3)])
    assert len(held.fetcher.begun) == 2
    held.fetcher.begun[0].end(FetchOutcome.CANCELLED)
    await turns()
    assert len(held.fetcher.begun) == 3
    assert set(held.fetcher.begun[2].targets).isdisjoint(held.fetcher.begun[1].targets)
    held.fetcher.begun[1].end(FetchOutcome.CANCELLED)
    bring(held.fetcher.begun[2], 3)
    await other.take()
    assert failures(held) == {"given_up": 1}
    assert held.nothing()


async def test_giving_up_while_it_is_copied_waits_for_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    go, copies = threading.Event(), row_intake.copied_rows
    entered = threading.Event()

    def copied(*arguments: object) -> object:
        entered.set()
        assert go.wait(20)
        return copies(*arguments)

    monkeypatch.setattr(row_intake, "copied_rows", copied)
    held = Held.of(blocks=3)
    ticket = held.rows.line_up([big(1)])
    bring(held.fetcher.begun[0], 1)
    await until(entered.is_set)
    ticket.give_up()
    assert isinstance(await failure(ticket), Cancelled)
    other = held.rows.line_up([big(2)])
    await turns()
    assert len(held.fetcher.begun) == 1
    go.set()
    await until(lambda: len(held.fetcher.begun) == 2)
    bring(held.fetcher.begun[1], 2)
    await other.take()
    assert failures(held) == {"given_up": 1, "in_vain": 1}
    assert held.nothing()
    await held.rows.close()


async def test_giving_up_what_is_there_changes_nothing() -> None:
    held = Held.of()
    ticket = held.rows.line_up([big(1)])
    bring(held.fetcher.begun[0], 1)
    await until(lambda: held.rows.statistics()["taken"] == 1)
    ticket.give_up()
    assert len(await ticket.take()) == 1
    assert failures(held) == {}


async def test_whoever_stops_waiting_has_not_given_up() -> None:
    held = Held.of()
    ticket = held.rows.line_up([big(1)])
    taking = asyncio.create_task(ticket.take())
    await turns()
    taking.cancel()
    await turns()
    assert not ticket.ended
    bring(held.fetcher.begun[0], 1)
    assert len(await ticket.take()) == 1


async def test_an_end_that_nobody_waits_for_is_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    held = Held.of()
    held.rows.line_up([big(1)])
    held.fetcher.begun[0].end(FetchOutcome.GONE, "expired")
    await turns()
    gc.collect()
    await turns()
    assert caplog.text == ""


# -- what does not end -------------------------------------------------------------------------------------------------


async def test_blocks_that_something_may_still_write_to_are_in_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_intake, "OVERDUE_SECONDS", 0)
    held = Held.of(blocks=7, limits=RowLimits(fetch_seconds=0))
    ticket = held.rows.line_up([big(1), big(2)])
    bring(held.fetcher.begun[0], 1)
    caught = await failure(ticket)
    assert type(caught) is RowTransferFailed
    assert str(caught).startswith("media item 1: its rows did not come within 0 s; encode it again (so must be ")
    assert held.fetcher.begun[1].cancels == 1
    await until(lambda: held.rows.statistics()["held_bytes"] == 3 * 1024)
    assert held.rows.statistics()["quarantined_bytes"] == 3 * 1024
    health = held.rows.health()
    assert (health.name, health.state) == ("encoder_connector", HealthState.DEGRADED)
    assert "3072 of 7168 bytes (--encoder-quota) are in quarantine" in health.message
    held.fetcher.begun[1].end(FetchOutcome.CANCELLED)
    await turns()
    assert held.rows.health().state is HealthState.READY
    assert held.rows.health().message == ""
    assert held.nothing()


async def test_quarantine_is_never_given_to_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_intake, "OVERDUE_SECONDS", 0)
    held = Held.of(blocks=6, limits=RowLimits(fetch_seconds=0))
    await failure(held.rows.line_up([big(1)]))
    stuck = held.fetcher.begun[0]
    for key in range(2, 30):
        other = held.rows.line_up([big(key)])
        assert set(held.fetcher.begun[-1].targets).isdisjoint(stuck.targets)
        held.fetcher.begun[-1].finish(numbers(layout_of(8, 8, key)))
        (own,) = await other.take()
        assert own.tobytes() == numbers(layout_of(8, 8, key)).tobytes()
    stuck.finish(numbers(layout_of(8, 8, 1)))  # late, and harmless
    await turns()
    assert held.nothing()
    assert failures(held) == {"failed": 1, "in_vain": 1}


async def test_nothing_can_be_taken_when_quarantine_has_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_intake, "OVERDUE_SECONDS", 0)
    held = Held.of(blocks=6, limits=RowLimits(fetch_seconds=0, wait_seconds=60))
    await failure(held.rows.line_up([big(1)]))
    assert held.rows.health().state is HealthState.DEGRADED  # half of it is of use
    taken = held.rows.line_up([big(5)])
    next_one = held.rows.line_up([big(6)])
    assert held.rows.health().state is HealthState.DEGRADED  # it waits for others, not for quarantine
    next_one.give_up()
    bring(held.fetcher.begun[1], 5)
    await taken.take()
    waiting = held.rows.line_up([big(2), big(3)])
    assert held.rows.health().state is HealthState.NOT_READY  # and all of it is needed, by the first in line
    waiting.give_up()
    assert held.rows.health().state is HealthState.DEGRADED
    await failure(held.rows.line_up([big(4)]))
    assert held.rows.health().state is HealthState.NOT_READY
    held.fetcher.begun[0].end(FetchOutcome.FAILED)
    await turns()
    assert held.rows.health().state is HealthState.DEGRADED
    held.fetcher.begun[2].end(FetchOutcome.FAILED)
    await turns()
    assert held.rows.health().state is HealthState.READY
    assert held.nothing()


async def test_who_gave_up_is_not_waited_for_but_what_hangs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_intake, "OVERDUE_SECONDS", 0)
    held = Held.of(limits=RowLimits(fetch_seconds=0.01))
    ticket = held.rows.line_up([big(1)])
    ticket.give_up()
    assert held.rows.health().state is HealthState.READY  # it has its time
    await until(lambda: held.rows.health().state is HealthState.DEGRADED)
    held.fetcher.begun[0].end(FetchOutcome.CANCELLED)
    await turns()
    assert held.rows.health().state is HealthState.READY
    assert failures(held) == {"given_up": 1}


# -- the arena ---------------------------------------------------------------------------------------------------------


def test_an_arena_has_whole_blocks() -> None:
    landing = Landing.of(3 * 1024 + 1023, LAYOUT)
    assert landing.memory.memory.shape == (3, 1024)
    assert landing.blocks.total == len(landing.memory.generations) == 3


def test_an_arena_that_cannot_be_had_names_its_flag() -> None:
    for quota in (0, 1023, 2**60):
        with pytest.raises(StartupError, match=f"--encoder-quota {quota} "):
            Landing.of(quota, LAYOUT)
