"""Certificates made for one test."""

from __future__ import annotations

import datetime
import ipaddress
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path

DAY = datetime.timedelta(days=1)
PEM = serialization.Encoding.PEM


class Authority:
    """Signs certificates; everything it makes lies in one directory as NAME.pem and NAME.key."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        certificate = _builder(self._name, self._name, self._key).add_extension(constraints, critical=True)
        self.path = directory / f"{name}.pem"
        """Its own certificate."""
        self.path.write_bytes(certificate.sign(self._key, hashes.SHA256()).public_bytes(PEM))

    def issue(self, name: str, *, password: bytes | None = None, host: str = "") -> tuple[Path, Path]:
        """A certificate for 127.0.0.1, or for another host by its name, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.DNSName(host) if host else x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        here = x509.SubjectAlternativeName([subject])
        certificate = _builder(_name(name), self._name, key).add_extension(here, critical=False)
        paths = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        paths[0].write_bytes(certificate.sign(self._key, hashes.SHA256()).public_bytes(PEM))
        lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        paths[1].write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, lock))
        return paths


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
    )
