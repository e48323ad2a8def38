"""``data:`` URIs (RFC 2397), as written by programs in the wild: any case, parameters, both base64 alphabets."""

from __future__ import annotations

import binascii
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from triptych.core.errors import MediaError
from triptych.core.media import Stage
from triptych.media.limits import check_item_bytes

if TYPE_CHECKING:
    from triptych.core.config import MediaLimits

SCHEME = "data:"
MAX_HEADER = 1024
"""Characters between the scheme and the comma."""
_LONGEST_PER_BYTE = 4
"""Characters that one byte can take: base64 (4 for 3 bytes) whose every character is percent-encoded (3 for 1)."""
_WHITE_SPACE = b" \t\r\n\f\v"
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_NOT_BASE64 = re.compile(rb"[^A-Za-z0-9+/]")
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def decode_data_uri(index: int, uri: str, limits: MediaLimits) -> bytes:
    """The bytes that the URI carries. The media type is a hint that nobody reads: the bytes decide.

    Raises:
        MediaError: malformed, empty or too large; ``index`` names the item.
    """
    if uri[: len(SCHEME)].lower() != SCHEME:
        raise MediaError(index, "not a data: URI", Stage.FETCH)
    comma = uri.find(",", len(SCHEME), len(SCHEME) + MAX_HEADER + 1)
    if comma < 0:
        raise MediaError(
            index, f"the data: URI has no comma within {MAX_HEADER} characters after the scheme", Stage.FETCH
        )
    length = len(uri) - comma - 1
    if length > _LONGEST_PER_BYTE * (limits.max_item_bytes + 1):
        raise MediaError(
            index,
            f"a data: URI of {length} characters; at most {limits.max_item_bytes} bytes (--max-item-bytes)",
            Stage.LIMIT,
        )
    try:
        payload = uri[comma + 1 :].encode("ascii")
    except UnicodeEncodeError as error:
        raise MediaError(
            index, f"the data: URI has a non-ASCII character at {comma + 1 + error.start}", Stage.FETCH
        ) from None
    if (bad := _BAD_ESCAPE.search(payload)) is not None:
        raise MediaError(index, f"the data: URI has a broken percent escape at {comma + 1 + bad.start()}", Stage.FETCH)
    data = unquote_to_bytes(payload)
    parameters = uri[len(SCHEME) : comma].split(";")
    if len(parameters) > 1 and parameters[-1].strip().lower() == "base64":
        data = _decode_base64(index, data, limits)
    check_item_bytes(index, len(data), limits)
    if not data:
        raise MediaError(index, "the data: URI carries no bytes", Stage.FETCH)
    return data


def _decode_base64(index: int, text: bytes, limits: MediaLimits) -> bytes:
    text = text.translate(_URL_SAFE, delete=_WHITE_SPACE).rstrip(b"=")
    if (bad := _NOT_BASE64.search(text)) is not None:
        raise MediaError(index, f"the data: URI has the byte {bad.group()!r}, which is not base64", Stage.FETCH)
    if len(text) % 4 == 1:
        raise MediaError(
            index, f"{len(text)} base64 characters cannot be whole bytes: the data: URI is cut off", Stage.FETCH
        )
    check_item_bytes(index, len(text) * 3 // 4, limits)
    return binascii.a2b_base64(text + b"=" * (-len(text) % 4))
