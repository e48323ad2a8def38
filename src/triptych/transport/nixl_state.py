"""A handle's state: where a session's blocks lie in its producer's memory, signed.

NIXL and UCX believe what they are given: damaged metadata ends the process. So nothing is even decoded here before its
signature was checked, and the signature needs the secret that only the engines share.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from triptych.core.errors import InvalidRequest, one_line
from triptych.core.handles import MAX_HANDLE_STATE, MAX_LABEL
from triptych.transport.nixl_ledger import MAX_SESSIONS, ROW_BYTES, STAMP_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from triptych.core.handles import Handle
    from triptych.transport.nixl_agent import NixlOptions

BACKEND = "nixl"
MAX_BLOCKS = 2**20
"""Of a pool."""
_FORMAT = 2
_DIGEST_BYTES = hashlib.sha256().digest_size
_GENERATION_BYTES = 8


class NixlPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is the same for all sessions of one producer."""

    instance_id: str
    """Also the name of its agent."""
    layout: str
    """The label of the pool's."""
    block_bytes: int
    metadata: bytes
    """NIXL's own."""
    stamp: bytes
    memory: int
    """Address of the pool, [num_blocks, block_bytes]."""
    generations: int
    """Address of the generations, int64 [num_blocks]."""
    table: int
    """Address of the ledger's table."""
    num_blocks: int

    def __post_init__(self) -> None:
        """Check the bounds: every address that is computed from here stays below 2^63."""
        if not 1 <= self.num_blocks <= MAX_BLOCKS:
            raise ValueError(f"{self.num_blocks} blocks")
        if len(self.stamp) != STAMP_BYTES:
            raise ValueError(f"a stamp of {len(self.stamp)} bytes")
        if not (self.layout.isascii() and len(self.layout) <= MAX_LABEL and 1 <= self.block_bytes < 2**63):
            raise ValueError(f"a layout {self.layout[:MAX_LABEL]!r} of {self.block_bytes} bytes")
        sizes = (
            self.num_blocks * self.block_bytes,
            self.num_blocks * _GENERATION_BYTES,
            (1 + MAX_SESSIONS) * ROW_BYTES,
        )
        for start, size in zip((self.memory, self.generations, self.table), sizes, strict=True):
            if not 0 < start <= 2**63 - size:
                raise ValueError(f"{size} bytes at address {start}")


class _Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """As it travels."""

    format: int
    place: NixlPlace
    session_id: str
    slot: int
    tag: int
    count: int
    blocks: bytes
    generations: bytes


@dataclass(frozen=True, slots=True, eq=False)
class NixlState:
    """One session, as its consumer sees it."""

    place: NixlPlace
    session_id: str
    slot: int
    tag: int
    blocks: npt.NDArray[np.int64]
    """[count]: the producer's, in order, each below ``place.num_blocks``."""
    generations: npt.NDArray[np.int64]
    """[count]: what they must be."""

    def differences(self, handle: Handle[Any]) -> str:
        """What the handle around it says of another session; empty if it is this one's."""
        for name, ours, theirs in (
            ("session", self.session_id, handle.session_id),
            ("instance", self.place.instance_id, handle.instance_id),
            ("number of blocks", len(self.blocks), handle.blocks),
            ("layout", self.place.layout, handle.layout.label),
            ("size of a block", self.place.block_bytes, handle.layout.block_bytes),
        ):
            if ours != theirs:
                return f"its handle has another {name} than its state"
        return ""


def seal_state(state: NixlState, options: NixlOptions) -> bytes:
    """Make it travel.

    Raises:
        InvalidRequest: it has too many blocks for a handle.
    """
    blocks, generations = _pack(state.blocks), _pack(state.generations)
    signed = _Signed(
        _FORMAT, state.place, state.session_id, state.slot, state.tag, len(state.blocks), blocks, generations
    )
    body = msgspec.msgpack.encode(signed)
    size = len(body) + _DIGEST_BYTES
    if size > MAX_HANDLE_STATE:
        raise InvalidRequest(
            f"a session of {len(state.blocks)} blocks needs a handle of {size} bytes; at most {MAX_HANDLE_STATE}: "
            "a shorter prompt would fit"
        )
    return body + _digest(body, options)


def parse_state(handle: Handle[Any], options: NixlOptions) -> NixlState:
    """Read it again.

    Raises:
        InvalidRequest: it is another transport's, not signed with our secret, or not of our making.
    """
    if handle.backend != BACKEND:
        raise InvalidRequest(f"the session is of transport {handle.backend!r}; this engine takes {BACKEND!r}")
    body, digest = handle.state[:-_DIGEST_BYTES], handle.state[-_DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _digest(body, options)):
        raise InvalidRequest(f"the {BACKEND} session is damaged, or not signed with this engine's hand-off secret")
    try:
        signed = msgspec.msgpack.decode(body, type=_Signed)
        return _checked(signed)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"the {BACKEND} session is malformed: {one_line(error)}") from error


def as_column(numbers: Sequence[int]) -> npt.NDArray[np.int64]:
    """[count]."""
    return np.asarray(numbers, np.int64)


def _checked(signed: _Signed) -> NixlState:
    if signed.format != _FORMAT:
        raise ValueError(f"format {signed.format}, not {_FORMAT}")
    if not 1 <= signed.slot <= MAX_SESSIONS or not 1 <= signed.tag < 2**64:
        raise ValueError(f"slot {signed.slot}")
    if not 1 <= signed.count <= MAX_HANDLE_STATE:
        raise ValueError(f"{signed.count} blocks")
    blocks, generations = _unpack(signed.blocks, signed.count), _unpack(signed.generations, signed.count)
    if not 0 <= int(blocks.min()) <= int(blocks.max()) < signed.place.num_blocks:
        raise ValueError(f"blocks {blocks.min()} to {blocks.max()} of {signed.place.num_blocks}")
    return NixlState(signed.place, signed.session_id, signed.slot, signed.tag, blocks, generations)


def _pack(column: npt.NDArray[np.int64]) -> bytes:
    """Eight bytes of the least value, then every value's distance from it in as few bytes as the greatest needs."""
    least = column.min()
    distances = column.view(np.uint64) - least.view(np.uint64)  # modulo 2^64, so that no distance overflows
    width = max(1, (int(distances.max()).bit_length() + 7) // 8)
    rows = distances.astype("<u8").view(np.uint8).reshape(-1, 8)
    return int(least).to_bytes(8, "little", signed=True) + np.ascontiguousarray(rows[:, :width]).tobytes()


def _unpack(data: bytes, count: int) -> npt.NDArray[np.int64]:
    width, rest = divmod(len(data) - 8, count)
    if rest or not 1 <= width <= 8:
        raise ValueError(f"a column of {len(data)} bytes for {count} numbers")
    rows = np.zeros((count, 8), np.uint8)
    rows[:, :width] = np.frombuffer(data, np.uint8, offset=8).reshape(count, width)
    least = np.uint64(int.from_bytes(data[:8], "little"))
    column: npt.NDArray[Any] = rows.view("<u8").reshape(-1).astype(np.uint64) + least
    return column.view(np.int64)


def _digest(body: bytes, options: NixlOptions) -> bytes:
    return hmac.digest(options.secret, b"triptych nixl session\0" + body, "sha256")
