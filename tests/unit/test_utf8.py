"""The masks against Python's own decoder."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from triptych.engine import utf8

PIECES = st.one_of(
    st.binary(min_size=1, max_size=6),
    st.text(min_size=1, max_size=3).filter(lambda text: text.isprintable()).map(lambda text: text.encode()),
    st.sampled_from([b"\xed\xa0", b"\xe0\x80", b"\xf0\x8f", b"\xf4\x90", b"\xc0\x80", b"\xf0\x90\x80", b"\x80"]),
)


ENDINGS = (b"", b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\xa0\x80", b"\x90\x80\x80")
"""Whatever can still become a character becomes one with one of these."""


def decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def begins_text(data: bytes) -> bool:
    return any(decodes(data + ending) for ending in ENDINGS)


@given(st.lists(PIECES, max_size=6))
def test_a_way_is_open_exactly_where_the_bytes_begin_a_text(pieces: list[bytes]) -> None:
    place, data = utf8.BETWEEN, b""
    for piece in pieces:
        data += piece
        place = utf8.advance(place, piece)
        assert (place != utf8.NOWHERE) == begins_text(data)
        if place == utf8.NOWHERE:
            break
        assert (place == utf8.BETWEEN) == decodes(data)


@given(st.lists(PIECES | st.just(b""), min_size=1, max_size=70), st.lists(PIECES, max_size=3))
def test_a_mask_allows_the_tokens_that_go_on(tokens: list[bytes], before: list[bytes]) -> None:
    place = utf8.BETWEEN
    for piece in before:
        place = place if utf8.advance(place, piece) == utf8.NOWHERE else utf8.advance(place, piece)
    masks = utf8.masks(tokens)
    assert masks.dtype == np.int32
    assert masks.shape[1] == (len(tokens) + 31) // 32
    allowed = np.unpackbits(masks[place].view(np.uint8), bitorder="little")
    assert not allowed[len(tokens) :].any()
    for token, flag in zip(tokens, allowed, strict=False):
        expected = utf8.advance(place, token) != utf8.NOWHERE if token else place == utf8.BETWEEN
        assert flag == expected
