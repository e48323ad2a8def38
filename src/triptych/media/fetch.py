"""Media by URL, from servers that strangers name.

    url ── parse ──> target ── look up, once ──> addresses ── vet, all ──> dial one of them ── GET ──> bytes
             ^                                                                                |
             └──────────────────── at most 5 redirects, each from the top ────────────────────┘

One connection for each question, closed with its answer: there is no pool, no cookie, no credential, and nothing is
read from the environment. What was vetted is what is dialled, because a name is looked up once for each hop, however
often the hop is tried. Cancelling is closing.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from triptych.core.errors import StartupError, TriptychError
from triptych.core.media import Stage
from triptych.media.addresses import is_private, refusal
from triptych.media.exchange import Progress, get, tls_context
from triptych.media.fetch_failure import FetchFailure
from triptych.media.proxy import open_tunnel
from triptych.media.target import is_listed, parse
from triptych.media.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triptych.core.config import FetchSettings, MediaLimits
    from triptych.media.addresses import IpAddress
    from triptych.media.exchange import Answer
    from triptych.media.network import Network
    from triptych.media.target import Target

MAX_REDIRECTS = 5
MAX_ADDRESSES = 64
"""That one name may have."""
MAX_DIALS = 4
"""Addresses of one name that are tried before it counts as out of reach."""
FIRST_PAUSE = 0.25
"""Seconds before a hop is tried again; twice as many before each further time."""


@dataclass(frozen=True, slots=True)
class FetchStatistics:
    """Counters since the start, unless they say otherwise."""

    items: int
    """That were asked for."""
    fetched: int
    fetched_bytes: int
    failed: int
    """Those that are not fetched, not failed and not under way were cancelled."""
    dials: int
    redirects: int
    retries: int
    hosts: int
    """That somebody fetches from now, or waits to."""


@dataclass(slots=True)
class _Tally:
    items: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    failed: int = 0
    dials: int = 0
    redirects: int = 0
    retries: int = 0


@dataclass(slots=True)
class _Journey:
    """One item on its way."""

    deadline: asyncio.Timeout
    retries: int
    """That are left to it, over all hops."""
    progress: Progress
    lane: asyncio.Semaphore
    """See ``Fetcher.fetch``."""

    def left(self) -> float:
        """Seconds."""
        end = self.deadline.when()
        return math.inf if end is None else end - asyncio.get_running_loop().time()


class Fetcher:
    """For one event loop. Holds nothing between two fetches.

    Args:
        settings: whom to ask, and how long.
        limits: of one item.
        network: the world.

    Raises:
        StartupError: the certificates cannot be read, or the proxy cannot be used.
    """

    def __init__(self, settings: FetchSettings, limits: MediaLimits, network: Network) -> None:
        self._settings = settings
        self._network = network
        self._tls = tls_context(settings.fetch_ca_file)
        self._proxy = _read_proxy(settings.fetch_proxy) if settings.fetch_proxy else None
        self._turns = Turns(settings.fetch_per_host, settings.fetch_at_once)
        self._limit = limits.max_item_bytes
        self._tally = _Tally()

    async def fetch(self, index: int, url: str, count: Callable[[int], None], lane: asyncio.Semaphore) -> bytes:
        """The bytes at a URL, which may be anything.

        Args:
            index: of the item, for the message.
            url: as the client sent it. No message repeats more of it than its host.
            count: see ``exchange.Progress``.
            lane: how many of one request's items are fetched at once; the wait for it is part of an item's time.

        Raises:
            MediaError: it cannot be had; of the class MediaUnavailable where a retry may help.
        """
        self._tally.items += 1
        seconds, progress = self._settings.fetch_seconds, Progress(count)
        try:
            async with self._network.deadline(seconds) as deadline:
                journey = _Journey(deadline, self._settings.fetch_retries, progress, lane)
                body = await self._follow(parse(url), journey)
        except TriptychError:
            self._tally.failed += 1
            raise
        except (TimeoutError, FetchFailure) as error:
            over = f"{progress.host}: the {seconds:g} s that it has were over {progress.doing} (--fetch-seconds)"
            failure = error if isinstance(error, FetchFailure) else FetchFailure(over, retryable=True)
            self._tally.failed += 1
            raise failure.error(index) from error
        self._tally.fetched += 1
        self._tally.fetched_bytes += len(body)
        return body

    def statistics(self) -> FetchStatistics:
        """Counts as of now."""
        return FetchStatistics(**asdict(self._tally), hosts=self._turns.hosts)

    async def _follow(self, target: Target, journey: _Journey) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._hop(target, journey)
            if answer.location is None:
                return answer.body
            self._tally.redirects += 1
            target = target.redirected(answer.location)
        reason = f"{target.host}: that would be redirect {MAX_REDIRECTS + 1}; at most {MAX_REDIRECTS}"
        raise FetchFailure(reason, stage=Stage.LIMIT)

    async def _hop(self, target: Target, journey: _Journey) -> Answer:
        """One target's answer, asked for as often as it may help."""
        self._check(target)
        progress, addresses, pause = journey.progress, None, FIRST_PAUSE
        progress.host = target.host
        while True:
            progress.doing = "while it waited for its turn (--fetch-per-host, --fetch-at-once)"
            try:
                async with journey.lane, self._turns.turn(target.host):
                    if addresses is None:
                        addresses = await self._look_up(target, progress)
                    connection = await self._connect(target, addresses, progress)
                    forwarded = self._proxy is not None and target.scheme == "http"
                    return await get(connection, target, self._tls, self._limit, progress, whole_url=forwarded)
            except FetchFailure as failure:
                wait = max(pause, failure.after)
                if not failure.retryable or not journey.retries or wait >= journey.left():
                    raise
            journey.retries -= 1
            self._tally.retries += 1
            progress.doing = "while it waited to try again"
            await self._network.pause(wait)
            pause *= 2

    def _check(self, target: Target) -> None:
        """Refuse a target by its name."""
        settings = self._settings
        if settings.fetch_hosts is not None and not is_listed(target.host, settings.fetch_hosts):
            raise FetchFailure(f"{target.host}: it is not among the hosts that are fetched from (--fetch-hosts)")
        if target.port not in settings.fetch_ports:
            ports = ", ".join(map(str, settings.fetch_ports))
            raise FetchFailure(f"{target.host}: port {target.port} is not dialled; {ports} are (--fetch-ports)")
        if target.address is not None:
            self._vet(target.host, [target.address])

    def _vet(self, host: str, addresses: Sequence[IpAddress]) -> None:
        """Refuse a host for any of its addresses. Which of a name's it is, is not told: names may be internal."""
        for address in addresses:
            reason = refusal(address, private=self._settings.fetch_private_networks)
            if reason is not None:
                knob = " (--fetch-private-networks)" if is_private(address) else ""
                raise FetchFailure(f"{host}: it leads to {reason}, which is not dialled{knob}")

    async def _look_up(self, target: Target, progress: Progress) -> list[IpAddress]:
        """Where to dial for a target; vetted, unless a proxy is dialled, which is the operator's own choice."""
        if self._proxy is not None:
            return await self._addresses(self._proxy, progress)
        addresses = await self._addresses(target, progress)
        self._vet(target.host, addresses)
        return addresses

    async def _addresses(self, target: Target, progress: Progress) -> list[IpAddress]:
        if target.address is not None:
            return [target.address]
        progress.doing = "while its name was looked up"
        try:
            found = await self._network.resolve(target.host)
        except OSError as error:
            lasting = isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
            said = error.strerror or "no reason given"
            reason = f"{self._called(target)}: the name has no address: {said}"
            raise FetchFailure(reason, retryable=not lasting) from error
        if not 0 < len(found) <= MAX_ADDRESSES:
            reason = f"{self._called(target)}: the name has {len(found)} addresses; at most {MAX_ADDRESSES}"
            raise FetchFailure(reason, stage=Stage.LIMIT if found else Stage.FETCH)
        return [ip_address(text) for text in found]

    async def _connect(self, target: Target, addresses: Sequence[IpAddress], progress: Progress) -> socket.socket:
        """A socket to the target, or to the target's server through the proxy."""
        progress.doing = "while it was dialled"
        connection = await self._dial(self._proxy or target, addresses)
        if self._proxy is not None and target.scheme == "https":
            try:
                await open_tunnel(connection, target)
            except BaseException:
                connection.close()
                raise
        return connection

    async def _dial(self, target: Target, addresses: Sequence[IpAddress]) -> socket.socket:
        reasons = []
        for address in addresses[:MAX_DIALS]:
            self._tally.dials += 1
            try:
                async with self._network.deadline(self._settings.fetch_connect_seconds):
                    return await self._network.dial(address, target.port)
            except OSError as error:
                late = f"no answer within {self._settings.fetch_connect_seconds:g} s (--fetch-connect-seconds)"
                # Not in the error's own words: they repeat the address, and what a name means is nobody's business.
                reasons.append(os.strerror(error.errno) if error.errno else late)
        tried = ", ".join(dict.fromkeys(reasons))
        raise FetchFailure(f"{self._called(target)}: it cannot be connected to: {tried}", retryable=True)

    def _called(self, target: Target) -> str:
        """What messages call a server; clients need not know the proxy's name."""
        return "the proxy (--fetch-proxy)" if target is self._proxy else target.host


def _read_proxy(url: str) -> Target:
    try:
        proxy = parse(url)
    except FetchFailure as failure:
        raise StartupError(f"--fetch-proxy: {failure.reason}") from None
    if proxy.scheme != "http":
        raise StartupError(f"--fetch-proxy: a proxy is spoken to by http, not {proxy.scheme}")
    return proxy
