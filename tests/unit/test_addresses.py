from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.media.addresses import is_private, read_literal, refusal

ALLOWED = [
    *("1.1.1.1", "8.8.8.8", "93.184.216.34", "9.255.255.255", "11.0.0.0", "126.255.255.255", "128.0.0.0"),
    *("100.63.255.255", "100.128.0.0", "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0"),
    *("192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255", "168.63.129.17"),
    *("2606:4700::1111", "2a00:1450:4001:830::200e", "2400:cb00::1", "3ffe:ffff::1", "2003::1"),
    *("::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2606:4700::5efe:8.8.8.8"),
]

REFUSED = {
    "0.0.0.0": "an unspecified address",
    "0.255.255.255": "an unspecified address",
    "127.0.0.1": "a loopback address",
    "127.255.255.255": "a loopback address",
    "10.0.0.0": "a private address",
    "10.255.255.255": "a private address",
    "172.16.0.0": "a private address",
    "172.31.255.255": "a private address",
    "192.168.0.0": "a private address",
    "192.168.255.255": "a private address",
    "100.64.0.0": "a private address of a carrier",
    "100.127.255.255": "a private address of a carrier",
    "169.254.0.1": "a link-local address",
    "169.254.255.255": "a link-local address",
    "169.254.169.254": "the address of a metadata service",
    "169.254.170.2": "the address of a metadata service",
    "100.100.100.200": "the address of a metadata service",
    "168.63.129.16": "the address of a metadata service",
    "192.0.0.192": "the address of a metadata service",
    "192.0.0.9": "a reserved address",
    "192.0.2.1": "a documentation address",
    "198.51.100.1": "a documentation address",
    "203.0.113.1": "a documentation address",
    "192.88.99.1": "a reserved address",
    "198.18.0.0": "a benchmark address",
    "198.19.255.255": "a benchmark address",
    "224.0.0.1": "a multicast address",
    "239.255.255.255": "a multicast address",
    "240.0.0.1": "a reserved address",
    "255.255.255.255": "a reserved address",
    "::": "an unspecified address",
    "::1": "a loopback address",
    "fc00::1": "a private address",
    "fdff:ffff::1": "a private address",
    "fd00:ec2::254": "the address of a metadata service",
    "fd20:ce::254": "the address of a metadata service",
    "fe80::1": "a link-local address",
    "fe80::1%eth0": "an address with a zone",
    "2606:4700::1111%1": "an address with a zone",
    "fec0::1": "a site-local address",
    "ff02::1": "a multicast address",
    "ff0e::1": "a multicast address",
    "2001:db8::1": "a documentation address",
    "3fff::1": "a documentation address",
    "3fff:fff:ffff::1": "a documentation address",
    "2001:2::1": "a benchmark address",
    "2001:1::1": "a reserved address",
    "2001:20::1": "a reserved address",
    "100::1": "a reserved address",
    "4000::1": "a reserved address",
    "5f00::1": "a reserved address",
    "1::1": "a reserved address",
    "::ffff:127.0.0.1": "an IPv4-mapped address of a loopback address",
    "::ffff:10.1.2.3": "an IPv4-mapped address of a private address",
    "::ffff:169.254.169.254": "an IPv4-mapped address of the address of a metadata service",
    "::ffff:0.0.0.0": "an IPv4-mapped address of an unspecified address",
    "::ffff:224.0.0.1": "an IPv4-mapped address of a multicast address",
    "64:ff9b::127.0.0.1": "a NAT64 address of a loopback address",
    "64:ff9b::192.168.0.1": "a NAT64 address of a private address",
    "64:ff9b::a9fe:a9fe": "a NAT64 address of the address of a metadata service",
    "64:ff9b:1::1": "a local NAT64 address",
    "64:ff9b:1:0:8:808:800:0": "a local NAT64 address",
    "::127.0.0.1": "an IPv4-compatible address",
    "::8.8.8.8": "an IPv4-compatible address",
    "2002:7f00:1::": "a 6to4 address",
    "2002:808:808::1": "a 6to4 address",
    "2001:0:4136:e378:8000:63bf:f5ff:fffe": "a Teredo address",
    "2001::1": "a Teredo address",
    "2606:4700::5efe:10.0.0.1": "an ISATAP address of a private address",
    "2606:4700::200:5efe:127.0.0.1": "an ISATAP address of a loopback address",
}

PRIVATE = [
    *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "::1", "fd12::1"),
    *("::ffff:127.0.0.1", "64:ff9b::10.0.0.1", "2606:4700::5efe:10.0.0.1"),
]
"""Those that permission opens."""


@pytest.mark.parametrize("text", ALLOWED)
def test_what_may_be_dialled(text: str) -> None:
    assert refusal(ip_address(text)) is None
    assert refusal(ip_address(text), private=True) is None
    assert not is_private(ip_address(text))


@pytest.mark.parametrize("text", REFUSED)
def test_what_may_not(text: str) -> None:
    assert refusal(ip_address(text)) == REFUSED[text]


@pytest.mark.parametrize("text", [*REFUSED, *PRIVATE])
def test_permission_opens_private_networks_and_nothing_else(text: str) -> None:
    assert (refusal(ip_address(text), private=True) is None) == is_private(ip_address(text))
    reason = refusal(ip_address(text))
    assert reason is not None
    opened = ("loopback" in reason or "private" in reason) and "metadata" not in reason
    assert is_private(ip_address(text)) == opened


@given(st.integers(0, 2**32 - 1).map(IPv4Address))
def test_an_address_that_is_not_global_is_refused_in_every_form(address: IPv4Address) -> None:
    reason = refusal(address)
    if not address.is_global or address.is_multicast:
        assert reason is not None
    number = int(address)
    for form in (0xFFFF << 32, 0x64FF9B << 96, (0x26064700 << 96) | (0x5EFE << 32)):
        inner = refusal(IPv6Address(form | number))
        assert (inner is None) == (reason is None)
        assert inner is None or str(inner).endswith(str(reason))
    for tunnel in (IPv6Address(number), IPv6Address((0x2002 << 112) | (number << 80) | 1)):
        assert refusal(tunnel) is not None


@given(st.integers(0, 2**128 - 1).map(IPv6Address))
def test_outside_the_global_block_no_ipv6_address_is_dialled(address: IPv6Address) -> None:
    if refusal(address) is None:
        assert address.ipv4_mapped is not None or int(address) >> 125 == 1 or int(address) >> 32 == 0x64FF9B << 64
    if not address.is_global or address.is_multicast:
        assert refusal(address) is not None


@pytest.mark.parametrize(
    ("host", "address"),
    {
        "127.0.0.1": "127.0.0.1",
        "2130706433": "127.0.0.1",
        "0x7f000001": "127.0.0.1",
        "0X7F000001": "127.0.0.1",
        "017700000001": "127.0.0.1",
        "0177.0.0.1": "127.0.0.1",
        "0x7f.1": "127.0.0.1",
        "0x7f.0x0.0x0.0x1": "127.0.0.1",
        "127.1": "127.0.0.1",
        "127.0.1": "127.0.0.1",
        "127.65535": "127.0.255.255",
        "0": "0.0.0.0",
        "00": "0.0.0.0",
        "0xa9.0376.43518": "169.254.169.254",
        "2852039166": "169.254.169.254",
        "8.8.8.8": "8.8.8.8",
        "4294967295": "255.255.255.255",
        "::1": "::1",
        "0:0:0:0:0:0:0:1": "::1",
        "::ffff:127.0.0.1": "::ffff:7f00:1",
        "FD00:EC2::254": "fd00:ec2::254",
    }.items(),
)
def test_hosts_that_are_numbers(host: str, address: str) -> None:
    assert str(read_literal(host)) == address


@pytest.mark.parametrize("host", ["a.example", "localhost", "0x7f.example", "1.2.3.4.example", "0xg", "127-0-0-1", ""])
def test_names(host: str) -> None:
    assert read_literal(host) is None


@pytest.mark.parametrize(
    "host",
    [
        *("256.0.0.1", "1.2.3.256", "1.2.65536", "1.16777216", "4294967296", "08", "1.2.3.09", "0x", "1.2.3.0x"),
        *("1.2.3.4.5", "1..2", ".1", "a.1", "example.255", "1.2.3.4.0x1", "::g", "1:2", ":", "12345::"),
    ],
)
def test_hosts_that_end_in_a_number_and_are_no_address(host: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_literal(host)


NUMBER = st.integers(0, 2**33).flatmap(
    lambda n: st.sampled_from([str(n), f"0{n:o}", f"0x{n:x}", f"0X{n:X}", "08", "0"])
)


@given(st.lists(NUMBER | st.integers(0, 300).map(str), min_size=1, max_size=5).map(".".join))
def test_numbers_are_read_as_the_systems_resolver_reads_them(host: str) -> None:
    try:
        ours = str(read_literal(host))
    except ValueError:
        ours = ""
    try:
        theirs = socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        theirs = ""
    assert ours == theirs
