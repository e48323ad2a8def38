"""The files of an encrypted listener."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from triptych.core.errors import StartupError
from triptych.wire.tls import read_certificates, read_pair

if TYPE_CHECKING:
    from pathlib import Path

CERTIFICATE_FLAG = "--tls-certificate"
KEY_FLAG = "--tls-key"
CLIENT_CA_FLAG = "--tls-client-ca"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files, read when the server starts."""

    certificate: Path
    """The server's certificate, and those between it and its authority."""
    key: Path
    """Its private key."""
    client_ca: Path | None = None
    """The authorities that sign clients' certificates: with them a client without one is refused."""

    @classmethod
    def of(cls, certificate: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
        """The files as flags give them; None when no flag is given.

        Raises:
            StartupError: a flag lacks the one that belongs to it.
        """
        if certificate is None and key is None and client_ca is None:
            return None
        if certificate is None or key is None:
            raise StartupError(f"{CERTIFICATE_FLAG} and {KEY_FLAG} go together, and {CLIENT_CA_FLAG} needs both")
        return cls(certificate, key, client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """What gRPC takes; also called before a long start, to see whether the files are usable.

        Raises:
            StartupError: a file cannot be read, is not PEM, or certificate and key are no pair.
        """
        certificate, key = read_pair(self.certificate, self.key, (CERTIFICATE_FLAG, KEY_FLAG))
        ca = None if self.client_ca is None else read_certificates(self.client_ca, CLIENT_CA_FLAG)
        return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=ca is not None)
