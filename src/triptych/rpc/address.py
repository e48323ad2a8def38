"""Where a server listens."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple


class Address(NamedTuple):
    """A host and a port as an operator wrote them, or as they turned out."""

    host: str
    """A name or an address, without brackets."""
    port: int
    """0 before binding: any free one."""

    def __str__(self) -> str:
        """HOST:PORT, brackets around an IPv6 host."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def wildcard(self) -> bool:
        """Whether it stands for every address of this machine."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return not self.host

    @property
    def connectable(self) -> Address:
        """What others are told: a wildcard is no place to connect to, the name of this machine is."""
        return self._replace(host=socket.gethostname()) if self.wildcard else self
