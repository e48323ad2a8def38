from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest
from triptych.core.request import Stopping
from triptych.text.stop import StopMatcher, StopStep

letters = st.text("ab<", min_size=1, max_size=5)
texts = st.lists(st.text("ab<", max_size=6), max_size=12)


class Expected(NamedTuple):
    visible: str
    stop: str | None
    delta: int | None
    """Which delta completed the stop string."""


def oracle(deltas: list[str], stops: list[str], include: bool, armed_from: int) -> Expected:
    """By its definition: the first end at which a stop string stands, the longest such."""
    text = "".join(deltas)
    ends = [sum(map(len, deltas[: n + 1])) for n in range(len(deltas))]
    for end in range(1, len(text) + 1):
        delta = next(n for n, bound in enumerate(ends) if end <= bound)
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits and delta >= armed_from:
            stop = max(hits, key=len)
            return Expected(text[:end] if include else text[: end - len(stop)], stop, delta)
    return Expected(text, None, None)


def held(text: str, stops: list[str]) -> int:
    """The longest end of the text that a stop string begins with and goes beyond."""
    return max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


@given(deltas=texts, stops=st.lists(letters, max_size=4), include=st.booleans(), armed_from=st.integers(0, 4))
def test_streaming_equals_the_definition(deltas: list[str], stops: list[str], include: bool, armed_from: int) -> None:
    expected = oracle(deltas, stops, include, armed_from)
    matcher = StopMatcher(stops, include_stop=include)
    shown = ""
    for index, delta in enumerate(deltas):
        step = matcher.feed(delta, armed=index >= armed_from)
        shown += step.text
        if step.stop:
            assert (shown, step.stop, index) == expected
            return
        so_far = "".join(deltas[: index + 1])
        assert shown == so_far[: len(so_far) - held(so_far, stops)]
    assert (shown + matcher.finish().text, None, None) == expected


@given(
    text=st.text("ab<", max_size=12),
    tail=st.text("ab<", max_size=4),
    stops=st.lists(letters, max_size=4),
    armed=st.booleans(),
)
def test_the_tail_counts_as_text(text: str, tail: str, stops: list[str], armed: bool) -> None:
    matcher = StopMatcher(stops)
    step = matcher.feed(text, armed=False)
    end = matcher.finish(tail, armed=armed)
    expected = oracle([text, tail], stops, False, 1 if armed else 2)
    assert end.stop == expected.stop
    # a stop string that the tail completed may have begun in what was shown, when it did not count yet
    assert (step.text + end.text).startswith(expected.visible)
    assert len(step.text + end.text) == max(len(expected.visible), len(step.text))


def test_no_beginning_of_a_stop_string_is_shown() -> None:
    matcher = StopMatcher(["\n\nUser:", "</answer>"])
    assert matcher.feed("red</an") == StopStep("red")
    assert matcher.feed("ger\n") == StopStep("</anger")
    assert matcher.feed("\nUser") == StopStep("")
    assert matcher.feed(": more") == StopStep("", "\n\nUser:")


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopMatcher([]).feed("ab") == StopStep("ab")


def test_long_repetitive_stop_strings() -> None:
    stop = "a" * 20_000 + "b"
    matcher = StopMatcher([stop])
    assert matcher.feed("a" * 100_000).text == "a" * 80_000
    assert matcher.feed("b").stop == stop


def test_a_request_bounds_its_stop_strings() -> None:
    Stopping(stop_strings=("x" * 4095, "y"))
    with pytest.raises(InvalidRequest, match="4097 characters; at most 4096"):
        Stopping(stop_strings=("x" * 4096, "y"))
