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
    from collections.abc import Iterator

    from triptych.core.config import MediaLimits

SCHEME = "data:"
MAX_HEADER = 1024
"""Characters between the scheme and the comma."""
SLICE = 1 << 20
"""Characters that are looked at in one call: no other thread runs meanwhile."""
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
    parameters = uri[len(SCHEME) : comma].split(";")
    encoded = len(parameters) > 1 and parameters[-1].strip().lower() == "base64"
    collect = _Base64(index, limits.max_item_bytes) if encoded else _Bytes(limits.max_item_bytes)
    for piece in _unquoted(index, uri, comma + 1):
        collect.add(piece)
    size = collect.end()
    check_item_bytes(index, size, limits)
    if not size:
        raise MediaError(index, "the data: URI carries no bytes", Stage.FETCH)
    return b"".join(collect.parts)


def _unquoted(index: int, uri: str, start: int) -> Iterator[bytes]:
    """What stands behind the comma, with its percent escapes resolved, in slices."""
    while start < len(uri):
        end = min(start + SLICE, len(uri))
        if end < len(uri):  # an escape stays whole
            cut = uri.rfind("%", end - 2, end)
            end = end if cut < 0 else cut
        try:
            piece = uri[start:end].encode("ascii")
        except UnicodeEncodeError as error:
            where = start + error.start
            raise MediaError(index, f"the data: URI has a non-ASCII character at {where}", Stage.FETCH) from None
        if (bad := _BAD_ESCAPE.search(piece)) is not None:
            where = start + bad.start()
            raise MediaError(index, f"the data: URI has a broken percent escape at {where}", Stage.FETCH)
        yield unquote_to_bytes(piece)
        start = end


class _Bytes:
    """Collects bytes as they are; of what is too much only the number."""

    def __init__(self, most: int) -> None:
        self.parts: list[bytes] = []
        self._most = most
        self._size = 0

    def add(self, piece: bytes) -> None:
        """The next ones."""
        self._size += len(piece)
        if self._size <= self._most:
            self.parts.append(piece)

    def end(self) -> int:
        """How many they are."""
        return self._size


class _Base64(_Bytes):
    """Collects what base64 characters say."""

    def __init__(self, index: int, most: int) -> None:
        super().__init__(most)
        self._index = index
        self._left = b""
        """Fewer than four characters, which wait for others."""
        self._characters = 0
        self._padded = False
        """Whether it has ended."""

    def add(self, piece: bytes) -> None:
        """The next ones.

        Raises:
            MediaError: one is no base64.
        """
        text = piece.translate(_URL_SAFE, delete=_WHITE_SPACE)
        body = text.rstrip(b"=")
        bad = b"=" if self._padded and body else None
        if bad is None and (found := _NOT_BASE64.search(body)) is not None:
            bad = found.group()
        if bad is not None:
            raise MediaError(self._index, f"the data: URI has the byte {bad!r}, which is not base64", Stage.FETCH)
        self._padded = self._padded or len(body) < len(text)
        self._characters += len(body)
        body = self._left + body
        whole = len(body) - len(body) % 4
        super().add(binascii.a2b_base64(body[:whole]))
        self._left = body[whole:]

    def end(self) -> int:
        """How many bytes they are.

        Raises:
            MediaError: some bytes are not whole.
        """
        if len(self._left) == 1:
            reason = f"{self._characters} base64 characters cannot be whole bytes: the data: URI is cut off"
            raise MediaError(self._index, reason, Stage.FETCH)
        super().add(binascii.a2b_base64(self._left + b"=" * (-len(self._left) % 4)))
        return super().end()
