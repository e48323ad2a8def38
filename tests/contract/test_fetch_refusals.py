"""Addresses that a stranger must not reach: by number, by name, by redirect, by a name that changes its mind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

import pytest

from tests.contract.web import PUBLIC, LoneFetcher, Site, Web, answer, failure, fetcher, redirect
from triptych.core.config import FetchSettings, MediaLimits
from triptych.core.errors import MediaError, StartupError
from triptych.core.media import Stage
from triptych.media.network import SystemNetwork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

INSIDE = {
    "127.0.0.1": "a loopback address",
    "127.1.2.3": "a loopback address",
    "10.0.0.1": "a private address",
    "172.16.0.1": "a private address",
    "192.168.0.1": "a private address",
    "100.64.0.1": "a private address of a carrier",
    "169.254.1.1": "a link-local address",
    "169.254.169.254": "the address of a metadata service",
    "fd00:ec2::254": "the address of a metadata service",
    "168.63.129.16": "the address of a metadata service",
    "0.0.0.0": "an unspecified address",
    "255.255.255.255": "a reserved address",
    "224.0.0.1": "a multicast address",
    "198.18.0.1": "a benchmark address",
    "192.0.2.1": "a documentation address",
    "::1": "a loopback address",
    "::": "an unspecified address",
    "fd00::1": "a private address",
    "fe80::1": "a link-local address",
    "ff02::1": "a multicast address",
    "::ffff:127.0.0.1": "an IPv4-mapped address of a loopback address",
    "::ffff:169.254.169.254": "an IPv4-mapped address of the address of a metadata service",
    "::ffff:10.0.0.1": "an IPv4-mapped address of a private address",
    "::127.0.0.1": "an IPv4-compatible address",
    "64:ff9b::7f00:1": "a NAT64 address of a loopback address",
    "2002:7f00:1::1": "a 6to4 address",
    "2001:0:7f00:1::1": "a Teredo address",
}

NUMBERS = {
    "2130706433": "a loopback address",
    "0x7f000001": "a loopback address",
    "017700000001": "a loopback address",
    "0177.0.0.1": "a loopback address",
    "0x7f.1": "a loopback address",
    "127.1": "a loopback address",
    "127.0.0.1.": "a loopback address",
    "0": "an unspecified address",
    "0xa9fea9fe": "the address of a metadata service",
    "2852039166": "the address of a metadata service",
    "0251.0376.0251.0376": "the address of a metadata service",
    "169.254.43518": "the address of a metadata service",
    "0300.0250.1": "a private address",
    "[::ffff:7f00:1]": "an IPv4-mapped address of a loopback address",
    "[0:0:0:0:0:ffff:a9fe:a9fe]": "an IPv4-mapped address of the address of a metadata service",
}

HOSTS = {f"[{text}]" if ":" in text else text: reason for text, reason in INSIDE.items()} | NUMBERS
"""As they stand in URLs."""


@pytest.fixture
async def web() -> AsyncIterator[Web]:
    """Every address that must not be dialled is that of a server which would give a secret away."""
    web = Web()
    secret = await web.start(answer(b"secret"), names=())
    for text in INSIDE:
        web.put(secret, named(text), address=text)
        web.put(secret, address=text, port=443)
    yield web
    assert secret.heads == []
    await web.stop()


@pytest.fixture
async def site(web: Web) -> Site:
    """The one that may be asked: a.example."""
    return await web.start(answer())


def named(address: str) -> str:
    """The name of an address of the web."""
    return f"name-of-{address.replace(':', '-')}x.example"


async def refused(web: Web, url: str, **settings: object) -> str:
    error = await failure(fetcher(web, **settings), url)
    assert type(error) is MediaError
    assert error.stage is Stage.FETCH
    return error.reason


@pytest.mark.parametrize(("host", "reason"), HOSTS.items())
async def test_by_number(web: Web, host: str, reason: str) -> None:
    for scheme in ("http", "https"):
        said = await refused(web, f"{scheme}://{host}/latest/meta-data/?q=secret")
        assert f": it leads to {reason}, which is not dialled" in said
    assert web.asked == []
    assert web.dialled == []


@pytest.mark.parametrize(("address", "reason"), INSIDE.items())
async def test_by_name(web: Web, address: str, reason: str) -> None:
    name = named(address)
    said = await refused(web, f"http://{name}/")
    assert said.startswith(f"{name}: it leads to {reason}, which is not dialled")
    assert web.asked == [name]
    assert web.dialled == []


@pytest.mark.parametrize("address", [*INSIDE, "fe80::1%2"])
@pytest.mark.parametrize("place", [0, 2])
async def test_one_bad_address_among_good_ones_refuses_the_name(web: Web, address: str, place: int) -> None:
    addresses = [PUBLIC, "2606:4700::1"]
    addresses.insert(place, address)
    web.names["mixed.example"] = [addresses]
    said = await refused(web, "http://mixed.example/")
    assert said.startswith("mixed.example: it leads to ")
    assert address not in said  # what a name means inside is nobody's business outside
    assert web.dialled == []


@pytest.mark.parametrize("host", HOSTS)
async def test_by_redirect(web: Web, site: Site, host: str) -> None:
    site.answers[0] = redirect(f"http://{host}/")
    assert "which is not dialled" in await refused(web, "http://a.example/")
    assert web.dialled == [(PUBLIC, 80)]


@pytest.mark.parametrize("address", INSIDE)
async def test_by_redirect_to_a_name(web: Web, site: Site, address: str) -> None:
    name = named(address)
    site.answers[0] = redirect(f"//{name}/")
    assert f"{name}: it leads to {INSIDE[address]}" in await refused(web, "http://a.example/")
    assert web.dialled == [(PUBLIC, 80)]


async def test_a_name_that_changes_its_mind_between_two_tries_is_not_asked_again(web: Web, site: Site) -> None:
    web.names["a.example"] = [[PUBLIC], ["127.0.0.1"]]
    site.answers.extendleft([answer(b"", 503), b""])
    assert await fetcher(web).fetch(0, "http://a.example/") == b"a picture"
    assert web.asked == ["a.example"]
    assert web.dialled == [(PUBLIC, 80)] * 3


async def test_a_name_that_changes_its_mind_between_two_hops_is_refused(web: Web, site: Site) -> None:
    web.names["a.example"] = [[PUBLIC], ["127.0.0.1"]]
    site.answers[0] = redirect("/again")
    assert await refused(web, "http://a.example/") == (
        "a.example: it leads to a loopback address, which is not dialled (--fetch-private-networks)"
    )
    assert web.asked == ["a.example", "a.example"]
    assert web.dialled == [(PUBLIC, 80)]


async def test_a_name_that_changes_its_mind_between_two_items_is_refused(web: Web, site: Site) -> None:
    web.names["a.example"] = [[PUBLIC], ["169.254.169.254"]]
    fetching = fetcher(web)
    assert await fetching.fetch(0, "http://a.example/") == b"a picture"
    with pytest.raises(MediaError, match="metadata"):
        await fetching.fetch(0, "http://a.example/")
    assert len(site.heads) == 1
    assert web.dialled == [(PUBLIC, 80)]


async def test_the_knob_is_named_where_it_would_help(web: Web) -> None:
    assert (await refused(web, "http://10.0.0.1/")).endswith("(--fetch-private-networks)")
    assert (await refused(web, "http://[::ffff:a00:1]/")).endswith("(--fetch-private-networks)")
    assert (await refused(web, "http://169.254.169.254/")).endswith("which is not dialled")
    assert (await refused(web, "http://224.0.0.1/")).endswith("which is not dialled")


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "[fd12::1]", "2130706433", "inside.example"])
async def test_private_networks_can_be_opened(host: str) -> None:
    web = Web()
    site = await web.start(answer())
    for address in ("127.0.0.1", "10.0.0.1", "fd12::1"):
        web.put(site, "inside.example", address=address)
    assert await fetcher(web, fetch_private_networks=True).fetch(0, f"http://{host}/") == b"a picture"
    await web.stop()


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "169.254.1.1", "[fd00:ec2::254]", "100.100.100.200", "0.0.0.0", "224.0.0.1", "0xa9fea9fe"],
)
async def test_what_stays_closed_even_then(web: Web, host: str) -> None:
    assert "which is not dialled" in await refused(web, f"http://{host}/", fetch_private_networks=True)
    assert web.dialled == []


@pytest.mark.parametrize("hosts", [(), ("b.example",), ("*.a.example",), ("aa.example",), (PUBLIC,)])
async def test_hosts_that_are_not_listed(web: Web, site: Site, hosts: tuple[str, ...]) -> None:
    said = await refused(web, "http://a.example/?q=secret", fetch_hosts=hosts)
    assert said == "a.example: it is not among the hosts that are fetched from (--fetch-hosts)"
    assert web.asked == []
    assert site.heads == []


@pytest.mark.parametrize("hosts", [("a.example",), ("b.example", "a.example"), ("*.example",), None])
async def test_hosts_that_are_listed(web: Web, site: Site, hosts: tuple[str, ...] | None) -> None:
    assert await fetcher(web, fetch_hosts=hosts).fetch(0, "http://A.example./") == b"a picture"


async def test_the_list_counts_for_redirects_too(web: Web, site: Site) -> None:
    web.put(site, "b.example")
    site.answers.appendleft(redirect("http://b.example/"))
    said = await refused(web, "http://a.example/", fetch_hosts=("a.example",))
    assert said.startswith("b.example: it is not among the hosts")
    assert web.asked == ["a.example"]
    assert len(site.heads) == 1


async def test_being_listed_opens_no_private_network(web: Web) -> None:
    name = named("10.0.0.1")
    assert "a private address" in await refused(web, f"http://{name}/", fetch_hosts=(name,))
    assert "a loopback address" in await refused(web, "http://127.0.0.1/", fetch_hosts=("127.0.0.1",))
    assert web.dialled == []


@pytest.mark.parametrize("port", [22, 25, 6379, 8080])
async def test_ports(web: Web, site: Site, port: int) -> None:
    said = await refused(web, f"http://a.example:{port}/")
    assert said == f"a.example: port {port} is not dialled; 80, 443 are (--fetch-ports)"
    site.answers.appendleft(redirect(f"http://a.example:{port}/"))
    assert f"port {port}" in await refused(web, "http://a.example/")
    web.put(site, address=PUBLIC, port=port)
    assert await fetcher(web, fetch_ports=(port,)).fetch(0, f"http://a.example:{port}/") == b"a picture"
    assert web.dialled == [(PUBLIC, 80), (PUBLIC, port)]


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://a.example/x", "data:,x", "x.png", "http://u:secret@a.example/"]
)
async def test_what_is_no_url_to_fetch_reaches_nobody(web: Web, site: Site, url: str) -> None:
    await refused(web, url)
    assert web.asked == []
    assert site.heads == []


async def test_the_machines_own_network(web: Web) -> None:
    """The real resolver and real sockets, on loopback."""
    site, network = Site(answer(b"by number"), answer(b"by name")), SystemNetwork(2)
    await site.start()
    try:
        ports = {"fetch_ports": (site.port,)}
        closed = LoneFetcher(FetchSettings(**ports), MediaLimits(), network)
        for host in ("127.0.0.1", "localhost", "2130706433", "[::ffff:127.0.0.1]"):
            with pytest.raises(MediaError, match="a loopback address"):
                await closed.fetch(0, f"http://{host}:{site.port}/")
        assert site.heads == []
        opened = LoneFetcher(FetchSettings(**ports, fetch_private_networks=True), MediaLimits(), network)
        assert await opened.fetch(0, f"http://0x7f.1:{site.port}/") == b"by number"
        assert await opened.fetch(0, f"http://localhost:{site.port}/") == b"by name"
        assert site.heads[1].split(b"\r\n")[1] == f"Host: localhost:{site.port}".encode()
    finally:
        await site.stop()
    with pytest.raises(MediaError, match="it cannot be connected to: Connection refused"):
        await opened.fetch(0, f"http://127.0.0.1:{site.port}/")


async def test_the_system_is_asked_for_few_names_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, asked = threading.Event(), []

    def lookup(host: bytes, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.append(host)
        gate.wait()
        if host == b"bad.example":
            raise OSError(5, "no")
        return [(0, 0, 0, "", ("1.1.1.1", 0)), (0, 0, 0, "", ("1.1.1.2", 0)), (0, 0, 0, "", ("1.1.1.1", 0))]

    monkeypatch.setattr("socket.getaddrinfo", lookup)
    network = SystemNetwork(2)
    left = [asyncio.create_task(network.resolve(f"{i}.example")) for i in range(2)]
    while len(asked) < 2:
        await asyncio.sleep(0.001)
    for task in left:
        task.cancel()
    await asyncio.wait(left)
    waiting = [asyncio.create_task(network.resolve(name)) for name in ("x.example", "bad.example")]
    await asyncio.sleep(0.02)  # time to start a third thread, if anything would
    assert len(asked) == 2  # those who left still keep a thread each
    gate.set()
    assert await waiting[0] == ["1.1.1.1", "1.1.1.2"]
    with contextlib.suppress(OSError):
        await waiting[1]
        pytest.fail("a name that cannot be looked up was")
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"fetch_ca_file": "/nonexistent.pem"}, "--fetch-ca-file /nonexistent.pem: "),
        ({"fetch_proxy": "proxy:3128"}, "--fetch-proxy: proxy: URLs are not fetched"),
        ({"fetch_proxy": "https://proxy.example:3128"}, "--fetch-proxy: a proxy is spoken to by http, not https"),
        ({"fetch_proxy": "http://user:secret@proxy.example"}, "--fetch-proxy: the URL has credentials"),
    ],
)
def test_what_cannot_start(web: Web, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        fetcher(web, **settings)
