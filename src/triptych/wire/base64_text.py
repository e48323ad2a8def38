"""Bytes in text fields."""

from __future__ import annotations

import binascii

from triptych.core.errors import InvalidRequest


def to_base64(data: bytes) -> str:
    """The standard alphabet, padded, on one line."""
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def from_base64(text: str) -> bytes:
    """What ``to_base64`` wrote, and nothing else: the same bytes have one text.

    Raises:
        InvalidRequest: ``to_base64`` does not write this.
    """
    try:
        data = binascii.a2b_base64(text)
    except ValueError:
        data = None
    if data is None or to_base64(data) != text:
        raise InvalidRequest("it is not base64")
    return data
