"""One question and its answer: an HTTP/1.1 GET on a connected socket, which is closed afterwards.

    socket ── TLS, by the host's name ──> request ──> head ──> body, as far as the limit

Nothing is decompressed: the server is asked not to compress, and an answer that is compressed all the same is refused.
Every size is the server's word until it has been counted.
"""

from __future__ import annotations

import asyncio
import email.utils
import io
import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import h11

from triptych.core.errors import StartupError, one_line
from triptych.core.media import Stage
from triptych.media.fetch_failure import FetchFailure
from triptych.media.incoming import Incoming

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from triptych.media.target import Target

MAX_HEAD = 32 * 1024
"""Bytes of an answer's head."""
_REDIRECTS = {301, 302, 303, 307, 308}
_PASSING = {408, 425, 429}
_LASTING = {501, 505}
"""Of the statuses from 500 on, those that a retry does not change."""
_FREE_PIECES = 4096
_BYTES_A_PIECE = 256
"""Pieces cost time whatever their size: their number is bounded by the bytes that came in them."""
_PIECES_A_TURN = 64
"""Pieces read before others on the event loop have their turn; about a millisecond."""
_MAX_INTERIM = 16
"""Answers that say only that there will be one."""


@dataclass(slots=True)
class Progress:
    """What a fetch is doing, for the message when its time is over, and what it brings."""

    count: Callable[[int], None]
    """Told of the bytes of each piece before it is stored, and of those that are thrown away, below 0. What it raises
    ends the fetch."""
    host: str = "the URL"
    doing: str = "before it began"


class Answer(NamedTuple):
    """Where to go on, or the bytes."""

    location: bytes | None
    body: bytes


def tls_context(ca_file: str) -> ssl.SSLContext:
    """How servers are made to prove their names.

    Args:
        ca_file: PEM certificates to trust instead of the system's; empty for the system's.

    Raises:
        StartupError: the file cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise StartupError(f"--fetch-ca-file {ca_file}: {one_line(error)}") from None
    context.set_alpn_protocols(["http/1.1"])
    context.hostname_checks_common_name = False
    return context


async def get(
    connection: socket.socket,
    target: Target,
    tls: ssl.SSLContext,
    limit: int,
    progress: Progress,
    *,
    whole_url: bool = False,
) -> Answer:
    """Ask for the target on a connected socket. The connection is closed by the time this returns, however it does.

    Args:
        connection: no longer the caller's.
        target: what to ask for, and whose certificate to expect.
        tls: for https.
        limit: bytes of the body.
        progress: kept up to date.
        whole_url: whether to ask by the URL instead of its path, as proxies want it.

    Raises:
        FetchFailure: there is no answer, or none that can be used.
    """
    incoming = Incoming()
    encrypted = target.scheme == "https"
    if encrypted:
        progress.doing = "during the TLS handshake"
    try:
        await asyncio.get_running_loop().create_connection(
            lambda: incoming,
            sock=connection,
            ssl=tls if encrypted else None,
            server_hostname=target.host if encrypted else None,
        )
        return await _Exchange(incoming, target, limit, progress).run(whole_url=whole_url)
    except ssl.SSLCertVerificationError as error:
        raise FetchFailure(
            f"{target.host}: its certificate is not trusted: {error.verify_message} (--fetch-ca-file)"
        ) from error
    except ssl.SSLError as error:
        raise FetchFailure(f"{target.host}: TLS failed: {error.reason or 'no reason given'}") from error
    except OSError as error:
        raise FetchFailure(f"{target.host}: the connection broke {progress.doing}", retryable=True) from error
    finally:
        incoming.abort()


class _Exchange:
    """The states of one exchange."""

    def __init__(self, incoming: Incoming, target: Target, limit: int, progress: Progress) -> None:
        self._incoming = incoming
        self._target = target
        self._limit = limit
        self._progress = progress
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        self._ended = False

    async def run(self, *, whole_url: bool) -> Answer:
        """Ask, and read the answer."""
        self._ask(self._target.url if whole_url else self._target.path)
        self._progress.doing = "before the answer"
        try:
            head = await self._head()
            headers = {bytes(name): bytes(value) for name, value in head.headers}
            if head.status_code in _REDIRECTS:
                if (location := headers.get(b"location")) is None:
                    raise self._failure(f"it answered {head.status_code} and no Location")
                return Answer(location, b"")
            self._check(head.status_code, headers)
            return Answer(None, await self._body())
        except h11.RemoteProtocolError as error:
            if self._ended:
                raise self._failure(f"the connection ended {self._progress.doing}", retryable=True) from error
            if error.error_status_hint == 431:
                raise self._failure(f"the head of its answer has more than {MAX_HEAD} bytes") from error
            # What it said instead is not repeated: it may be what only this machine may see.
            raise self._failure("it does not speak HTTP") from error

    def _ask(self, path: str) -> None:
        headers = [
            ("Host", self._target.authority),
            ("User-Agent", "triptych"),
            ("Accept", "*/*"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        request = self._http.send(h11.Request(method="GET", target=path, headers=headers))
        self._incoming.send((request or b"") + (self._http.send(h11.EndOfMessage()) or b""))

    async def _next(self) -> object:
        """The next event of h11's, with whatever must be received for it."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            data = await self._incoming.read()
            self._ended = not data
            self._http.receive_data(data)
        return event

    async def _head(self) -> h11.Response:
        interim = 0
        while not isinstance(event := await self._next(), h11.Response):
            interim += 1
            if interim > _MAX_INTERIM:
                raise self._failure(f"it says {interim} times that it will answer")
        if sum(len(name) + len(value) for name, value in event.headers) > MAX_HEAD:
            raise self._failure(f"the head of its answer has more than {MAX_HEAD} bytes")
        return event

    def _check(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Refuse an answer by its head."""
        if status != 200:
            passing = status in _PASSING or (status >= 500 and status not in _LASTING)
            after = _seconds(headers.get(b"retry-after", b"")) if passing else 0.0
            rest = f" and asks for {after:.0f} s of rest" if after else ""
            raise self._failure(f"it answered {status}{rest}", retryable=passing, after=after)
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise self._failure("its answer is encoded, which it was asked not to do")
        length = headers.get(b"content-length", b"0")
        if int(length) > self._limit:
            raise self._too_large(f"{int(length)} bytes")

    async def _body(self) -> bytes:
        # Written once and handed out as it lies: no second copy of a large item.
        body = io.BytesIO()
        self._progress.doing = "before the first byte of the body"
        try:
            await self._read_into(body)
        except BaseException:
            self._progress.count(-body.tell())
            raise
        return body.getvalue()

    async def _read_into(self, body: io.BytesIO) -> None:
        pieces = 0
        while isinstance(event := await self._next(), h11.Data):
            size = body.tell() + len(event.data)
            if size > self._limit:
                raise self._too_large(f"more than {self._limit} bytes")
            self._progress.count(len(event.data))
            body.write(event.data)
            self._progress.doing = f"after {size} bytes of the body"
            pieces += 1
            if pieces > _FREE_PIECES + size // _BYTES_A_PIECE:
                raise self._failure(f"its answer came in {pieces} pieces for {size} bytes")
            if pieces % _PIECES_A_TURN == 0:
                await asyncio.sleep(0)
        if not body.tell():
            raise self._failure("its answer has no bytes")

    def _too_large(self, size: str) -> FetchFailure:
        what = f"{self._target.host}: {size}; at most {self._limit} (--max-item-bytes)"
        return FetchFailure(what, stage=Stage.LIMIT)

    def _failure(self, reason: str, *, retryable: bool = False, after: float = 0.0) -> FetchFailure:
        return FetchFailure(f"{self._target.host}: {reason}", retryable=retryable, after=after)


def _seconds(retry_after: bytes) -> float:
    """How long a server asks to be left alone: a number of seconds, or a date. 0 where it says neither."""
    text = retry_after.decode("latin-1").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        date = email.utils.parsedate_to_datetime(text)
        return max(0.0, date.timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
