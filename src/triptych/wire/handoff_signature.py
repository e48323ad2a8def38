"""What proves a session or a reference whole, and what proves whose it is.

    checksum    SHA-256, always there     a bit that fell over on the way is an error and not another token
    signature   HMAC-SHA256, by a secret  who does not know the secret cannot make one, nor change one

Both are over the same bytes: the domain, then every field that is ours with its length before it, endpoints and all.
Sessions and references have domains of their own, so that what is signed as the one never passes for the other.
HMAC-SHA256 is in the standard library, over OpenSSL, and takes a secret of any length.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from triptych.core.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterable

MIN_SECRET_BYTES = 16
"""Whoever sees one session can try shorter secrets at leisure."""


def signed_content(domain: str, fields: Iterable[str | bytes]) -> bytes:
    """The bytes that are signed: no two domains or lists of fields have the same."""
    content = bytearray()
    for field in (domain, *fields):
        data = field.encode() if isinstance(field, str) else field
        content += len(data).to_bytes(8, "little")
        content += data
    return bytes(content)


def checksum(content: bytes) -> str:
    """32 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()[:32]


class HandoffSigner:
    """Signs with one secret, and shows it to nobody."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str) -> None:
        """``secret`` is the same on all engines that hand sessions or references to each other.

        Raises:
            StartupError: it is too short to be one.
        """
        self._secret = secret.encode("utf-8", "surrogateescape")
        if len(self._secret) < MIN_SECRET_BYTES:
            raise StartupError(
                f"the hand-off secret has {len(self._secret)} bytes; it needs at least {MIN_SECRET_BYTES} "
                "(openssl rand -hex 32 makes one)"
            )

    def sign(self, content: bytes) -> str:
        """64 hexadecimal digits."""
        return hmac.digest(self._secret, content, "sha256").hex()

    def matches(self, content: bytes, signature: str) -> bool:
        """Whether the signature is the content's; takes as long for a wrong one as for a right one."""
        return hmac.compare_digest(self.sign(content).encode(), signature.encode())
