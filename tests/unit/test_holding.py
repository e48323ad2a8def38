"""Encoded bytes that somebody has: counted as they come, refused where there are too many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.config import MediaLimits
from triptych.core.errors import MediaError, Overloaded
from triptych.core.media import Stage
from triptych.media.holding import HeldBytes

LIMITS = MediaLimits(max_item_bytes=100, max_request_bytes=100, max_waiting_bytes=150)


@pytest.mark.parametrize("how", ["keep", "arrive"])
def test_a_request_counts_its_bytes(how: str) -> None:
    held = HeldBytes(LIMITS)
    with held.holding() as holding:
        count = getattr(holding, how)
        count(0, 60)
        count(1, 40)
        message = r"media item 2: limit: .* 101 bytes .* at most 100 \(--max-request-bytes\)"
        with pytest.raises(MediaError, match=message) as refused:
            count(2, 1)
        assert refused.value.stage is Stage.LIMIT
        assert held.bytes == 100
    assert held.bytes == 0


def test_what_arrives_is_refused_where_others_hold_too_much() -> None:
    held = HeldBytes(LIMITS)
    with held.holding() as first, held.holding() as second:
        first.arrive(0, 100)
        second.arrive(0, 50)
        assert not held.crowded
        with pytest.raises(Overloaded, match=r"media item 1: fetch: 150 bytes .* at most 150 \(--max-waiting-bytes\)"):
            second.arrive(1, 1)
        first.arrive(0, -100)  # thrown away: its fetch is tried again
        second.arrive(1, 1)
        second.keep(2, 49)  # this came with the request, and was counted in line
        first.keep(0, 100)
        assert (held.bytes, held.crowded) == (200, True)
    assert held.bytes == 0


def test_who_is_alone_is_never_refused_for_others() -> None:
    held = HeldBytes(MediaLimits(max_item_bytes=100, max_request_bytes=100, max_waiting_bytes=10))
    with held.holding() as holding:
        holding.arrive(0, 50)
        holding.arrive(0, 50)
        assert held.crowded


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 80)), max_size=60))
def test_no_order_of_arrivals_holds_more_than_is_allowed(pieces: list[tuple[int, bool, int]]) -> None:
    held = HeldBytes(LIMITS)
    shares = [0] * 4
    holdings = [(context := held.holding(), context.__enter__()) for _ in shares]
    for who, ends, size in pieces:
        context, holding = holdings[who]
        if ends:
            context.__exit__(None, None, None)
            holdings[who] = (context := held.holding(), context.__enter__())
            shares[who] = 0
            continue
        others = sum(shares) - shares[who]
        try:
            holding.arrive(0, size)
        except MediaError:
            assert shares[who] + size > LIMITS.max_request_bytes
        except Overloaded:
            assert others
            assert sum(shares) + size > LIMITS.max_waiting_bytes
        else:
            shares[who] += size
        assert held.bytes == sum(shares) <= LIMITS.max_waiting_bytes
    for context, _ in holdings:
        context.__exit__(None, None, None)
    assert held.bytes == 0
