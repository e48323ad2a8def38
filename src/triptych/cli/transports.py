"""How KV and encoder rows move between this engine and others: what the flags say, built."""

from __future__ import annotations

import os
import resource
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from triptych.core.errors import StartupError
from triptych.roles.contract import RoleName
from triptych.wire.handoff_signature import HandoffSigner

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.cli.options import EncoderOptions, HandoffOptions
    from triptych.transport.contract import BlockMemory, Fetcher, Publisher, SessionEvent

    Tell = Callable[[str, SessionEvent], None]

SHARED_MEMORY = Path("/dev/shm")
SHARED_DIR: Final = "shared-dir"
NIXL: Final = "nixl"


class Transport(Protocol):
    """One way for blocks to move; makes this engine's end, or both ends where it hands over and takes over."""

    @property
    def backend(self) -> str:
        """Its name."""
        ...

    def publisher(self, pool: BlockMemory, instance_id: str, tell: Tell) -> Publisher:
        """The producer's side."""
        ...

    def fetcher(self, pool: BlockMemory, instance_id: str) -> Fetcher:
        """The consumer's side."""
        ...


class SharedDir:
    """Through files of a directory that engines of one host have in common."""

    backend = SHARED_DIR

    def __init__(self, directory: Path, ttl: float) -> None:
        self._directory = directory
        self._ttl = ttl

    def publisher(self, pool: BlockMemory, instance_id: str, tell: Tell) -> Publisher:
        """The producer's side."""
        from triptych.transport.shared_dir_publisher import SharedDirLimits, SharedDirPublisher

        limits = SharedDirLimits(orphan_seconds=self._ttl)
        limits = replace(limits, max_sessions=max(limits.max_sessions, _most_sessions(pool)))
        return SharedDirPublisher(pool, instance_id, tell, self._directory, limits)

    def fetcher(self, pool: BlockMemory, instance_id: str) -> Fetcher:
        """The consumer's side."""
        from triptych.transport.shared_dir_fetcher import SharedDirFetcher

        return SharedDirFetcher(pool, instance_id, self._directory, self._ttl)


class Nixl:
    """By reading the other engine's memory, over the network where there is one."""

    backend = NIXL

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode("utf-8", "surrogateescape")

    def publisher(self, pool: BlockMemory, instance_id: str, tell: Tell) -> Publisher:
        """The producer's side."""
        from triptych.transport.nixl_agent import NixlOptions
        from triptych.transport.nixl_publisher import NixlPublisher

        return NixlPublisher(pool, instance_id, tell, NixlOptions(self._secret))

    def fetcher(self, pool: BlockMemory, instance_id: str) -> Fetcher:
        """The consumer's side."""
        from triptych.transport.nixl_agent import NixlOptions
        from triptych.transport.nixl_fetcher import NixlFetcher

        return NixlFetcher(pool, instance_id, NixlOptions(self._secret))


def check_flags(role: RoleName, handoff: HandoffOptions, encoder: EncoderOptions, *, requires_handoff: bool) -> None:
    """Refuse flags that contradict each other or the role. What only says how something is done may be idle.

    Raises:
        StartupError: naming the flags and the way out.
    """
    if role is RoleName.DECODE and encoder.encoder_transport is not None:
        raise StartupError("--encoder-transport: a decode engine takes no pictures; the prefill engine does")
    if role is RoleName.ENCODER and handoff.kv_transport is not None:
        raise StartupError("--kv-transport: an encoder engine has no KV; --encoder-transport moves what it encodes")
    if requires_handoff and role in (RoleName.DECODE, RoleName.ENCODER):
        raise StartupError(f"--requires-handoff: {role.value} engines take no encoded pictures")
    if requires_handoff and encoder.encoder_transport is None:
        raise StartupError("--requires-handoff needs --encoder-transport: pictures could reach this engine in no way")
    directory = _kv_directory(handoff)
    if directory == _row_directory(encoder):
        raise StartupError(f"--kv-directory and --encoder-directory are both {directory}; give each its own")


def transport_of(options: HandoffOptions, *, needed: bool, device: str) -> Transport | None:
    """How KV moves. None: it does not. Nothing is opened yet.

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
    return _transport("kv", kind, _kv_directory(options), options.session_ttl, options.handoff_secret)


def row_transport_of(options: EncoderOptions, secret: str | None, *, needed: bool) -> Transport | None:
    """How encoder rows move; see ``transport_of``. They pass through memory of the host, whatever the device is."""
    kind = options.encoder_transport or (SHARED_DIR if needed else None)
    if kind is None:
        return None
    return _transport("encoder", kind, _row_directory(options), options.encoder_ttl, secret)


def _transport(flag: str, kind: str, directory: Path, ttl: float, secret: str | None) -> Transport:
    if kind == SHARED_DIR:
        if not directory.parent.is_dir():
            raise StartupError(f"--{flag}-directory {directory}: there is no directory {directory.parent}")
        return SharedDir(directory, ttl)
    if secret is None:
        raise StartupError(f"--{flag}-transport {NIXL} needs a hand-off secret: set TRIPTYCH_HANDOFF_SECRET")
    return Nixl(secret)


def signer_of(options: HandoffOptions) -> HandoffSigner | None:
    """Signs with the secret, where there is one.

    Raises:
        StartupError: it is too short.
    """
    return None if options.handoff_secret is None else HandoffSigner(options.handoff_secret)


def _most_sessions(pool: BlockMemory) -> int:
    """Each has a block at least and an open file, and half of the files that may be open are for other things."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(len(pool.memory), files // 2)


def _kv_directory(options: HandoffOptions) -> Path:
    return options.kv_directory or _own_directory("kv")


def _row_directory(options: EncoderOptions) -> Path:
    return options.encoder_directory or _own_directory("rows")


def _own_directory(what: str) -> Path:
    """Where engines of this user meet when nothing else is said: in memory where the system has a place for it."""
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return base / f"triptych-{what}-{os.geteuid()}"
