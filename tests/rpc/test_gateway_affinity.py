"""Which encoder gets which item."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triptych.core.media import DataUri, MediaItem, Modality, RawBytes, Url
from triptych.gateway.affinity import MAX_AHEAD, choose, digest, source_bytes

ADDRESSES = [f"10.0.0.{n}:50051" for n in range(8)]
DIGESTS = [bytes([n]) * 32 for n in range(200)]


def image(source: Url | DataUri | RawBytes) -> MediaItem:
    return MediaItem(Modality.IMAGE, source)


def test_a_digest_is_the_contents() -> None:
    one, same, other = (image(DataUri(f"data:,{text}")) for text in ("one", "one", "other"))
    assert digest(one) == digest(same) != digest(other)
    assert digest(image(RawBytes(b"one"))) != digest(image(RawBytes(b"other")))
    assert digest(image(DataUri("\ud800"))) != digest(image(DataUri("\ud801")))  # JSON may hold lone surrogates
    assert source_bytes(image(RawBytes(b"12345"))) == source_bytes(image(Url("12345"))) == 5


def test_items_are_spread() -> None:
    loads = dict.fromkeys(ADDRESSES, 0)
    counts = [sum(choose(item, loads) == address for item in DIGESTS) for address in ADDRESSES]
    assert min(counts) > len(DIGESTS) / len(ADDRESSES) / 3


def test_only_the_items_of_an_encoder_that_goes_move() -> None:
    loads = dict.fromkeys(ADDRESSES, 0)
    before = {item: choose(item, loads) for item in DIGESTS}
    gone = loads.popitem()[0]
    after = {item: choose(item, loads) for item in DIGESTS}
    assert all(before[item] in (after[item], gone) for item in DIGESTS)
    assert len({after[item] for item in DIGESTS if before[item] == gone}) > 1


@given(st.binary(min_size=32, max_size=32), st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_the_preferred_encoder_is_left_only_for_the_least_busy_one(item: bytes, busy: list[int]) -> None:
    loads = dict(zip(ADDRESSES, busy, strict=False))
    preferred = choose(item, dict.fromkeys(loads, 0))
    chosen = choose(item, loads)
    if loads[preferred] - min(busy) > MAX_AHEAD:
        assert loads[chosen] == min(busy)
    else:
        assert chosen == preferred


@given(st.lists(st.sampled_from(DIGESTS), max_size=300), st.integers(1, 8))
def test_no_encoder_gets_far_ahead(items: list[bytes], encoders: int) -> None:
    loads = dict.fromkeys(ADDRESSES[:encoders], 0)
    for item in items:
        loads[choose(item, loads)] += 1
    assert max(loads.values()) - min(loads.values()) <= MAX_AHEAD + 1
