"""Layouts of single items through the bytes in which they travel."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.references import layouts, steps, timed
from tests.sessions import picture, video
from triptych.core.errors import IntegrityError, InvalidRequest
from triptych.core.layout import Grid, ItemLayout, Run
from triptych.core.media import Modality
from triptych.wire.portable_item import (
    MAX_ITEM_FRAMING,
    MAX_ITEM_RUNS,
    MAX_ITEM_TIMES,
    PortableItem,
    decode_item,
    encode_item,
)
from triptych.wire.portable_plan import MAX_PLAN_TOKENS

PRINT = bytes(range(1, 33))
PICTURE = PortableItem(picture(0, 2, 3), PRINT)

items = st.builds(PortableItem, layouts(), st.binary(min_size=32, max_size=32))


@given(items)
def test_an_item_comes_back_equal(item: PortableItem) -> None:
    read = decode_item(encode_item(item))
    assert read == item
    assert all(type(number) is int for number in (*read.layout.grid, read.layout.rows, *read.layout.runs[-1]))


@given(st.data(), st.integers(1, 1000))
def test_wherever_an_item_stands_it_travels_from_0(data: st.DataObject, start: int) -> None:
    placed = data.draw(layouts(start))
    read = decode_item(encode_item(PortableItem(placed, PRINT))).layout
    assert [(run.start + start, run.length) for run in read.runs] == list(placed.runs)
    assert [position + start for position in read.framing] == list(placed.framing)
    assert (read.rows, read.grid, read.content_key) == (placed.rows, placed.grid, placed.content_key)


def test_a_picture_is_small() -> None:
    assert len(encode_item(PICTURE)) < 100


HEAD = struct.Struct("<BBB3IIII32s32s")
FIELDS = ("version", "modality", "timed", "t", "h", "w", "encoder_tokens", "runs", "framing", "key", "fingerprint")


def forged(item: PortableItem = PICTURE, body: bytes | None = None, **changes: int) -> bytes:
    """An item with other numbers."""
    data = encode_item(item)
    head = dict(zip(FIELDS, HEAD.unpack_from(data), strict=True)) | changes
    return HEAD.pack(*head.values()) + (data[HEAD.size :] if body is None else body)


def numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def seconds(*times: float) -> bytes:
    return struct.pack(f"<{len(times)}d", *times)


CLIP = PortableItem(video(0, 3, 1, 2), PRINT)
TIMED = PortableItem(timed(), PRINT)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (forged(version=0), "its version is 0; 2 is known here"),
        (forged(version=1), "its version is 1; 2 is known here"),
        (b"\x01", "its version is 1"),
        (b"\x02", "it is cut short"),
        (forged(modality=0), "its modality is number 0"),
        (forged(modality=255), "its modality is number 255"),
        (forged(t=0), r"its t must be in \[1, 2\^31\), not 0"),
        (forged(h=2**31), r"its h must be in \[1, 2\^31\), not 2147483648"),
        (forged(w=0), "its w must be"),
        (forged(encoder_tokens=0), "its encoder_tokens must be"),
        (forged(runs=0), "it has 0 runs; it must have between 1 and 4096"),
        (forged(runs=2**32 - 1), "it has 4294967295 runs"),
        (forged(runs=2), r"it has \d+ bytes, and its counts say \d+"),
        (forged(framing=2**32 - 1), "it has 4294967295 framing positions; at most 4096"),
        (forged(framing=1), "its counts say"),
        (forged(CLIP, runs=2, framing=2), r"its framing positions must ascend"),
        (forged(body=numbers(1, 6)), "its runs begin at 1, not at 0"),
        (forged(body=numbers(0, 0)), "its run 0 is empty"),
        (forged(CLIP, body=numbers(0, 2, 3, 0, 3, 2)), "its run 1 is empty"),
        (forged(body=numbers(0, MAX_PLAN_TOKENS + 1)), "it reaches over 1048577 positions; at most 1048576"),
        (forged(CLIP, body=numbers(0, 2, 2**32 - 1, 2, 3, 2)), "it reaches over 4294967304 positions"),
        (forged(body=numbers(0, 2, 2), framing=1), "its framing positions must"),
        (forged(body=numbers(0, 9, 2, 2), framing=2), "its framing positions must ascend"),
        (forged(body=numbers(0, 9, 3, 2), framing=2), "its framing positions must ascend"),
        (forged(CLIP, body=numbers(0, 2, 3, 2, 3, 2, 3), framing=1), "lie inside its runs"),
        (forged(body=numbers(0, 2, 0, 1), framing=2), "leave it a row"),
        (forged(timed=1), r"it has \d+ bytes, and its counts say \d+"),
        (forged(TIMED, timed=0), r"it has \d+ bytes, and its counts say \d+"),
        (forged(TIMED, timed=2), "whether it has times is said by 2, which is neither 0 nor 1"),
        (forged(TIMED, t=2**31 - 1), "it has 2147483647 times; at most 4096"),
        (forged(TIMED, t=4), r"it has \d+ bytes, and its counts say \d+"),
        (forged(TIMED, body=numbers(0, 6) + seconds(0.5, -1.0, 2.0)), "its times must be from 0 to 10000000 seconds"),
        (forged(TIMED, body=numbers(0, 6) + seconds(0.5, 1.0, 1e300)), "its times must be from 0 to 10000000 seconds"),
        (forged(TIMED, body=numbers(0, 6) + seconds(0.5, 1.0, math.nan)), "its times must be from 0 to"),
        (forged(TIMED, body=numbers(0, 6) + seconds(0.5, 1.0, math.inf)), "its times must be from 0 to"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        decode_item(data)
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("item", [PICTURE, CLIP, TIMED])
def test_cut_short_or_longer_at_any_length(item: PortableItem) -> None:
    data = encode_item(item)
    for size in range(len(data)):
        with pytest.raises(InvalidRequest):
            decode_item(data[:size])
    with pytest.raises(InvalidRequest, match="its counts say"):
        decode_item(data + b"\x00")


def test_what_is_read_is_written_and_no_more() -> None:
    largest = steps(MAX_ITEM_RUNS, tuple(3 * step for step in range(MAX_ITEM_FRAMING)))
    assert decode_item(encode_item(PortableItem(largest, PRINT))).layout == largest
    longest = timed(tuple(step / 3 for step in range(MAX_ITEM_TIMES)))
    assert decode_item(encode_item(PortableItem(longest, PRINT))).layout == longest
    for layout, why in (
        (timed((0.0,) * (MAX_ITEM_TIMES + 1)), "it has 4097 times"),
        (steps(MAX_ITEM_RUNS + 1), "it has 4097 runs"),
        (picture(0, 1024, 1025), "it reaches over 1049600 positions"),
        (_framed(MAX_ITEM_FRAMING + 1), "4097 framing positions"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            encode_item(PortableItem(layout, PRINT))


def _framed(count: int) -> ItemLayout:
    framing = tuple(range(count))
    return ItemLayout(Modality.IMAGE, (Run(0, count + 1),), 1, 4, Grid(1, 2, 2), bytes(32), framing)


def test_a_fingerprint_of_another_size_is_a_bug() -> None:
    with pytest.raises(IntegrityError, match="has 31 bytes"):
        encode_item(PortableItem(PICTURE.layout, bytes(31)))


def outcome(data: bytes) -> Any:
    try:
        return decode_item(data)
    except InvalidRequest as error:
        return str(error)


@settings(max_examples=300)
@given(st.data())
def test_any_bytes_have_an_outcome(data: st.DataObject) -> None:
    changed = bytearray(encode_item(data.draw(st.sampled_from([CLIP, TIMED]))))
    for _ in range(data.draw(st.integers(1, 5))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    read = outcome(bytes(changed))
    if isinstance(read, PortableItem):
        assert encode_item(read) == bytes(changed)  # the same item has one way to be written
    else:
        assert len(read) < 120
