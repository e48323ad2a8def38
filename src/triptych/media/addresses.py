"""Which IP addresses may be dialled for a stranger, and how a host that is a number is read.

    host ── read_literal ──> address, or None: a name, for the resolver
    address ── refusal ──> None: it may be dialled; otherwise what it is

Written out as tables, because what the standard library counts as global changes from one patch of it to the next.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

IpAddress = IPv4Address | IPv6Address

_METADATA = {
    ip_address("169.254.169.254"),
    ip_address("169.254.170.2"),
    ip_address("169.254.0.23"),
    ip_address("100.100.100.200"),
    ip_address("168.63.129.16"),  # global by its number, and yet answered by the machine's own host
    ip_address("192.0.0.192"),
    ip_address("fd00:ec2::254"),
    ip_address("fd00:ec2::23"),
    ip_address("fd20:ce::254"),
    ip_address("fd00:c1::a9fe:a9fe"),
}
"""Where clouds tell a machine its secrets. Never dialled, private networks or not."""

_PRIVATE = {
    ip_network("127.0.0.0/8"): "a loopback address",
    ip_network("10.0.0.0/8"): "a private address",
    ip_network("172.16.0.0/12"): "a private address",
    ip_network("192.168.0.0/16"): "a private address",
    ip_network("100.64.0.0/10"): "a private address of a carrier",
    ip_network("::1/128"): "a loopback address",
    ip_network("fc00::/7"): "a private address",
}
"""What ``private`` permits. Link-local addresses are not among them."""

_REFUSED = {
    ip_network("0.0.0.0/8"): "an unspecified address",
    ip_network("169.254.0.0/16"): "a link-local address",
    ip_network("192.0.0.0/24"): "a reserved address",
    ip_network("192.0.2.0/24"): "a documentation address",
    ip_network("192.31.196.0/24"): "a reserved address",
    ip_network("192.52.193.0/24"): "a reserved address",
    ip_network("192.88.99.0/24"): "a reserved address",
    ip_network("192.175.48.0/24"): "a reserved address",
    ip_network("198.18.0.0/15"): "a benchmark address",
    ip_network("198.51.100.0/24"): "a documentation address",
    ip_network("203.0.113.0/24"): "a documentation address",
    ip_network("224.0.0.0/4"): "a multicast address",
    ip_network("240.0.0.0/4"): "a reserved address",
    ip_network("::/128"): "an unspecified address",
    ip_network("fe80::/10"): "a link-local address",
    ip_network("fec0::/10"): "a site-local address",
    ip_network("ff00::/8"): "a multicast address",
    ip_network("2001:db8::/32"): "a documentation address",
    ip_network("3fff::/20"): "a documentation address",
    ip_network("2001:2::/48"): "a benchmark address",
    # Tunnels: they end at whatever address is inside them, by way of a machine that nobody here knows. Dead on the
    # Internet, so refused whatever they embed.
    ip_network("::/96"): "an IPv4-compatible address",
    ip_network("2002::/16"): "a 6to4 address",
    ip_network("2001::/32"): "a Teredo address",
    ip_network("64:ff9b:1::/48"): "a local NAT64 address",
    ip_network("2001::/23"): "a reserved address",
    ip_network("2620:4f:8000::/48"): "a reserved address",
}
"""The first that contains an address says what it is."""

_GLOBAL = ip_network("2000::/3")
"""All of IPv6 that is given out for hosts of the Internet; the rest is refused."""
_MAPPED = ip_network("::ffff:0:0/96")
_NAT64 = ip_network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)
"""Bits 64 to 95 of an address whose last 32 bits are the IPv4 address of its host."""


def refusal(address: IpAddress, *, private: bool = False) -> str | None:
    """What the address is, if it must not be dialled; None if it may.

    Args:
        address: one answer of the resolver.
        private: whether loopback and private networks may be dialled too. Link-local addresses and the metadata
            services of clouds never are.
    """
    if isinstance(address, IPv4Address):
        return _judged(address, private=private)
    if address.scope_id is not None:
        return "an address with a zone"
    inner = IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _MAPPED:
        return _inside("an IPv4-mapped address", inner, private=private)
    if address in _NAT64:
        return _inside("a NAT64 address", inner, private=private)
    if (reason := _judged(address, private=private)) is not None:
        return reason
    if int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        return _inside("an ISATAP address", inner, private=private)
    return None


def is_private(address: IpAddress) -> bool:
    """Whether permission to dial private networks is all that it lacks."""
    return refusal(address) is not None and refusal(address, private=True) is None


def _judged(address: IpAddress, *, private: bool) -> str | None:
    """The verdict on an address as it stands."""
    if address in _METADATA:
        return "the address of a metadata service"
    if (reason := next((what for network, what in _PRIVATE.items() if address in network), None)) is not None:
        return None if private else reason
    if (reason := next((what for network, what in _REFUSED.items() if address in network), None)) is not None:
        return reason
    return None if address.version == 4 or address in _GLOBAL else "a reserved address"


def _inside(form: str, embedded: IPv4Address, *, private: bool) -> str | None:
    """The verdict on an address that leads to the IPv4 address inside it."""
    reason = _judged(embedded, private=private)
    return None if reason is None else f"{form} of {reason}"


_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*")
_LOOKS_NUMERIC = re.compile(r"0[xX][0-9a-fA-F]*|[0-9]+")


def read_literal(host: str) -> IpAddress | None:
    """The address that a host is, written in any way the system's resolver reads; None if it is a name.

    IPv4 may have one to four parts, each decimal, octal (``0177``) or hexadecimal (``0x7f``), the last of which fills
    what is left: ``2130706433``, ``127.1`` and ``0x7f.0.0.1`` are 127.0.0.1.

    Raises:
        ValueError: it is neither: its last part is a number, and no name ends in one.
    """
    if ":" in host:
        return IPv6Address(host)
    parts = host.split(".")
    if not _LOOKS_NUMERIC.fullmatch(parts[-1]):
        return None
    if len(parts) > 4 or not all(_NUMBER.fullmatch(part) for part in parts):
        raise ValueError("it ends in a number, and is no IPv4 address")
    *leading, rest = (_number(part) for part in parts)
    room = 8 * (4 - len(leading))  # bits
    if any(byte > 0xFF for byte in leading) or rest >= 1 << room:
        raise ValueError("a part of the IPv4 address is too large")
    return IPv4Address(int.from_bytes(bytes(leading), "big") << room | rest)


def _number(digits: str) -> int:
    if digits[:2] in ("0x", "0X"):
        return int(digits, 16)
    return int(digits, 8 if digits[0] == "0" else 10)
