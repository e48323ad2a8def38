"""One NIXL agent. Whatever is said to the library is said here, by one thread at a time.

What was measured of nixl 1.5 over UCX, and what follows from it:

    its progress thread polls without a pause      there is none: nothing moves but inside the calls below, so whoever
    and races with a connection that breaks        waits for something has to call, and rests in between
    damaged or forged metadata ends the process    ``connect`` is only given what ``nixl_state`` has authenticated
    a READ cannot be called back: released, it     a read is never released before it is over
    still writes
    after an error, other READs of the same peer   an error of one condemns the agent; ``close`` proves that nothing
    can no longer be asked about                   can touch this process's memory any more: no connection, no worker
    closing while a READ of a living peer is       an agent with such a read is abandoned instead, which only happens
    under way can end the *peer*                   when the process is about to end
    the check of remote addresses overflows        addresses are checked before, where they are computed
    UCX answers whoever reaches its TCP port       it listens on loopback unless the operator names a device
"""

from __future__ import annotations

import ctypes
import enum
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from triptych.core.errors import Internal, StartupError, one_line

if TYPE_CHECKING:
    import numpy.typing as npt

MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """What the engines that hand blocks to each other must agree on."""

    secret: bytes = field(repr=False)
    """Known to all of them and to nobody else: what is not signed with it never reaches NIXL."""
    device: str = "lo"
    """The network device, as UCX spells it (``eth0``, ``mlx5_0:1``). ``UCX_NET_DEVICES`` wins over it.

    Not loopback: on that network everybody must be trusted. UCX knows no passwords, and whoever reaches its port
    can read and write the engine's memory.
    """

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            StartupError: naming the field.
        """
        if len(self.secret) < MIN_SECRET_BYTES:
            raise StartupError(
                f"the nixl transport needs a hand-off secret of at least {MIN_SECRET_BYTES} bytes, "
                f"the same for all engines, not {len(self.secret)}"
            )
        if not self.device or "," in self.device or "=" in self.device:
            raise StartupError(f"{self.device!r} is not one network device")


class PeerLost(Internal):
    """A peer, or the connection to it, is gone or was never there."""


class ReadState(enum.Enum):
    """What is known of a READ."""

    UNDER_WAY = "under way"
    DONE = "done"
    FAILED = "failed"
    """Over as far as NIXL says. Proof that nothing comes any more is the end of its agent."""


class NixlAgent:
    """An agent of one name, at most one peer that it reads from, and the memory registered with it."""

    def __init__(self, name: str, options: NixlOptions) -> None:
        """Create it.

        Raises:
            StartupError: the library is not installed, or the device is none of this host's.
        """
        self.name = name
        self._library = _load()
        self._errors = _errors_of(self._library)
        self._peer = ""
        self._arrays: list[npt.NDArray[Any]] = []
        """They live as long as the agent does."""
        try:
            config = self._library.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent = self._library.nixl_agent(name, config)
            self._agent.create_backend("UCX", {"engine_config": f"NET_DEVICES={options.device}"})
        except self._errors as error:
            raise StartupError(
                f"nixl cannot use network device {options.device} ({one_line(error)}); UCX_LOG_LEVEL=warn tells more"
            ) from error

    def register(self, *arrays: npt.NDArray[Any]) -> None:
        """Let peers read these arrays, and reads of peers arrive in them, until ``close``. They must be contiguous.

        Raises:
            StartupError: the memory could not be registered.
        """
        regions = [(each.ctypes.data, each.nbytes, 0, "") for each in arrays]
        try:
            self._agent.register_memory(regions, "DRAM")
            self._arrays += arrays
        except self._errors as error:
            size = sum(each.nbytes for each in arrays)
            raise StartupError(f"nixl could not register {size} bytes ({one_line(error)})") from error

    def metadata(self) -> bytes:
        """What a peer needs to read what is registered now."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes, name: str) -> None:
        """Make the agent ``name`` the peer. Its metadata is believed: it must be authentic.

        Raises:
            PeerLost: nobody answers there, or somebody else.
        """
        try:
            found = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise PeerLost(f"no connection ({one_line(error)})") from error
        if (found if isinstance(found, bytes) else str(found).encode()) != name.encode():
            raise PeerLost("its metadata is somebody else's")
        self._peer = name

    def send(self, message: bytes) -> None:
        """Leave word with the peer. It gets it, or the connection breaks.

        Raises:
            PeerLost: the connection has broken.
        """
        try:
            self._agent.send_notif(self._peer, message)
        except self._errors as error:
            raise PeerLost(one_line(error)) from error

    def received(self) -> list[bytes]:
        """What anybody has left word of since the last call. It also moves everything else on.

        Raises:
            PeerLost: a connection has broken.
        """
        try:
            words = self._agent.get_new_notifs()
        except UnicodeDecodeError:  # a name that is no text: from nobody that we know
            return []
        except self._errors as error:
            raise PeerLost(one_line(error)) from error
        return [message for messages in words.values() for message in messages]

    def read(self, local: npt.NDArray[np.uint64], remote: npt.NDArray[np.uint64]) -> NixlRead:
        """Begin to read pieces of the peer's memory; perhaps it is over at once.

        Args:
            local: [pieces, 2]: address and length, inside what is registered here.
            remote: [pieces, 2]: the same of the peer's, lengths equal; the addresses are the caller's to check.
        """
        return NixlRead(self._agent, self._errors, self._peer, _pieces(local), _pieces(remote))

    def close(self) -> None:
        """End it. Every read must be over; nothing touches the registered memory afterwards."""
        self._agent = None  # nothing else refers to it: this destroys connections, worker and registrations
        self._arrays.clear()

    def abandon(self) -> None:
        """Neither use nor destroy it any more: a read is still under way, and the process is about to end."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


class NixlRead:
    """One READ of some pieces."""

    def __init__(self, agent: Any, errors: tuple[type[Exception], ...], peer: str, local: Any, remote: Any) -> None:
        """Post it."""
        self._agent = agent
        self._errors = errors
        self._handle: Any = None
        self.reason = ""
        """Why it failed."""
        try:
            local, remote = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM")
            self._handle = agent.initialize_xfer("READ", local, remote, peer)
            self.state = self._now(agent.transfer(self._handle))
        except errors as error:
            self.state = self._failed(one_line(error))

    def poll(self) -> ReadState:
        """Move on, and see how far it is."""
        if self.state is ReadState.UNDER_WAY:
            try:
                self.state = self._now(self._agent.check_xfer_state(self._handle))
            except self._errors as error:
                self.state = self._failed(one_line(error))
        return self.state

    def release(self) -> None:
        """Give back what the library keeps of it; it must be over."""
        handle, self._handle, self._agent = self._handle, None, None
        if handle is not None:
            try:
                handle.release()
            except self._errors:  # then it goes with its agent
                handle._released = True  # or its destructor would try again, when there may be no agent

    def _now(self, said: str) -> ReadState:
        if said == "PROC":
            return ReadState.UNDER_WAY
        return ReadState.DONE if said == "DONE" else self._failed("transfer error")

    def _failed(self, reason: str) -> ReadState:
        self.reason = reason
        return ReadState.FAILED


def _pieces(pieces: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """[pieces, 3]: address, length, device 0."""
    return np.column_stack([pieces, np.zeros(len(pieces), np.uint64)])


def _load() -> Any:
    """The library, which is an extra; loading it is kept from changing how this process logs.

    Raises:
        StartupError: it is not installed.
    """
    # They report what they survive, on stdout; outcomes of fetches carry what matters. An operator's choice stays.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    raises = logging.raiseExceptions
    try:
        import nixl_cu12._api as library
    except ImportError as error:
        raise StartupError(
            f"the nixl transport needs the extra nixl: pip install 'triptych[nixl]' ({one_line(error)})"
        ) from error
    logging.raiseExceptions = raises
    return library


def _errors_of(library: Any) -> tuple[type[Exception], ...]:
    """The bindings' exceptions. They share no base of their own."""
    kinds = vars(library.nixlBind).values()
    return tuple(each for each in kinds if isinstance(each, type) and issubclass(each, Exception))
