"""Plans through their text and back; every field of a forged one."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sessions import MERGE, PLACEHOLDER, picture, plain, plan, video
from triptych.core.errors import IntegrityError, InvalidRequest
from triptych.core.layout import Grid, ItemLayout, Run
from triptych.core.media import Modality
from triptych.core.plan import PositionRule, PromptPlan
from triptych.processors.positions import positions_of
from triptych.wire import portable_plan
from triptych.wire.portable_plan import (
    MAX_FRAMING,
    MAX_ITEMS,
    MAX_PLAN_CHARACTERS,
    MAX_PLAN_TOKENS,
    MAX_RUNS,
    decode_plan,
    encode_plan,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def sent(value: PromptPlan) -> str:
    text = encode_plan(value)
    assert text is not None
    return text


def back(value: PromptPlan) -> PromptPlan:
    read = decode_plan(sent(value))
    assert read is not None
    return read


@st.composite
def mrope_plans(draw: st.DrawFn) -> PromptPlan:
    items, at = [], 0
    for _ in range(draw(st.integers(0, 4))):
        at += draw(st.integers(0, 5))
        h, w = draw(st.integers(1, 5)), draw(st.integers(1, 5))
        if draw(st.booleans()):
            items.append(picture(at, h, w, key=draw(st.integers(0, 2**256 - 1))))
        else:
            items.append(video(at, draw(st.integers(1, 4)), h, w, gap=draw(st.integers(1, 3))))
        at = items[-1].end
    return plan(max(1, at + draw(st.integers(0, 5))), *items, fill=draw(st.integers(0, 2**31 - 1000)))


@st.composite
def linear_plans(draw: st.DrawFn) -> PromptPlan:
    """Plans with framing, whose rows follow from no grid."""
    items, at = [], 0
    for _ in range(draw(st.integers(0, 4))):
        runs = []
        for _ in range(draw(st.integers(1, 3))):
            runs.append(Run(at + draw(st.integers(0, 3)), draw(st.integers(1, 6))))
            at = runs[-1].end
        positions = [position for run in runs for position in range(run.start, run.end)]
        framing = sorted(draw(st.sets(st.sampled_from(positions), max_size=len(positions) - 1)))
        items.append(
            ItemLayout(
                modality=draw(st.sampled_from(Modality)),
                runs=tuple(runs),
                rows=len(positions) - len(framing),
                encoder_tokens=draw(st.integers(1, 2**31 - 1)),
                grid=Grid(*(draw(st.integers(1, 2**31 - 1)) for _ in range(3))),
                content_key=draw(st.binary(min_size=32, max_size=32)),
                framing=tuple(framing),
            )
        )
    length = max(1, at + draw(st.integers(0, 5)))
    ids = np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), np.int32)
    fingerprint = draw(st.binary(min_size=32, max_size=32))
    return PromptPlan(ids, tuple(items), PositionRule.LINEAR, draw(st.integers(1, 256)), fingerprint)


@given(mrope_plans() | linear_plans())
def test_a_plan_comes_back_equal(value: PromptPlan) -> None:
    read = back(value)
    assert plain(read) == plain(value)
    assert not read.token_ids.flags.writeable
    assert all(type(number) is int for item in read.items for number in (*item.grid, item.rows, item.encoder_tokens))


@given(mrope_plans())
def test_positions_follow_from_what_was_sent(value: PromptPlan) -> None:
    ours, theirs = positions_of(value), positions_of(back(value))
    assert (ours.table == theirs.table).all()
    assert ours.delta == theirs.delta


def test_positions_and_rows_are_not_sent() -> None:
    ids, noise = plan(4096), random.Random(1)
    with_pictures = plan(4096, *(picture(10 + 1000 * n, 28, 28, key=noise.getrandbits(255)) for n in range(4)))
    assert len(sent(with_pictures)) < len(sent(ids)) + 4 * 100


def test_the_text_is_as_long_as_it_may_be_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    value = plan(100, picture(10, 3, 4))
    text = sent(value)
    monkeypatch.setattr(portable_plan, "MAX_PLAN_CHARACTERS", len(text))
    assert encode_plan(value) == text
    assert decode_plan(text) is not None
    monkeypatch.setattr(portable_plan, "MAX_PLAN_CHARACTERS", len(text) - 1)
    assert encode_plan(value) is None
    with pytest.raises(InvalidRequest, match="characters; at most"):
        decode_plan(text)


def test_two_mebibytes() -> None:
    ids = np.random.default_rng(0).integers(0, 2**31 - 1, 420_000).astype(np.int32)

    def of(length: int) -> PromptPlan:
        return PromptPlan(ids[:length], (), PositionRule.LINEAR, 1, bytes(32))

    assert MAX_PLAN_CHARACTERS == 2 * 1024 * 1024
    assert len(sent(of(390_000))) <= MAX_PLAN_CHARACTERS
    assert encode_plan(of(420_000)) is None


@pytest.mark.parametrize(
    "value",
    [
        plan(MAX_PLAN_TOKENS + 1),
        plan(MAX_ITEMS + 1, *(picture(at, 1, 1) for at in range(MAX_ITEMS + 1))),
        plan(2 * MAX_RUNS + 2, video(0, MAX_RUNS + 1, 1, 1, gap=1)),
    ],
)
def test_counts_beyond_the_limits_are_not_sent(value: PromptPlan) -> None:
    assert encode_plan(value) is None


def test_a_plan_without_a_digest_is_a_bug() -> None:
    with pytest.raises(IntegrityError, match="fingerprint has 3 bytes"):
        encode_plan(PromptPlan(np.ones(1, np.int32), (), PositionRule.LINEAR, 1, b"abc"))


# -- forged plans: the format, written a second time ------------------------------------------------

PLAN = plan(40, picture(3, 2, 3), video(12, 2, 1, 2, gap=2), picture(20, 1, 1))
FRAMED = PromptPlan(
    np.arange(30, dtype=np.int32),
    (
        ItemLayout(Modality.IMAGE, (Run(2, 4), Run(8, 4)), 5, 20, Grid(1, 2, 2), bytes(32), (5, 8, 11)),
        ItemLayout(Modality.AUDIO, (Run(20, 2),), 1, 9, Grid(1, 1, 9), bytes(32), (20,)),
    ),
    PositionRule.LINEAR,
    1,
    bytes(32),
)
RULES = {PositionRule.LINEAR: 1, PositionRule.MROPE: 2}
MODALITIES = {Modality.IMAGE: 1, Modality.VIDEO: 2, Modality.AUDIO: 3}


def parts_of(value: PromptPlan) -> dict[str, Any]:
    return {
        "version": 1,
        "rule": RULES[value.rule],
        "merge": value.spatial_merge,
        "fingerprint": value.fingerprint,
        "items": [
            [
                MODALITIES[i.modality],
                *i.grid,
                i.encoder_tokens,
                len(i.runs),
                len(i.framing),
                i.content_key,
            ]
            for i in value.items
        ],
        "starts": [run.start for i in value.items for run in i.runs],
        "lengths": [run.length for i in value.items for run in i.runs],
        "framing": [at for i in value.items for at in i.framing],
        "ids": value.token_ids.tolist(),
        "counts": {},
        "body": lambda body: body,
        "packed": lambda packed: packed,
        "text": lambda data: base64.b64encode(data).decode(),
    }


def written(parts: dict[str, Any]) -> str:
    body = b"".join(struct.pack("<BIIIIII32s", *item) for item in parts["items"])
    for name in ("starts", "lengths", "framing"):
        body += struct.pack(f"<{len(parts[name])}I", *parts[name])
    ids = struct.pack(f"<{len(parts['ids'])}I", *parts["ids"])
    body += b"".join(ids[plane::4] for plane in range(4))
    counts = {
        "tokens": len(parts["ids"]),
        "items": len(parts["items"]),
        "runs": len(parts["starts"]),
        "framing": len(parts["framing"]),
    } | parts["counts"]
    head = struct.pack(
        "<BBIIIIH32s", parts["version"], parts["rule"], *counts.values(), parts["merge"], parts["fingerprint"]
    )
    text: str = parts["text"](head + parts["packed"](zlib.compress(parts["body"](body))))
    return text


def forged(value: PromptPlan, **changes: Any) -> str:
    parts = parts_of(value)
    assert set(changes) <= set(parts)
    return written(parts | changes)


def changed(value: PromptPlan, name: str, index: int, new: Any, column: int | None = None) -> str:
    parts = parts_of(value)
    if column is None:
        parts[name][index] = new
    else:
        parts[name][index][column] = new
    return written(parts)


@pytest.mark.parametrize("value", [PLAN, FRAMED, plan(1)])
def test_the_format_is_the_one_that_is_described(value: PromptPlan) -> None:
    read = decode_plan(forged(value))
    assert plain(read) == plain(value)


@pytest.mark.parametrize("version", [0, 2, 3, 255])
def test_an_unknown_version_is_no_plan(version: int) -> None:
    assert decode_plan(forged(PLAN, version=version)) is None
    assert decode_plan(base64.b64encode(bytes([version])).decode()) is None


HEAD_CASES: list[tuple[dict[str, Any], str]] = [
    ({"rule": 0}, "position rule is number 0"),
    ({"rule": 3}, "position rule is number 3"),
    ({"merge": 0}, r"merge must be in \[1, 256\], not 0"),
    ({"merge": 257}, r"merge must be in \[1, 256\], not 257"),
    ({"merge": 3}, "media item 0: its runs do not hold the grid 1 x 4 x 6 merged by 3"),
    ({"merge": 1}, "media item 0: its runs do not hold"),
    ({"ids": [], "items": [], "starts": [], "lengths": []}, "no tokens"),
    ({"counts": {"tokens": 39}}, "is not of the .* bytes that its counts say"),
    ({"counts": {"tokens": 41}}, "is not of the .* bytes"),
    ({"counts": {"tokens": MAX_PLAN_TOKENS + 1}}, "1048577 tokens; at most 1048576"),
    ({"counts": {"tokens": 2**32 - 1}}, "4294967295 tokens"),
    ({"counts": {"items": 2}}, "is not of the .* bytes"),
    ({"counts": {"items": 2**32 - 1}}, "4294967295 items; at most 1024"),
    ({"counts": {"runs": 3}}, "is not of the .* bytes"),
    ({"counts": {"runs": 2**32 - 1}}, "4294967295 runs"),
    ({"counts": {"framing": 1}}, "is not of the .* bytes"),
    ({"counts": {"framing": MAX_FRAMING + 1}}, "65537 framing"),
    # the sizes agree, the counts do not: eight bytes fewer of ids are a run more
    ({"counts": {"runs": 5, "tokens": 38}}, "the items have 4 runs together, the plan 5"),
    ({"counts": {"framing": 1, "tokens": 39}}, "the items have 0 framing together, the plan 1"),
    ({"body": lambda body: body + b"\x00"}, "is not of the .* bytes"),
    ({"body": lambda body: body[:-1]}, "is not of the .* bytes"),
    ({"body": lambda _: bytes(50_000_000)}, "is not of the .* bytes"),
    ({"body": lambda _: b""}, "is not of the .* bytes"),
    ({"packed": lambda packed: packed + b"more"}, "4 bytes follow the plan"),
    ({"packed": lambda packed: packed[:-1]}, "is not of the .* bytes"),
    ({"packed": lambda packed: packed[:-1] + b"\x00"}, "cannot be unpacked"),
    ({"packed": lambda _: b""}, "is not of the .* bytes"),
    ({"packed": lambda _: b"nothing that was ever packed"}, "cannot be unpacked"),
    ({"text": lambda data: base64.b64encode(data).decode() + "AAAA"}, "not base64|bytes follow"),
    ({"text": lambda data: base64.b64encode(data).decode()[:-1]}, "not base64"),
    ({"text": lambda data: base64.b64encode(data).decode() + "="}, "not base64"),
    ({"text": lambda data: " " + base64.b64encode(data).decode()}, "not base64"),
    ({"text": lambda data: base64.b64encode(data).decode() + "\n"}, "not base64"),
    ({"text": lambda data: base64.urlsafe_b64encode(b"\x01\xff\xff" + data).decode()}, "not base64"),
    ({"text": lambda _: "é"}, "not base64"),
    ({"text": lambda _: ""}, "empty"),
    ({"text": lambda _: "AQ=="}, "cut short"),
    ({"text": lambda data: base64.b64encode(data[:51]).decode()}, "cut short"),
    ({"text": lambda _: "A" * (MAX_PLAN_CHARACTERS + 4)}, "2097156 characters; at most 2097152"),
]


@pytest.mark.parametrize(("changes", "why"), HEAD_CASES)
def test_a_forged_head_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        decode_plan(forged(PLAN, **changes))


ITEM_CASES: list[tuple[int, int, Any, str]] = [
    (0, 0, 0, "media item 0: modality is number 0"),
    (1, 0, 4, "media item 1: modality is number 4"),
    (2, 0, 255, "media item 2: modality is number 255"),
    (0, 1, 0, "media item 0: grid must be"),
    (2, 2, 2**31, "media item 2: grid must be"),
    (0, 3, 2**32 - 1, "media item 0: grid must be"),
    (0, 1, 2, "media item 0: its runs do not hold the grid 2 x 4 x 6 merged by 2"),
    (0, 2, 5, "media item 0: its runs do not hold the grid 1 x 5 x 6"),
    (0, 2, 2, "media item 0: its runs do not hold"),
    (0, 3, 7, "media item 0: its runs do not hold"),
    (1, 1, 3, "media item 1: its runs do not hold the grid 3 x 2 x 4"),
    (1, 4, 0, "media item 1: encoder tokens must be"),
    (1, 4, 2**31, "media item 1: encoder tokens must be"),
    (0, 5, 0, "media item 0: it has no runs"),
    (0, 5, 2, "the items have 5 runs together, the plan 4"),
    (0, 5, 2**32 - 1, "runs together, the plan 4"),
    (0, 6, 1, "the items have 1 framing together, the plan 0"),
]


@pytest.mark.parametrize(("index", "column", "new", "why"), ITEM_CASES)
def test_a_forged_item_is_refused(index: int, column: int, new: int, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        decode_plan(changed(PLAN, "items", index, new, column))


def test_runs_that_change_owner_no_longer_hold_their_grid() -> None:
    parts = parts_of(PLAN)
    parts["items"][0][5], parts["items"][1][5] = 2, 1
    with pytest.raises(InvalidRequest, match="media item 0: its runs do not hold"):
        decode_plan(written(parts))


NUMBER_CASES: list[tuple[str, int, int, str]] = [
    ("starts", 0, 2**32 - 1, r"media item 0: a run at 4294967295\.\."),
    ("starts", 1, 8, "media item 1: a run at 8..10 .* begins before"),
    ("starts", 1, 0, "media item 1: a run at 0..2"),
    ("starts", 2, 13, "media item 1: a run at 13..15 .* begins before"),
    ("starts", 3, 40, "media item 2: a run at 40..41 .* outside the prompt of 40 tokens"),
    ("lengths", 0, 0, "media item 0: a run at 3..3 is empty"),
    ("lengths", 0, 5, "media item 0: its runs do not hold"),
    ("lengths", 3, 21, "media item 2: a run at 20..41"),
    ("lengths", 3, 2**32 - 1, "media item 2: a run at 20..4294967315"),
    ("ids", 7, 2**31, "token id 2147483648 is beyond"),
    ("ids", 39, 2**32 - 1, "token id 4294967295 is beyond"),
]


@pytest.mark.parametrize(("name", "index", "new", "why"), NUMBER_CASES)
def test_a_forged_number_is_refused(name: str, index: int, new: int, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        decode_plan(changed(PLAN, name, index, new))


@pytest.mark.parametrize(
    ("framing", "why"),
    [
        ([5, 5, 11, 20], "media item 0: framing position 5 "),
        ([8, 5, 11, 20], "media item 0: framing position 5 "),
        ([1, 8, 11, 20], "media item 0: framing position 1 "),
        ([5, 7, 11, 20], "media item 0: framing position 7 "),
        ([5, 8, 12, 20], "media item 0: framing position 12 "),
        ([5, 8, 20, 21], "media item 0: framing position 20 "),
        ([5, 8, 9, 10], "media item 1: framing position 10 "),
        ([5, 8, 11, 22], "media item 1: framing position 22 "),
        ([5, 8, 11, 2**32 - 1], "media item 1: framing position 4294967295 "),
    ],
)
def test_forged_framing_is_refused(framing: list[int], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        decode_plan(forged(FRAMED, framing=framing))


def test_an_item_of_framing_alone_is_refused() -> None:
    parts = parts_of(FRAMED)
    parts["items"][1][6] = 2
    parts["framing"].append(21)
    with pytest.raises(InvalidRequest, match="media item 1: its runs hold framing only"):
        decode_plan(written(parts))


def test_a_plan_of_very_many_runs_and_framings_is_read_in_a_moment() -> None:
    """No check looks at every pair: this one would take minutes."""
    count = MAX_RUNS
    runs = tuple(Run(4 * n, 3) for n in range(count))
    item = ItemLayout(
        Modality.IMAGE, runs, count, 1, Grid(1, 1, 1), bytes(32), tuple(4 * n + k for n in range(count) for k in (0, 1))
    )
    value = PromptPlan(np.full(4 * count, PLACEHOLDER, np.int32), (item,), PositionRule.LINEAR, 1, bytes(32))
    assert back(value).items == (item,)


def outcome(read: Callable[[], PromptPlan | None]) -> None:
    """Whatever comes, it is a plan that holds together, none, or a refusal on one short line."""
    why, value = "", None
    try:
        value = read()
    except InvalidRequest as error:
        why = str(error)
    assert len(why) < 300
    if value is not None:
        positions_of(value)
        assert len(sent(value)) <= MAX_PLAN_CHARACTERS


@pytest.mark.parametrize("value", [PLAN, FRAMED])
def test_every_cut_and_every_flipped_bit_has_an_outcome(value: PromptPlan) -> None:
    data = base64.b64decode(sent(value))
    for size in range(len(data)):
        with pytest.raises(InvalidRequest):
            decode_plan(base64.b64encode(data[:size]).decode())
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        outcome(lambda flipped=flipped: decode_plan(base64.b64encode(flipped).decode()))  # type: ignore[misc]


@settings(max_examples=300)
@given(st.sampled_from([PLAN, FRAMED]), st.data())
def test_a_body_with_any_bytes_changed_has_an_outcome(value: PromptPlan, data: st.DataObject) -> None:
    def change(body: bytes) -> bytes:
        changed = bytearray(body)
        for _ in range(data.draw(st.integers(1, 4))):
            changed[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        return bytes(changed)

    outcome(lambda: decode_plan(forged(value, body=change)))


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: base64.b64encode(b"\x01" + data).decode()))
def test_any_text_has_an_outcome(text: str) -> None:
    outcome(lambda: decode_plan(text))


def test_cells_of_a_grid_that_does_not_merge() -> None:
    layout = ItemLayout(Modality.IMAGE, (Run(0, 4),), 4, 20, Grid(1, 4, 5), bytes(32))
    assert layout.cells(MERGE) is None
    assert picture(0, 2, 3).cells(MERGE) == Grid(1, 2, 3)
    assert video(0, 3, 2, 1).cells(MERGE) == Grid(1, 2, 1)
