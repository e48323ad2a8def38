"""What an encoder engine encodes in a step, whose rows it hands on, and what it holds for how long."""

from __future__ import annotations

import pytest

from tests.requests import content_key
from tests.unit.encode_bench import LAYOUT, Bench, asked, picture_of
from triptych.core.errors import DuplicateRequest, IntegrityError, Internal, InvalidRequest, Overloaded
from triptych.core.events import Encoded, Finished, FinishReason, RowsGone, Span
from triptych.engine.encode_step import EncodeResult

# -- encoding ---------------------------------------------------------------------------------------


def test_items_of_different_requests_are_encoded_together() -> None:
    bench = Bench()
    bench.add(asked("a", 1, 5), asked("b", 2, 3))
    bench.add(asked("c", 3, 9))
    assert bench.step() == ["a", "b", "c"]
    for name, rows in (("a", 5), ("b", 3), ("c", 9)):
        end = bench.end(name, Encoded)
        assert end.handle.session_id == f"s {name}"
        assert end.handle.layout == LAYOUT
        assert end.handle.blocks == -(-rows // 4)
    bench.take("a", "b", "c")
    assert [picture_of(bench.taken[name]) for name in "abc"] == [1, 2, 3]
    bench.settle()


def test_budgets_are_kept_and_what_is_left_goes_to_the_next() -> None:
    bench = Bench(encoder_items=2, encoder_tokens=40)
    bench.add(asked("a", 1, 6), asked("b", 2, 6), asked("c", 3, 2), asked("d", 4, 1), asked("e", 5, 1))
    # 24 + 8 of 40, then 24 + 4, then 4
    assert [bench.step() for _ in range(3)] == [["a", "c"], ["b", "d"], ["e"]]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_item_larger_than_the_budget_is_encoded_alone_when_it_is_its_turn(place: int) -> None:
    bench = Bench(encoder_tokens=30)
    made = [asked("s", 2, 2), asked("t", 3, 2)]
    made.insert(place, asked("huge", 1, 10))
    for each in made:
        bench.add(each)
    steps = []
    while bench.scheduler.busy:
        steps.append(bench.step())
    assert sorted(name for step in steps for name in step) == ["huge", "s", "t"]
    assert steps.index(["huge"]) <= 1  # nobody who came later goes before it twice


def test_who_came_first_goes_first_whatever_comes_after() -> None:
    bench = Bench(encoder_items=1, blocks=300)
    bench.add(asked("first", 1, 50), asked("second", 2, 50))
    for number in range(5):
        bench.add(asked(f"small {number}", 10 + number, 1))
        bench.step()
    assert bench.order[:2] == ["first", "second"]


def test_urgency_is_a_head_start() -> None:
    bench = Bench(encoder_items=1)
    bench.add(asked("old", 1, 5, arrival=0.0))
    bench.add(asked("urgent", 2, 5, arrival=20.0, priority=1))
    bench.add(asked("late", 3, 5, arrival=40.0, priority=1))
    assert [bench.step() for _ in range(3)] == [["urgent"], ["old"], ["late"]]


def test_the_same_content_under_way_twice_is_computed_once() -> None:
    bench = Bench(encoder_items=1)
    bench.add(asked("a", 1, 5), asked("twin", 1, 5))
    bench.add(asked("other", 2, 3), asked("b", 1, 5))
    assert bench.step() == ["a"]
    assert sorted(bench.ends) == ["a", "b", "twin"]
    assert bench.scheduler.statistics().encoded_items == 1
    assert bench.scheduler.statistics().encoder_cache.reservation_hits == 2
    assert bench.step() == ["other"]
    bench.take("a", "twin", "b")
    assert {picture_of(key) for key in bench.taken.values()} == {1}
    bench.settle()


def test_cached_rows_cost_nothing_with_and_without_input() -> None:
    bench = Bench(encoder_items=1)
    bench.add(asked("a", 1, 5))
    bench.run()
    bench.add(asked("x", 2, 5), asked("y", 3, 5))
    bench.add(asked("known", 1, 5, cached=True), asked("given", 1, 5))
    assert bench.step() == ["x"]
    assert {"known", "given"} < set(bench.ends)
    assert bench.scheduler.statistics().encoder_cache.ready_hits == 2
    bench.run()
    bench.take("known", "given")
    assert {picture_of(key) for key in bench.taken.values()} == {1}


def test_a_group_of_which_rows_are_gone_is_sent_back_whole_and_holds_nothing() -> None:
    bench = Bench()
    bench.add(asked("x", 8, 5))
    bench.run()
    bench.add(asked("a", 1, 5), asked("b", 2, 5, cached=True), asked("c", 8, 5, cached=True))
    bench.add(asked("d", 4, 5))
    assert bench.step() == ["d"]
    assert bench.order == ["x", "a", "b", "c", "d"]
    assert [type(bench.ends[name]) for name in "abcd"] == [RowsGone, RowsGone, RowsGone, Encoded]
    assert bench.scheduler.statistics().gone == 3
    assert bench.scheduler.statistics().held_bytes == 2 * 8
    bench.settle()


def test_what_is_gone_is_said_without_waiting_for_memory() -> None:
    bench = Bench(blocks=2)
    bench.add(asked("x", 1, 8))
    bench.run()
    bench.add(asked("a", 1, 4, cached=True), asked("b", 2, 4))
    bench.run()
    bench.end("b", RowsGone)  # its picture was encoded with another number of rows
    bench.add(asked("again", 1, 8, cached=True))
    bench.run()
    assert "again" not in bench.ends
    bench.take("x")
    bench.run()
    bench.end("again", Encoded)
    bench.settle()


def test_names_of_what_is_gone_can_be_used_again() -> None:
    bench = Bench()
    bench.add(asked("a", 1, 5, cached=True))
    bench.step()
    bench.end("a", RowsGone)
    del bench.ends["a"]
    bench.add(asked("a", 1, 5))
    assert bench.step() == ["a"]
    bench.end("a", Encoded)


def test_only_what_must_go_is_evicted_and_not_what_the_same_group_counts_on() -> None:
    bench = Bench(encoder_cache_bytes=10)
    bench.add(asked("a", 1, 5))
    bench.add(asked("b", 2, 5))
    bench.run()
    # "n" needs space for five rows; picture 1 is older, but wanted
    bench.add(asked("n", 3, 5), asked("again", 1, 5, cached=True))
    assert bench.step() == ["n"]
    bench.end("again", Encoded)
    bench.add(asked("lost", 2, 5, cached=True))
    bench.step()
    bench.end("lost", RowsGone)


def test_an_item_waits_for_space_that_others_of_the_step_hold() -> None:
    bench = Bench(encoder_cache_bytes=10)
    bench.add(asked("a", 1, 6), asked("b", 2, 6), asked("c", 3, 4))
    assert bench.step() == ["a", "c"]
    assert bench.step() == ["b"]


# -- memory that others read ------------------------------------------------------------------------


def test_a_group_waits_until_there_are_blocks_for_all_of_its_items() -> None:
    bench = Bench(blocks=6)
    bench.add(asked("a", 1, 8), asked("b", 2, 8))  # four blocks
    bench.run()
    bench.add(asked("c", 3, 8), asked("d", 4, 4))  # three
    bench.add(asked("e", 5, 1))  # one, but it came later
    assert bench.run() == 1
    assert not bench.scheduler.busy
    assert set(bench.ends) == {"a", "b"}
    assert bench.scheduler.load().queued_requests == 3
    bench.take("a")
    assert bench.scheduler.busy
    bench.run()
    assert bench.order == ["a", "b", "c", "d", "e"]
    bench.take("b", "c", "d", "e")
    bench.settle()


def test_two_requests_never_wait_for_what_the_others_items_hold() -> None:
    bench = Bench(blocks=4, encoder_items=1)
    bench.add(asked("a", 1, 8), asked("b", 2, 8))
    bench.add(asked("c", 3, 8), asked("d", 4, 8))
    bench.run()
    assert set(bench.ends) == {"a", "b"}
    bench.take("a", "b")
    bench.run()
    assert set(bench.ends) == {"a", "b", "c", "d"}


def test_memory_comes_back_when_a_session_is_withdrawn() -> None:
    bench = Bench(blocks=2)
    bench.add(asked("a", 1, 8))
    bench.run()
    bench.add(asked("b", 2, 8))
    bench.run()
    bench.scheduler.withdraw("s a")
    bench.scheduler.withdraw("s nobody's")
    assert bench.scheduler.busy
    bench.run()
    assert "s a" in bench.runner.freed
    assert "b" not in bench.ends
    bench.tell()
    bench.run()
    bench.end("b", Encoded)
    bench.settle()


def test_a_session_that_is_over_twice_or_unknown_is_no_error() -> None:
    bench = Bench()
    bench.add(asked("a", 1, 8))
    bench.scheduler.release("s a")  # it was not opened
    bench.run()
    bench.take("a")
    bench.scheduler.release("s a")
    bench.scheduler.withdraw("s a")
    bench.settle()


def test_what_it_holds_is_counted() -> None:
    bench = Bench(blocks=10, encoder_items=1)
    bench.add(asked("a", 1, 5), asked("b", 2, 5))
    bench.step(now=1.0)
    statistics = bench.scheduler.statistics()
    assert (statistics.sessions, statistics.leased_bytes, statistics.held_bytes) == (1, 8, 16)
    assert statistics.quota_bytes == 40
    ledgers = statistics.ledgers()
    assert ledgers["row_blocks"]["held"] == 4
    assert ledgers["scheduler"]["handed_over"] == ledgers["encoder_cache"]["misses"] == 1
    assert "blocks" not in ledgers["scheduler"]
    assert bench.scheduler.load().running_requests == 1


def test_spans_say_how_long_it_waited_and_was_encoded() -> None:
    bench = Bench(encoder_items=1)
    bench.add(asked("a", 1, 5, arrival=1.0), asked("twin", 1, 5, arrival=2.0), asked("b", 2, 5, arrival=1.0))
    bench.step(now=5.0)
    bench.step(now=6.0)
    assert bench.end("a", Encoded).spans == (Span("queue", 1.0, 5.0), Span("encode", 5.0, 5.25))
    assert bench.end("twin", Encoded).spans == (Span("queue", 2.0, 5.0), Span("encode", 5.0, 5.25))
    assert bench.end("b", Encoded).spans == (Span("queue", 1.0, 6.0), Span("encode", 6.0, 6.25))
    bench.add(asked("c", 2, 5, arrival=7.0, cached=True))
    bench.step(now=8.0)
    assert bench.end("c", Encoded).spans == (Span("queue", 7.0, 8.0),)
    assert bench.scheduler.statistics().encode_seconds == 0.75


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((33,), r"media item 0: with it .* 36 bytes, more than all .* 32; .* --encoder-quota 36$"),
        ((8, 24, 1, 4), r"media item 2: with it .* 36 bytes, more than all .* 32; .* --encoder-quota 40$"),
    ],
)
def test_a_group_that_could_never_fit_names_the_item_and_the_flag(rows: tuple[int, ...], words: str) -> None:
    bench = Bench(blocks=8)
    made = [asked(f"r{number}", number, count) for number, count in enumerate(rows)]
    for refuse in (bench.scheduler.check, bench.scheduler.add):
        with pytest.raises(InvalidRequest, match=words):
            refuse(made)
    bench.settle()


def test_a_group_that_fills_the_memory_fits() -> None:
    bench = Bench(blocks=8)
    bench.add(asked("a", 1, 24), asked("b", 2, 8))
    bench.run()
    bench.take("a", "b")
    bench.settle()


def test_an_item_larger_than_the_cache_names_the_flag() -> None:
    bench = Bench(encoder_cache_bytes=20)
    with pytest.raises(InvalidRequest, match=r"media item 1: .* 21 bytes, .* 20; .* --encoder-cache-bytes 21"):
        bench.scheduler.check([asked("a", 1, 5), asked("b", 2, 21)])


def test_two_items_of_one_key_and_different_rows_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"media item 2 has 6 rows .* an earlier .* has 5 of"):
        Bench().scheduler.check([asked("a", 1, 5), asked("b", 2, 5), asked("c", 1, 6)])


def test_the_queue_is_bounded_in_items() -> None:
    bench = Bench(blocks=1, max_waiting_requests=3)
    bench.add(asked("a", 1, 4))
    bench.run()
    bench.add(asked("b", 2, 1))
    bench.scheduler.check_queue(0, 2)
    bench.scheduler.check_queue(1, 1)
    with pytest.raises(Overloaded, match=r"2 media items are waiting, and 2 more .* 3 \(--max-waiting-requests\)"):
        bench.scheduler.check_queue(1, 2)
    with pytest.raises(InvalidRequest, match=r"4 media items, and 3 may wait; .* --max-waiting-requests 4"):
        bench.scheduler.check_queue(0, 4)
    with pytest.raises(InvalidRequest, match="4 media items"):
        bench.scheduler.check([asked(f"r{n}", n, 1) for n in range(4)])


def test_names_in_use_are_refused_whole() -> None:
    bench = Bench()
    bench.add(asked("a", 1, 5))
    with pytest.raises(DuplicateRequest, match="'a' is live"):
        bench.scheduler.add([asked("b", 2, 5), asked("a", 3, 5)])
    with pytest.raises(DuplicateRequest, match="one id"):
        bench.scheduler.add([asked("b", 2, 5), asked("b", 3, 5)])
    bench.run()
    with pytest.raises(Internal, match="'s a' is in use"):
        bench.scheduler.add([asked("b", 2, 5), asked("a", 3, 5)])
    bench.add(asked("b", 2, 5))
    bench.run()
    bench.settle()


# -- what goes wrong --------------------------------------------------------------------------------


def test_a_bad_picture_fails_those_that_need_it_in_its_step_and_nobody_else() -> None:
    bench = Bench()
    bench.runner.bad_pictures = {content_key(1)}
    bench.add(asked("a", 1, 5), asked("good", 2, 5), asked("twin", 1, 5))
    bench.run()
    assert str(bench.error("a")) == str(bench.error("twin")) == "a bad picture"
    bench.end("good", Encoded)
    assert bench.scheduler.statistics().encoder_cache.failures == 1
    bench.runner.bad_pictures = set()
    bench.add(asked("again", 1, 5))
    bench.run()
    bench.end("again", Encoded)
    bench.settle()


def test_a_store_that_fails_fails_its_item_and_the_rows_stay_cached() -> None:
    bench = Bench()
    bench.runner.bad_stores = {"a"}
    bench.add(asked("a", 1, 5), asked("twin", 1, 5))
    bench.run()
    assert "on purpose" in str(bench.error("a"))
    bench.end("twin", Encoded)
    bench.add(asked("again", 1, 5, cached=True))
    bench.run()
    bench.end("again", Encoded)
    bench.settle()


def test_a_runner_that_forgets_an_item_fails_it() -> None:
    bench = Bench()
    bench.add(asked("a", 1, 5))
    plan = bench.scheduler.plan(0.0)
    (key,) = (each.request.layout.content_key for each in plan.items)
    bench.hear(bench.scheduler.apply(EncodeResult((key,)), 0.0))
    assert "no handle" in str(bench.error("a"))
    bench.add(asked("b", 2, 5))
    bench.scheduler.plan(0.0)
    bench.hear(bench.scheduler.apply(EncodeResult(), 0.0))
    assert "no handle" in str(bench.error("b"))
    bench.runner.rows[key] = 5
    bench.settle()


def test_one_key_with_two_numbers_of_rows_fails_the_later_and_ends_nothing() -> None:
    bench = Bench()
    bench.add(asked("a", 1, 5), asked("x", 7, 5))
    bench.add(asked("b", 1, 6), asked("y", 8, 5))
    bench.run()
    assert isinstance(bench.error("b"), InvalidRequest)
    assert str(bench.error("b")).startswith("has 6 rows of the grid (1, 2, 12), and another request holds ")
    for name in "axy":
        bench.end(name, Encoded)
    # what nobody holds gives way
    bench.add(asked("c", 1, 6))
    assert bench.step() == ["c"]
    bench.add(asked("d", 1, 5, cached=True))
    bench.step()
    bench.end("d", RowsGone)
    bench.settle()


def test_misuse_is_a_bug() -> None:
    bench = Bench()
    with pytest.raises(IntegrityError, match="no step is in flight"):
        bench.scheduler.apply(EncodeResult(), 0.0)
    with pytest.raises(IntegrityError, match="begins none"):
        bench.scheduler.loaded(1, None, 0.0)
    bench.scheduler.plan(0.0)
    with pytest.raises(IntegrityError, match="in flight"):
        bench.scheduler.plan(0.0)


def test_items_that_wait_for_memory_that_nobody_holds_are_named() -> None:
    bench = Bench(blocks=2)
    bench.add(asked("a", 1, 8))
    bench.scheduler._roster.pool.allocate(1)  # lost
    with pytest.raises(IntegrityError, match=r"nothing can be scheduled: 0 items admitted, 1 waiting \(first 'a'\)"):
        bench.scheduler.plan(0.0)


# -- aborts -----------------------------------------------------------------------------------------


def cancelled(bench: Bench, name: str) -> None:
    end = bench.end(name, Finished)
    assert end.reason is FinishReason.CANCELLED
    assert end.usage is None


def test_an_abort_while_it_waits_lets_the_others_of_its_group_go_on() -> None:
    bench = Bench(blocks=4)
    bench.add(asked("a", 1, 12))
    bench.run()
    bench.add(asked("b", 2, 8), asked("c", 3, 4))
    bench.run()
    bench.abort("b")
    cancelled(bench, "b")
    bench.run()
    bench.end("c", Encoded)  # one block is all that it needs
    bench.abort("nobody")
    bench.settle()


def test_a_group_of_which_all_were_aborted_is_forgotten() -> None:
    bench = Bench(blocks=1)
    bench.add(asked("a", 1, 4))
    bench.run()
    bench.add(asked("b", 2, 1))
    bench.add(asked("c", 3, 1))
    bench.abort("b")
    bench.take("a")
    bench.run()
    bench.end("c", Encoded)
    bench.settle()


def test_an_abort_of_an_admitted_item_frees_its_blocks() -> None:
    bench = Bench(encoder_items=1)
    bench.add(asked("a", 1, 5), asked("b", 2, 5))
    bench.step()
    bench.abort("b")
    cancelled(bench, "b")
    assert bench.scheduler.statistics().held_bytes == 8
    bench.settle()


def test_an_abort_in_flight_is_heard_with_the_step_and_withdraws_the_rows() -> None:
    bench = Bench()
    bench.add(asked("a", 1, 5), asked("twin", 1, 5))
    plan = bench.scheduler.plan(0.0)
    result = bench.runner.run(plan)
    assert bench.scheduler.abort("a", 0.0) == ()
    bench.hear(bench.scheduler.apply(result, 0.0))
    cancelled(bench, "a")
    bench.end("twin", Encoded)
    assert bench.scheduler.busy
    bench.run()
    assert bench.runner.freed == ["s a"]
    bench.tell()
    bench.settle()


def test_an_abort_in_flight_of_what_fails_is_a_failure() -> None:
    bench = Bench()
    bench.runner.bad_pictures = {content_key(1)}
    bench.add(asked("a", 1, 5))
    plan = bench.scheduler.plan(0.0)
    bench.scheduler.abort("a", 0.0)
    bench.hear(bench.scheduler.apply(bench.runner.run(plan), 0.0))
    bench.error("a")
    bench.settle()


def test_an_abort_comes_behind_what_the_last_plan_decided() -> None:
    bench = Bench(encoder_items=1)
    bench.add(asked("a", 1, 5), asked("b", 2, 5))
    bench.add(asked("gone", 3, 5, cached=True), asked("too", 4, 5))
    plan = bench.scheduler.plan(0.0)
    bench.abort("b")
    assert bench.order == ["gone", "too", "b"]
    bench.hear(bench.scheduler.apply(bench.runner.run(plan), 0.0))
    bench.settle()
