"""How answers end, by themselves or by an abort."""

from __future__ import annotations

import dataclasses

import pytest

from tests.requests import EOS, request
from tests.unit.scheduler_bench import ROOMY, Bench, pictures, text
from tests.unit.simulation import ROW_BYTES
from triptych.core.events import EosToken, FinishReason, Span, StopToken, Tokens
from triptych.core.request import Stopping
from triptych.core.step import StepResult
from triptych.engine.scheduler import Scheduler


def answer(
    sampled: list[int], *, stopping: Stopping, max_context: int = 256, grammar: object = None
) -> tuple[list[int], object]:
    """The visible tokens and the end of a request for which the model says ``sampled``."""
    scheduler = Scheduler(dataclasses.replace(ROOMY, max_context=max_context), ROW_BYTES)
    scheduler.add([request("r", [10, 11, 12], stopping=stopping, grammar=grammar)])
    shown: list[int] = []
    for token in sampled:
        plan = scheduler.plan(0.0)
        assert [piece.request_id for piece in plan.tokens] == ["r"]
        for event in scheduler.apply(StepResult({"r": token}), 0.0):
            if isinstance(event, Tokens):
                shown.extend(event.token_ids)
            else:
                return shown, event
    return shown, None


def test_an_eos_ends_the_answer_is_not_shown_and_counts() -> None:
    shown, end = answer([5, EOS], stopping=Stopping(max_tokens=8))
    assert (shown, end.reason, end.stop) == ([5], FinishReason.STOP, EosToken(EOS))
    assert end.usage.completion_tokens == 2


def test_a_stop_id_is_shown_only_when_asked_for() -> None:
    shown, end = answer([5, 7], stopping=Stopping(max_tokens=8, stop_token_ids=(7,)))
    assert (shown, end.stop) == ([5], StopToken(7))
    shown, end = answer([5, 7], stopping=Stopping(max_tokens=8, stop_token_ids=(7,), include_stop_in_output=True))
    assert (shown, end.stop) == ([5, 7], StopToken(7))


def test_an_eos_is_never_shown_even_when_stops_are() -> None:
    shown, _ = answer([5, EOS], stopping=Stopping(max_tokens=8, include_stop_in_output=True))
    assert shown == [5]


def test_ignore_eos_goes_on_and_shows_it() -> None:
    shown, end = answer([EOS, 5], stopping=Stopping(max_tokens=2, ignore_eos=True))
    assert (shown, end.reason, end.stop) == ([EOS, 5], FinishReason.LENGTH, None)


def test_nothing_stops_before_min_tokens() -> None:
    shown, end = answer([EOS, 7, EOS], stopping=Stopping(max_tokens=8, min_tokens=2, stop_token_ids=(7,)))
    assert (shown, end.stop) == ([EOS, 7], EosToken(EOS))


def test_a_grammar_ends_with_an_eos_whatever_else_was_asked_for() -> None:
    for stopping in (Stopping(max_tokens=8, ignore_eos=True), Stopping(max_tokens=8, min_tokens=5)):
        shown, end = answer([5, EOS], stopping=stopping, grammar=object())
        assert (shown, end.stop, end.usage.completion_tokens) == ([5], EosToken(EOS), 2)


def test_a_grammar_changes_nothing_for_the_callers_own_stops() -> None:
    stopping = Stopping(max_tokens=8, min_tokens=2, ignore_eos=True, stop_token_ids=(7,))
    shown, end = answer([7, 5, 7], stopping=stopping, grammar=object())
    assert (shown, end.stop) == ([7, 5], StopToken(7))


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    _, end = answer([5, EOS], stopping=Stopping(max_tokens=2))
    assert end.reason is FinishReason.STOP


@pytest.mark.parametrize("limits", [{"max_context": 8}, {"num_blocks": 2}])
def test_an_answer_that_fills_context_or_pool_ends_by_length(limits: dict[str, int]) -> None:
    bench = Bench(**limits)
    bench.add(text("a", 3, 100))
    bench.run()
    assert bench.heard.finish("a").reason is FinishReason.LENGTH
    assert bench.heard.finish("a").usage.completion_tokens == 5


def test_the_stages_of_a_request_are_timed() -> None:
    bench = Bench(max_batched_tokens=7)
    made = dataclasses.replace(pictures("a", 6, tail=3, tokens=2), arrival=1.0)
    bench.add(made)
    for now in (2.0, 3.0, 4.0):
        bench.step(now)
    assert bench.heard.finish("a").spans == (
        Span("queue", 1.0, 2.0),
        Span("encode", 2.0, 2.25),
        Span("prefill", 2.0, 3.0),
        Span("decode", 3.0, 4.0),
    )


def test_abort_while_waiting() -> None:
    bench = Bench()
    bench.add(text("a", 4))
    bench.heard.take(bench.scheduler.abort("a", 1.0))
    assert bench.heard.finish("a").reason is FinishReason.CANCELLED
    assert not bench.scheduler.busy


def test_abort_while_running_frees_everything_and_tells_the_runner() -> None:
    bench = Bench(max_batched_tokens=4)
    bench.add(pictures("a", 6))
    bench.step()
    bench.heard.take(bench.scheduler.abort("a", 1.0))
    statistics = bench.scheduler.statistics()
    assert statistics.blocks.held == statistics.encoder_cache.held_bytes == 0
    assert bench.step().ends == ("a",)
    assert not bench.scheduler.busy


def test_abort_in_the_middle_of_a_step_is_done_when_the_step_is() -> None:
    bench = Bench()
    bench.add(text("a", 4), text("b", 4, first=11))
    result = bench.runner.run(bench.scheduler.plan(0.0))
    assert bench.scheduler.abort("a", 0.0) == ()
    assert bench.scheduler.statistics().blocks.held == 2
    bench.heard.take(bench.scheduler.apply(result, 0.0))
    assert bench.heard.finish("a").reason is FinishReason.CANCELLED
    assert bench.scheduler.statistics().blocks.held == 1
    bench.run()
    assert len(bench.heard.tokens["b"]) == 8


def test_an_abort_of_nobody_is_no_error() -> None:
    assert Bench().scheduler.abort("nobody", 0.0) == ()


def test_an_id_can_be_used_again_at_once() -> None:
    bench = Bench()
    bench.add(text("a", 4))
    bench.step()
    bench.scheduler.abort("a", 0.0)
    bench.add(text("a", 4, 2))
    plan = bench.step()
    assert (plan.ends, len(plan.starts)) == (("a",), 1)
