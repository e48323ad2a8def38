"""A URL taken apart, once: what is vetted, what is dialled and what is asked for all come from here.

    text ── parse ──> Target ── redirected(Location) ──> Target

Strict where parsers are known to differ (the host), lenient where browsers are (the path).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, urljoin

from triptych.core.media import Stage
from triptych.media.addresses import read_literal
from triptych.media.fetch_failure import FetchFailure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triptych.media.addresses import IpAddress

MAX_URL = 8192
"""Characters."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,15}):")
_AFTER_SCHEME = re.compile(r"//([^/?#]*)([^?#]*)(\?[^#]*)?(?:#.*)?", re.DOTALL)
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)\]|([A-Za-z0-9._-]+))(?::([0-9]{0,5}))?")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_MAX_NAME = 253
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_UNQUOTED = "/?:@!$&'()*+,;=-._~%[]"
"""What stays in a path or query as it is; a broken percent escape is the server's to judge."""


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to GET."""

    scheme: str
    """``http`` or ``https``."""
    host: str
    """A name in lower case, without the last dot, or an address in its plain form, without brackets."""
    port: int
    path: str
    """Path and query, ASCII, as in the request line."""
    address: IpAddress | None
    """The host, if it is an address."""

    @property
    def authority(self) -> str:
        """Host and port as in the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The whole; it may hold secrets, so it is not for messages."""
        return f"{self.scheme}://{self.authority}{self.path}"

    def redirected(self, location: bytes) -> Target:
        """Where an answer of this target's sends on to.

        Raises:
            FetchFailure: it is nothing that can be fetched, or no longer encrypted.
        """
        try:
            text = location.decode()
            _check_text(text)
            whole = urljoin(self.url, text)
            target = parse(whole)
        except UnicodeDecodeError:
            raise FetchFailure(f"{self.host}: it redirects to a Location that is not UTF-8") from None
        except ValueError:
            raise FetchFailure(f"{self.host}: it redirects to something that is no URL") from None
        except FetchFailure as failure:
            reason = f"{self.host}: it redirects to a place that is not fetched: {failure.reason}"
            raise FetchFailure(reason, stage=failure.stage) from None
        if (self.scheme, target.scheme) == ("https", "http"):
            raise FetchFailure(
                f"{self.host}: it redirects from https to http at {target.host}, which anybody on the way could answer"
            )
        return target


def parse(url: str) -> Target:
    """Take a URL apart.

    Raises:
        FetchFailure: it is malformed, of another scheme, or holds credentials. The URL itself is not repeated.
    """
    scheme = _read_scheme(url)
    _check_text(url)
    match = _AFTER_SCHEME.fullmatch(url, len(scheme) + 1)
    if match is None:
        raise FetchFailure(f"the URL has no // after {scheme}:")
    if "@" in match[1]:
        raise FetchFailure("the URL has credentials before its host; they are not sent")
    parts = _AUTHORITY.fullmatch(match[1])
    if parts is None:
        raise FetchFailure("the URL's host is malformed; a name that is not ASCII is written as xn--")
    port = int(parts[3] or _DEFAULT_PORTS[scheme])
    if not 0 < port < 1 << 16:
        raise FetchFailure(f"the URL has port {port}")
    try:
        path = quote((match[2] or "/") + (match[3] or ""), safe=_UNQUOTED)
    except UnicodeEncodeError:
        raise FetchFailure("the URL holds half a character (a lone surrogate)") from None
    try:
        address = read_literal(parts[1] or parts[2].lower().removesuffix("."))
    except ValueError:
        raise FetchFailure("the URL's host ends in a number and is no IP address") from None
    host = _read_name(parts[2]) if address is None else str(address)
    return Target(scheme, host, port, path, address)


def _read_scheme(url: str) -> str:
    match = _SCHEME.match(url)
    if match is None:
        raise FetchFailure("the URL has no scheme; http and https are fetched")
    scheme = match[1].lower()
    if scheme not in _DEFAULT_PORTS:
        raise FetchFailure(f"{scheme}: URLs are not fetched; http and https are")
    return scheme


def _check_text(url: str) -> None:
    if len(url) > MAX_URL:
        raise FetchFailure(f"a URL of {len(url)} characters; at most {MAX_URL}", stage=Stage.LIMIT)
    if (control := _CONTROL.search(url)) is not None:
        raise FetchFailure(f"the URL has a control character at {control.start()}")


def _read_name(text: str) -> str:
    name = text.lower().removesuffix(".")
    if len(name) > _MAX_NAME or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise FetchFailure("the URL's host is no name: each part has 1 to 63 letters, digits and inner hyphens")
    return name


def is_listed(host: str, patterns: Iterable[str]) -> bool:
    """Whether a host is on the list: ``a.example`` is itself, ``*.a.example`` all names below it but not itself."""
    return any(host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern for pattern in patterns)
