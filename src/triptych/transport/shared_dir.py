"""A private directory through which processes of one host hand files over. A file's name says whose it is.

    KEY.OWNER.part           OWNER is writing it
    KEY.OWNER.ready          whoever renames it has it
    KEY.OWNER.TAKER.taken    TAKER has it, and removes it or gives it back
    KEY.OWNER.back           given back; OWNER makes it ready again, or removes it
    KEY.OWNER.void           nobody may take it; OWNER removes it
    OWNER.alive              locked for as long as OWNER lives: the kernel unlocks it, however a process ends

KEY, OWNER and TAKER are 32 hexadecimal digits. A name is only ever changed by rename, so everyone sees one state after
the other, and one of many who want the same file gets it. Only OWNER makes a file ready, so that nobody can take what
it has withdrawn meanwhile; what comes back to an owner that is dead is removed. Nothing else in the directory is
touched.

Whoever lives here removes what the dead have left. What a dead TAKER had is given back, unless a receipt in it says
that TAKER had everything.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from typing import TYPE_CHECKING

from blake3 import blake3

from triptych.core.errors import Internal, StartupError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY_BYTES = 16

PART = "part"
READY = "ready"
TAKEN = "taken"
BACK = "back"
VOID = "void"
COLLECT_SECONDS = 2.0
"""At most this long after a consumer was killed, what it had comes back."""

_OWNED = re.compile(r"[0-9a-f]{32}\.([0-9a-f]{32})\.(?:part|ready|back|void)")
_TAKEN = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.([0-9a-f]{32})\.taken")
_ALIVE = re.compile(r"([0-9a-f]{32})\.alive")


def owner_of(side: str, instance_id: str) -> str:
    """OWNER of one side (``producer``, ``consumer``) of one incarnation."""
    return blake3(f"{side} {instance_id}".encode()).hexdigest(KEY_BYTES)


def write_receipt(descriptor: int, key: bytes) -> None:
    """Mark a file, before it loses its name, as one whose consumer has everything.

    Raises:
        OSError: it cannot be written.
    """
    os.pwrite(descriptor, key, 0)


def has_receipt(descriptor: int, key: bytes) -> bool:
    """Whether that was done; nobody who writes blocks knows the key."""
    return os.pread(descriptor, len(key), 0) == key


class SharedDirectory:
    """The directory, as one owner sees it. Every path in it is a name below a descriptor: nobody can move it away."""

    def __init__(self, path: Path, owner: str, orphan_seconds: float) -> None:
        """Make or check the directory, be alive in it, and remove what the dead left.

        Args:
            path: of the directory; the one above it must exist.
            owner: as ``owner_of`` has it.
            orphan_seconds: how long a file that could still be taken outlives its owner's process.

        Raises:
            StartupError: it is not private, or cannot be used.
        """
        self.owner = owner
        self._orphan_seconds = orphan_seconds
        self._collected = float("-inf")
        try:
            self._directory = _open_private(path)
        except OSError as error:
            raise StartupError(f"the directory for sessions, {path}: {one_line(error)}") from error
        try:
            self._alive = self._become_alive()
        except OSError as error:
            os.close(self._directory)
            raise StartupError(f"the directory for sessions, {path}: {one_line(error)}") from error
        self.collect()

    def create(self, name: str) -> int:
        """A new, empty file; its descriptor.

        Raises:
            OSError: no room, no descriptors, no directory.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._directory)

    def open(self, name: str) -> int:
        """An existing file; its descriptor.

        Raises:
            FileNotFoundError: there is none.
            Internal: it is no plain file of ours.
            OSError: it cannot be opened.
        """
        # not blocking: somebody's pipe of that name would wait for its other end
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self._directory)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink <= 1:
            return descriptor
        os.close(descriptor)
        raise Internal("it is no plain file of this user's")

    def exists(self, name: str) -> bool:
        """Whether there is such a name now."""
        try:
            os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def rename(self, name: str, to: str) -> bool:
        """Whether the file was there to be renamed."""
        try:
            os.rename(name, to, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file that may be gone already."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._directory)

    def give_back(self, taken: str) -> None:
        """Let go of a file that was taken and is whole: it is its owner's again, if that lives."""
        key, owner, *_ = taken.split(".")
        back = f"{key}.{owner}.{BACK}"
        if self.is_alive(owner):
            self.rename(taken, back)
        else:
            self.remove(taken)
        if not self.is_alive(owner):  # it has closed meanwhile, perhaps before it could see this
            self.remove(back)

    def is_alive(self, owner: str) -> bool:
        """Whether the owner's process lives; true where that cannot be found out."""
        try:
            descriptor = os.open(
                f"{owner}.alive", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._directory
            )
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def collect(self) -> float:
        """See to what the dead left, if that has not been done lately; the seconds until it is due again."""
        pace = min(self._orphan_seconds / 4, COLLECT_SECONDS)
        now = time.monotonic()
        if now < self._collected + pace:
            return self._collected + pace - now
        self._collected = now
        with contextlib.suppress(OSError):  # later, then
            for name in self._orphans():
                with contextlib.suppress(OSError, Internal):  # what cannot be removed now can be later
                    self._collect(name)
        return pace

    def close(self) -> None:
        """Be dead, and leave nothing."""
        with contextlib.suppress(OSError):
            self.remove(f"{self.owner}.alive")
            for name in self._names():  # from here on, whoever gives back removes it himself
                if (match := _OWNED.fullmatch(name)) and match[1] == self.owner:
                    self.remove(name)
        os.close(self._alive)
        os.close(self._directory)

    def _names(self) -> list[str]:
        with os.scandir(self._directory) as entries:
            return [entry.name for entry in entries]

    def _orphans(self) -> Iterator[str]:
        """Files of the dead; one that can still be taken counts only after a while."""
        alive = {self.owner: True}
        oldest = time.time() - self._orphan_seconds
        for name in self._names():
            if not (_OWNED.fullmatch(name) or _TAKEN.fullmatch(name) or _ALIVE.fullmatch(name)):
                continue
            owner = name.split(".")[-2]
            if owner not in alive:
                alive[owner] = self.is_alive(owner)
            if alive[owner] or (name.endswith(f".{READY}") and self._changed_since(name, oldest)):
                continue
            yield name

    def _collect(self, name: str) -> None:
        """One file of somebody dead."""
        if _ALIVE.fullmatch(name):
            self._bury(name)
        elif _TAKEN.fullmatch(name):
            self._inherit(name)
        else:
            self.remove(name)

    def _inherit(self, name: str) -> None:
        """What a dead taker had: somebody else's, unless it is spent."""
        descriptor = self.open(name)
        try:
            spent = has_receipt(descriptor, bytes.fromhex(name.split(".")[0]))
        finally:
            os.close(descriptor)
        if spent:
            self.remove(name)
        else:
            self.give_back(name)

    def _changed_since(self, name: str, moment: float) -> bool:
        try:
            return os.stat(name, dir_fd=self._directory, follow_symlinks=False).st_ctime > moment
        except FileNotFoundError:
            return True

    def _become_alive(self) -> int:
        name = f"{self.owner}.alive"
        while True:
            try:
                descriptor = self.create(name)
            except FileExistsError:
                if self.is_alive(self.owner):
                    raise
                self._bury(name)
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
            os.close(descriptor)  # buried between the two lines above

    def _bury(self, name: str) -> None:
        """Remove the sign of life of someone dead. Locked meanwhile, so that nobody comes alive by it."""
        with contextlib.suppress(FileNotFoundError):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=self._directory)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.remove(name)
            except BlockingIOError:
                pass
            finally:
                os.close(descriptor)


def _open_private(path: Path) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise StartupError(f"{path} is no directory of its own (a link, or a file); name another one") from error
    status = os.fstat(descriptor)
    reason = ""
    if status.st_uid != os.geteuid():
        reason = f"belongs to user {status.st_uid}, not to {os.geteuid()}, who runs this"
    elif status.st_mode & 0o077:
        reason = f"is open to others (mode {stat.S_IMODE(status.st_mode):04o}); chmod 700 would close it"
    if reason:
        os.close(descriptor)
        raise StartupError(f"the directory for sessions, {path}, {reason}")
    return descriptor
