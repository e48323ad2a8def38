"""Certificates and keys: read, and found to be usable, before anything depends on them.

What is wrong is said as one line that names the flag and the file; the content of a key is never part of it.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from triptych.core.errors import StartupError, one_line

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class ChannelTls:
    """How a client knows its engines, and is known to them."""

    ca: Path | None = None
    """PEM with the authorities that may have signed an engine's certificate; None for those that gRPC comes with."""
    certificate: Path | None = None
    """PEM with the client's own certificate, and those between it and its authority."""
    key: Path | None = None
    """PEM with the private key of that certificate."""

    def credentials(self) -> grpc.ChannelCredentials:
        """What gRPC takes.

        Raises:
            StartupError: a file is not usable, or certificate and key are not both given.
        """
        ca = None if self.ca is None else read_certificates(self.ca, "--engine-ca")
        if (self.certificate is None) != (self.key is None):
            raise StartupError("--engine-certificate and --engine-key go together")
        if self.certificate is None or self.key is None:
            return grpc.ssl_channel_credentials(root_certificates=ca)
        pair = read_pair(self.certificate, self.key, ("--engine-certificate", "--engine-key"))
        return grpc.ssl_channel_credentials(ca, private_key=pair[1], certificate_chain=pair[0])


def read_certificates(path: Path, flag: str) -> bytes:
    """PEM with at least one certificate.

    Raises:
        StartupError: it cannot be read or holds none.
    """
    data = _read(path, flag)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except OSError as error:  # SSLError is one
        raise StartupError(f"{flag} {path} holds no certificate in PEM form: {one_line(error)}") from None
    return data


def read_pair(certificate: Path, key: Path, flags: tuple[str, str]) -> tuple[bytes, bytes]:
    """A certificate chain and its private key, both PEM.

    Raises:
        StartupError: one of them cannot be read or is of another form, the key has a password, or they are no pair.
    """
    chain = read_certificates(certificate, flags[0])
    secret = _read(key, flags[1])

    def refuse() -> str:
        raise StartupError(f"{flags[1]} {key} is protected by a password; give a key without one")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise StartupError(
                f"{flags[1]} {key} is not the key of the certificate in {flags[0]} {certificate}"
            ) from None
        raise StartupError(
            f"{flags[1]} {key} is not usable as the private key of {flags[0]} {certificate}: {one_line(error)}"
        ) from None
    return chain, secret


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"{flag} {path} cannot be read: {error.strerror or one_line(error)}") from None
