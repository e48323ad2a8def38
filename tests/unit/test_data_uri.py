from __future__ import annotations

import base64
import binascii
import contextlib
import re
from urllib.parse import quote, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.config import MediaLimits
from triptych.core.errors import MediaError
from triptych.media import data_uri
from triptych.media.data_uri import MAX_HEADER, decode_data_uri

LIMITS = MediaLimits(max_item_bytes=1000)
BYTES = bytes(range(256))
BASE64 = base64.b64encode(BYTES).decode()


def decode(uri: str) -> bytes:
    return decode_data_uri(0, uri, LIMITS)


@pytest.mark.parametrize(
    "uri",
    [
        "data:image/png;base64," + BASE64,
        "DATA:image/png;BASE64," + BASE64,
        "data:;base64," + BASE64,
        "data:image/png;charset=x;name=a.png;base64," + BASE64,
        "data:image/png; base64 ," + BASE64,
        "data:image/png;base64," + BASE64.rstrip("="),
        "data:image/png;base64," + BASE64.replace("+", "-").replace("/", "_"),
        "data:image/png;base64," + "\r\n ".join(BASE64[at : at + 76] for at in range(0, len(BASE64), 76)) + "\n",
        "data:image/png;base64," + quote(BASE64, safe=""),
        "data:image/png," + quote(BYTES, safe=""),
        "data:," + quote(BYTES),
    ],
)
def test_every_way_of_writing_the_same_bytes(uri: str) -> None:
    assert decode(uri) == BYTES


def test_base64_is_a_flag_only_at_the_end_of_the_header() -> None:
    assert decode("data:base64,QUJD") == b"QUJD"
    assert decode("data:text/plain;base64;charset=x,QUJD") == b"QUJD"


def test_a_plus_is_a_plus() -> None:
    assert decode("data:,a+b") == b"a+b"


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("", "not a data: URI"),
        ("http://x/", "not a data: URI"),
        ("dat", "not a data: URI"),
        ("data:image/png;base64", "no comma"),
        ("data:" + "x" * (MAX_HEADER + 1) + ",", "no comma"),
        ("data:,", "carries no bytes"),
        ("data:;base64,", "carries no bytes"),
        ("data:;base64,====", "carries no bytes"),
        ("data:;base64,QUJD!", "b'!', which is not base64"),
        ("data:;base64,QU=JD", "b'=', which is not base64"),
        ("data:;base64,QUJDR", "5 base64 characters cannot be whole bytes"),
        ("data:,a%zz", "broken percent escape at 7"),
        ("data:,a%", "broken percent escape at 7"),
        ("data:,caf\u00e9", "non-ASCII character at 9"),
        ("data:;base64,\ud800", "non-ASCII character"),
    ],
)
def test_what_is_wrong_is_said(uri: str, reason: str) -> None:
    with pytest.raises(MediaError, match="media item 4: ") as refused:
        decode_data_uri(4, uri, LIMITS)
    assert reason in str(refused.value)


@pytest.mark.parametrize("body", ["," + "a" * 1001, ";base64," + base64.b64encode(bytes(1001)).decode()])
def test_one_byte_over_the_limit_names_the_flag(body: str) -> None:
    with pytest.raises(MediaError, match=r"1001 bytes; at most 1000 \(--max-item-bytes\)"):
        decode("data:" + body)


def test_text_that_cannot_be_within_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(MediaError, match="a data: URI of 5000 characters; at most 1000 bytes"):
        decode("data:;base64," + "\u00e9" * 5000)


@pytest.mark.parametrize("size", [999, 1000])
def test_the_limit_itself_is_allowed_however_it_is_written(size: int) -> None:
    for body in (";base64," + quote(base64.b64encode(bytes(size)), safe=""), "," + "%00" * size):
        assert decode("data:" + body) == bytes(size)


@given(st.binary(min_size=1, max_size=200))
def test_round_trips(data: bytes) -> None:
    assert decode("data:x/y;base64," + base64.urlsafe_b64encode(data).decode().rstrip("=")) == data
    assert decode("data:x/y," + quote(data, safe="")) == data


@given(st.text(max_size=60))
def test_any_text_gives_bytes_or_a_media_error(text: str) -> None:
    for uri in (text, "data:" + text, "data:;base64," + text):
        with contextlib.suppress(MediaError):
            assert decode(uri)


def whole(text: str) -> bytes:
    """What a payload says, looked at in one piece."""
    data = unquote_to_bytes(text.encode("ascii")).translate(bytes.maketrans(b"-_", b"+/"), delete=b" \t\r\n\f\v")
    data = data.rstrip(b"=")
    if re.search(rb"[^A-Za-z0-9+/]", data) or len(data) % 4 == 1:
        raise ValueError
    return binascii.a2b_base64(data + b"=" * (-len(data) % 4))


PIECES = st.sampled_from(
    ["A", "b", "9", "+", "/", "-", "_", "=", " ", "\n", "%41", "%3d", "%3D", "%2B", "%", "%4", "!", "AAAA"]
)


@given(st.lists(PIECES, max_size=30).map("".join), st.integers(3, 9))
def test_slices_change_nothing(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_uri, "SLICE", size)
        broken = re.search(r"%(?![0-9A-Fa-f]{2})", text)
        try:
            expected = None if broken else whole(text)
        except ValueError:
            expected = None
        if not expected:
            with pytest.raises(MediaError) as refused:
                decode("data:;base64," + text)
            if broken:
                assert f"broken percent escape at {len('data:;base64,') + broken.start()}" in refused.value.reason or (
                    "not base64" in refused.value.reason  # found in an earlier slice
                )
        else:
            assert decode("data:;base64," + text) == expected


@given(st.binary(min_size=1, max_size=60), st.integers(3, 9))
def test_slices_of_plain_bytes_change_nothing(data: bytes, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_uri, "SLICE", size)
        assert decode("data:," + quote(data)) == data
