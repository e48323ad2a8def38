"""Handles of the nixl transport: what is signed comes back as it was, and nothing else gets through."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.transports import SMALL, SMALL_ROWS
from triptych.core.errors import InvalidRequest, StartupError
from triptych.core.handles import MAX_HANDLE_STATE, Handle
from triptych.transport.nixl_agent import NixlOptions
from triptych.transport.nixl_ledger import MAX_SESSIONS
from triptych.transport.nixl_state import MAX_BLOCKS, NixlPlace, NixlState, parse_state, seal_state

OPTIONS = NixlOptions(b"known to all engines")
PLACE = NixlPlace(
    instance_id="P",
    layout=SMALL.label,
    block_bytes=SMALL.block_bytes,
    metadata=b"nixl" * 120,
    stamp=bytes(range(16)),
    memory=2**46,
    generations=2**45,
    table=2**44,
    num_blocks=MAX_BLOCKS,
)


def make_state(blocks: Any, generations: Any, **more: Any) -> NixlState:
    fields = {"place": PLACE, "session_id": "S", "slot": 3, "tag": 2**64 - 1, **more}
    return NixlState(blocks=np.asarray(blocks, np.int64), generations=np.asarray(generations, np.int64), **fields)


def handle_of(data: bytes, blocks: int = 1) -> Handle[Any]:
    return Handle("S", "nixl", "P", SMALL, blocks, data)


def sign(body: bytes) -> bytes:
    """What an engine with our secret would have signed, whatever it is."""
    sealed = seal_state(make_state([1], [1]), OPTIONS)
    prefix = b"triptych nixl session\0"
    assert hmac.digest(OPTIONS.secret, prefix + sealed[:-32], hashlib.sha256) == sealed[-32:]
    return body + hmac.digest(OPTIONS.secret, prefix + body, hashlib.sha256)


@given(st.lists(st.tuples(st.integers(0, MAX_BLOCKS - 1), st.integers(-(2**63), 2**63 - 1)), min_size=1))
def test_comes_back_as_it_was(pairs: list[tuple[int, int]]) -> None:
    blocks, generations = zip(*pairs, strict=True)
    state = parse_state(handle_of(seal_state(make_state(blocks, generations), OPTIONS)), OPTIONS)
    assert (state.blocks.tolist(), state.generations.tolist()) == (list(blocks), list(generations))
    assert (state.place, state.session_id, state.slot, state.tag) == (PLACE, "S", 3, 2**64 - 1)


@pytest.mark.parametrize(
    ("count", "generations"), [(4096, [-(2**63), 2**63 - 1]), (8192, [7, 2**31]), (12000, [0, 255])]
)
def test_long_sessions_fit(count: int, generations: list[int]) -> None:
    blocks = np.random.default_rng(1).permutation(MAX_BLOCKS)[:count]
    state = make_state(blocks, np.resize(generations, count))
    assert len(seal_state(state, OPTIONS)) <= MAX_HANDLE_STATE
    assert np.array_equal(parse_state(handle_of(seal_state(state, OPTIONS)), OPTIONS).blocks, blocks)


def test_longer_ones_are_refused_by_their_size() -> None:
    with pytest.raises(InvalidRequest, match=r"30000 blocks needs a handle of \d+ bytes.*a shorter prompt"):
        seal_state(make_state(np.arange(30000), np.arange(30000)), OPTIONS)


def test_every_bit_counts() -> None:
    sealed = seal_state(make_state([1, 2], [3, 4]), OPTIONS)
    for index in range(len(sealed)):
        for bit in range(8):
            flipped = bytearray(sealed)
            flipped[index] ^= 1 << bit
            with pytest.raises(InvalidRequest, match="not signed"):
                parse_state(handle_of(bytes(flipped)), OPTIONS)
        with pytest.raises(InvalidRequest, match="not signed"):
            parse_state(handle_of(sealed[:index]), OPTIONS)


def test_of_another_secret_or_transport() -> None:
    sealed = seal_state(make_state([1], [1]), OPTIONS)
    with pytest.raises(InvalidRequest, match="not signed with this engine's hand-off secret"):
        parse_state(handle_of(sealed), NixlOptions(b"known to nobody else"))
    with pytest.raises(InvalidRequest, match="pigeon"):
        parse_state(dataclasses.replace(handle_of(sealed), backend="pigeon"), OPTIONS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 0),
        ("num_blocks", MAX_BLOCKS + 1),
        ("stamp", b"short"),
        ("memory", 0),
        ("memory", -1),
        ("memory", 2**63 - 1),
        ("generations", 2**63 - 8),
        ("table", 2**63),
        ("table", 2**64 - 1),
        ("layout", 4),
        ("layout", "k\u00e4v"),
        ("layout", "x" * 129),
        ("block_bytes", 0),
        ("block_bytes", 2**43),
        ("block_bytes", 2**63),
        ("block_bytes", "1"),
    ],
)
def test_a_signed_place_that_cannot_be(field: str, value: Any) -> None:
    place = list(msgspec.structs.astuple(PLACE))
    place[PLACE.__struct_fields__.index(field)] = value
    state = make_state([1], [1])
    columns = [(1).to_bytes(8, "little") + b"\0"] * 2
    body = msgspec.msgpack.encode([2, place, "S", state.slot, state.tag, 1, *columns])
    with pytest.raises(InvalidRequest):
        parse_state(handle_of(sign(body)), OPTIONS)


@pytest.mark.parametrize(
    "change",
    [
        {0: 1},
        {3: 0},
        {3: MAX_SESSIONS + 1},
        {4: 0},
        {5: 0},
        {5: 2},
        {5: 2**40},
        {6: b""},
        {6: bytes(8)},
        {6: bytes(17)},
        {6: MAX_BLOCKS.to_bytes(8, "little") + b"\0"},
        {6: (2**64 - 1).to_bytes(8, "little") + b"\0"},
        {7: bytes(18)},
    ],
)
def test_a_signed_session_that_cannot_be(change: dict[int, Any]) -> None:
    columns = [(1).to_bytes(8, "little") + b"\0"] * 2
    fields = [2, msgspec.structs.astuple(PLACE), "S", 3, 9, 1, *columns]
    assert parse_state(handle_of(sign(msgspec.msgpack.encode(fields))), OPTIONS).blocks.tolist() == [1]
    for index, value in change.items():
        fields[index] = value
    with pytest.raises(InvalidRequest):
        parse_state(handle_of(sign(msgspec.msgpack.encode(fields))), OPTIONS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=200), JSON.map(msgspec.msgpack.encode)))
def test_signed_nonsense(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_state(handle_of(sign(body)), OPTIONS)


def test_what_the_handle_says_of_another_session() -> None:
    sealed = handle_of(seal_state(make_state([1, 2], [3, 4]), OPTIONS), blocks=2)
    state = parse_state(sealed, OPTIONS)
    assert not state.differences(sealed)
    for change, word in (
        ({"session_id": "T"}, "session"),
        ({"instance_id": "Q"}, "instance"),
        ({"blocks": 3}, "blocks"),
        ({"layout": dataclasses.replace(SMALL, dtype="int32")}, "layout"),
        ({"layout": SMALL_ROWS}, "layout"),
    ):
        assert word in state.differences(dataclasses.replace(sealed, **change))


def test_options_have_bounds() -> None:
    with pytest.raises(StartupError, match="at least 16 bytes"):
        NixlOptions(b"short")
    for device in ("", "lo,eth0", "lo=1"):
        with pytest.raises(StartupError, match="network device"):
            NixlOptions(OPTIONS.secret, device)
    assert "known" not in repr(OPTIONS)
