"""How KV moves between this engine and others: what the flags say, built."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from triptych.core.errors import StartupError
from triptych.wire.session_signature import SessionSigner

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.cli.options import HandoffOptions
    from triptych.transport.contract import KvFetcher, KvPool, KvPublisher, SessionEvent

    Tell = Callable[[str, SessionEvent], None]

SHARED_MEMORY = Path("/dev/shm")
SHARED_DIR = "shared-dir"
NIXL = "nixl"


class Transport(Protocol):
    """One way for KV to move; makes this engine's end, or both ends where it hands over and takes over."""

    @property
    def backend(self) -> str:
        """Its name."""
        ...

    def publisher(self, pool: KvPool, instance_id: str, tell: Tell) -> KvPublisher:
        """The producer's side."""
        ...

    def fetcher(self, pool: KvPool, instance_id: str) -> KvFetcher:
        """The consumer's side."""
        ...


class SharedDir:
    """Through files of a directory that engines of one host have in common."""

    backend = SHARED_DIR

    def __init__(self, directory: Path, ttl: float) -> None:
        self._directory = directory
        self._ttl = ttl

    def publisher(self, pool: KvPool, instance_id: str, tell: Tell) -> KvPublisher:
        """The producer's side."""
        from triptych.transport.shared_dir_publisher import SharedDirLimits, SharedDirPublisher

        limits = SharedDirLimits(orphan_seconds=self._ttl)
        return SharedDirPublisher(pool, instance_id, tell, self._directory, limits)

    def fetcher(self, pool: KvPool, instance_id: str) -> KvFetcher:
        """The consumer's side."""
        from triptych.transport.shared_dir_fetcher import SharedDirFetcher

        return SharedDirFetcher(pool, instance_id, self._directory, self._ttl)


class Nixl:
    """By reading the other engine's memory, over the network where there is one."""

    backend = NIXL

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode("utf-8", "surrogateescape")

    def publisher(self, pool: KvPool, instance_id: str, tell: Tell) -> KvPublisher:
        """The producer's side."""
        from triptych.transport.nixl_agent import NixlOptions
        from triptych.transport.nixl_publisher import NixlPublisher

        return NixlPublisher(pool, instance_id, tell, NixlOptions(self._secret))

    def fetcher(self, pool: KvPool, instance_id: str) -> KvFetcher:
        """The consumer's side."""
        from triptych.transport.nixl_agent import NixlOptions
        from triptych.transport.nixl_fetcher import NixlFetcher

        return NixlFetcher(pool, instance_id, NixlOptions(self._secret))


def transport_of(options: HandoffOptions, *, needed: bool, device: str) -> Transport | None:
    """What the flags ask for; None: KV does not move. Nothing is opened yet.

    Args:
        options: the flags.
        needed: the engine's role is nothing without one.
        device: of the engine.

    Raises:
        StartupError: naming the flag.
    """
    kind = options.kv_transport or (SHARED_DIR if needed else None)
    if kind is None:
        return None
    if not device.startswith("cpu"):
        raise StartupError(f"KV moves between engines on --device cpu only, not {device}")
    if kind == SHARED_DIR:
        directory = options.kv_directory or own_directory()
        if not directory.parent.is_dir():
            raise StartupError(f"--kv-directory {directory}: there is no directory {directory.parent}")
        return SharedDir(directory, options.session_ttl)
    if options.handoff_secret is None:
        raise StartupError(f"--kv-transport {NIXL} needs a hand-off secret: set TRIPTYCH_HANDOFF_SECRET")
    return Nixl(options.handoff_secret)


def signer_of(options: HandoffOptions) -> SessionSigner | None:
    """Signs with the secret, where there is one.

    Raises:
        StartupError: it is too short.
    """
    return None if options.handoff_secret is None else SessionSigner(options.handoff_secret)


def own_directory() -> Path:
    """Where engines of this user meet when nothing else is said: in memory where the system has a place for it."""
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return base / f"triptych-kv-{os.geteuid()}"
