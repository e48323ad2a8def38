"""Request metadata: what is well-formed, what is taken from it, what is refused."""

from __future__ import annotations

import pytest

from triptych.core.errors import InvalidRequest
from triptych.rpc.metadata import check_trace, read_metadata

PARENT = f"00-{'1' * 32}-{'2' * 16}-01"


@pytest.mark.parametrize(
    ("value", "priority"),
    [("0", 0), ("5", 5), ("-1", -1), ("-0", 0), ("007", 7), ("2147483647", 2**31 - 1), ("-2147483648", -(2**31))],
)
def test_priority_is_a_signed_32_bit_number(value: str, priority: int) -> None:
    assert read_metadata([("openengine-priority", value)]).priority == priority


def test_nothing_said_is_no_priority() -> None:
    assert read_metadata([("user-agent", "x")]).priority == 0


@pytest.mark.parametrize(
    "pairs",
    [
        [("openengine-routing-key", "any thing"), ("openengine-target-dp-rank", "0"), ("openengine-priority", "1")],
        [("openengine-target-dp-rank", "000")],
        [("openengine-new-key", "a")],
        [("openengine-new-bin", b"\x00")],
        [("x-repeated", "1"), ("x-repeated", "2")],
        [("traceparent", PARENT), ("tracestate", "a=1")],
        [("traceparent", PARENT.replace("00-", "01-", 1) + "-more")],
        [("tracestate", "")],
        [("tracestate", " , a=1 ,\t, b@c/d_-*=  x y ")],
        [("tracestate", f"0{'k' * 255}={'v' * 256}")],
        [("tracestate", ",".join(f"k{number}=v" for number in range(32)))],
    ],
)
def test_what_is_accepted(pairs: list[tuple[str, str | bytes]]) -> None:
    assert read_metadata(pairs).priority in (0, 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("openengine-routing-key", ""),
        ("openengine-target-dp-rank", ""),
        ("openengine-target-dp-rank", "x"),
        ("openengine-target-dp-rank", "-0"),
        ("openengine-target-dp-rank", "1"),
        ("openengine-target-dp-rank", "4294967296"),
        ("openengine-target-dp-rank", "٣"),
        ("openengine-priority", ""),
        ("openengine-priority", "high"),
        ("openengine-priority", "+1"),
        ("openengine-priority", "1.0"),
        ("openengine-priority", " 1"),
        ("openengine-priority", "2147483648"),
        ("openengine-priority", "-2147483649"),
        ("openengine-priority", "9" * 5000),
        ("traceparent", ""),
        ("traceparent", "00-zz-11-01"),
        ("traceparent", PARENT.upper().replace("1", "A")),
        ("traceparent", f"00-{'0' * 32}-{'1' * 16}-01"),
        ("traceparent", f"00-{'1' * 32}-{'0' * 16}-01"),
        ("traceparent", f"ff-{'1' * 32}-{'1' * 16}-01"),
        ("traceparent", f"{PARENT}-more"),
        ("tracestate", "a"),
        ("tracestate", "=1"),
        ("tracestate", "a="),
        ("tracestate", "a =1"),
        ("tracestate", "A=1"),
        ("tracestate", "a=1=2"),
        ("tracestate", "a=é"),
        ("tracestate", "a=1,b=2,a=3"),
        ("tracestate", f"{'k' * 257}=v"),
        ("tracestate", f"k={'v' * 257}"),
        ("tracestate", ",".join(f"k{number}=v" for number in range(33))),
    ],
)
def test_what_is_malformed_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=key) as caught:
        read_metadata([(key, value)])
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "key",
    [
        "openengine-routing-key",
        "openengine-target-dp-rank",
        "openengine-priority",
        "openengine-new-key",
        "traceparent",
        "tracestate",
    ],
)
def test_a_key_of_the_contract_comes_once(key: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{key} is given 2 times"):
        read_metadata([(key, "0"), (key, "0")])


def test_other_calls_know_the_trace_only() -> None:
    check_trace([("openengine-priority", "high"), ("openengine-priority", "low")])
    with pytest.raises(InvalidRequest, match="traceparent"):
        check_trace([("traceparent", "x")])
    with pytest.raises(InvalidRequest, match="tracestate"):
        check_trace([("tracestate", "x")])
