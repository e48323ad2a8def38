"""Frozen settings, one class per layer. A default is written here and nowhere else."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from ipaddress import IPv6Address

from triptych.core.errors import StartupError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise StartupError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of one step and of what may be in flight."""

    max_batched_tokens: int = 2048
    """Tokens of one step, prefill and decode together."""
    max_running_requests: int = 64
    """Requests that hold KV at once."""
    max_waiting_requests: int = 1024
    """Requests in the queue; one more is refused as overloaded."""
    max_context: int = 4096
    """Prompt and answer together, in tokens."""
    block_size: int = 16
    """Tokens in one KV block."""
    num_blocks: int = 1024
    """Blocks in the KV pool."""
    encoder_items: int = 16
    """Items encoded in one step."""
    encoder_tokens: int = 16384
    """Pre-merge encoder tokens of one step; an item larger than this runs alone."""
    encoder_cache_bytes: int = 128 * MIB
    """Bytes of encoder rows kept, in use and reusable together."""
    priority_seconds: float = 60.0
    """The most a request of high priority is treated as older than it is, and one of low priority as younger; so this
    is also what bounds how long the one can keep the other waiting."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            StartupError: naming the field.
        """
        _positive(
            self, "max_batched_tokens", "max_running_requests", "max_waiting_requests", "max_context", "block_size"
        )
        _positive(self, "num_blocks", "encoder_items", "encoder_tokens", "encoder_cache_bytes")
        if not 0 <= self.priority_seconds < math.inf:
            raise StartupError(f"priority_seconds must be a finite number >= 0, not {self.priority_seconds}")


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What one request's media may cost; checked before anything is allocated."""

    max_item_bytes: int = 200 * MIB
    """Encoded bytes of one item."""
    max_item_pixels: int = 64_000_000
    """Width times height of one picture."""
    max_items: int = 64
    """Items of one request."""
    max_request_pixels: int = 128_000_000
    """Pixels of all pictures of one request, and of all frames that are kept of its videos, together."""
    max_request_bytes: int = 256 * MIB
    """Encoded bytes of all items of one request together."""
    max_frame_pixels: int = 4096 * 2304
    """Width times height of a video's frames as they are stored; a decoder holds some twenty of them."""
    max_source_frames: int = 36_000
    """Frames of one video file, looked at or not: ten minutes at 60 frames a second."""
    max_decoded_pixels: int = 20_000_000_000
    """Pixels of all frames that are decoded on the way to the last one looked at: half a minute of one core, where it
    goes well. A request's videos together have no more."""
    max_clip_seconds: int = 600
    """How long one video may play."""
    max_clip_frames: int = 768
    """Frames of one video that are looked at."""
    max_clip_pixels: int = 128_000_000
    """Pixels of these frames together, as they are kept."""
    max_sound_seconds: int = 600
    """How long one sound may play."""
    media_preparation_limit: int = 4
    """Shares in the preparation of media. A request has as many as its media weigh, and none while it fetches."""
    max_waiting_preparations: int = 256
    """Requests that wait for shares; one more is refused as overloaded."""
    max_waiting_bytes: int = 1 * GIB
    """Encoded bytes of media that came with requests that wait; one more request is refused as overloaded."""
    max_waiting_seconds: float = 60.0
    """Of one wait for shares; then the request is refused as overloaded."""
    prepared_cache_bytes: int = 128 * MIB
    """Memory for items that were prepared, in case they come again."""
    max_prepared_bytes: int = 4 * GIB
    """Of prepared pictures and videos, of all requests that have no answer yet. While they take more, further requests
    wait."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            StartupError: naming the field.
        """
        _positive(self, "max_item_bytes", "max_item_pixels", "max_items", "max_request_pixels")
        _positive(self, "media_preparation_limit", "max_waiting_preparations", "max_waiting_bytes")
        _positive(self, "prepared_cache_bytes", "max_prepared_bytes", "max_request_bytes")
        _positive(self, "max_frame_pixels", "max_source_frames", "max_decoded_pixels", "max_clip_seconds")
        _positive(self, "max_clip_frames", "max_clip_pixels", "max_sound_seconds")
        if not 0 < self.max_waiting_seconds < math.inf:
            raise StartupError(f"max_waiting_seconds must be a finite number above 0, not {self.max_waiting_seconds}")


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Where media are decoded, and what that may take."""

    decode_workers: int = 4
    """Processes in which items are decoded, one each at a time."""
    max_waiting_items: int = 1024
    """Items that wait for one of them; one more is refused as overloaded."""
    decode_memory_bytes: int = 64 * MIB
    """Memory for decoding any item. Each pixel of a picture adds 32 bytes, a video or sound 160 for each pixel that a
    frame may have, and every encoded byte 4."""
    decode_seconds: float = 1.0
    """Processor time for decoding any item. Every 8 million pixels of a picture add as much, every 50 million of a
    video, every 10 million samples of a sound, and the encoded bytes."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            StartupError: naming the field.
        """
        _positive(self, "decode_workers", "max_waiting_items", "decode_memory_bytes")
        if not 0 < self.decode_seconds < math.inf:
            raise StartupError(f"decode_seconds must be a finite number above 0, not {self.decode_seconds}")


_LISTED_HOST = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


def _is_listable(host: str) -> bool:
    """Whether a URL's host could ever be this, or below it: a name, or an address in its plain form; no port."""
    if ":" not in host:
        return _LISTED_HOST.fullmatch(host) is not None
    try:
        return host == str(IPv6Address(host))
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """From whom media are fetched by URL, and for how long."""

    fetch_hosts: tuple[str, ...] | None = None
    """Hosts that may be fetched from: ``a.example`` is itself, ``*.a.example`` all names below it. None is all hosts,
    an empty list is none. Being listed opens no private network."""
    fetch_ports: tuple[int, ...] = (80, 443)
    """Ports that may be dialled."""
    fetch_private_networks: bool = False
    """Whether loopback and private addresses may be dialled. Metadata services and link-local addresses never are."""
    fetch_seconds: float = 30.0
    """For one item: all its redirects, its retries, and its waiting in line."""
    fetch_connect_seconds: float = 5.0
    """For one address to take the call."""
    fetch_retries: int = 2
    """Of one item, over all its redirects."""
    fetch_per_host: int = 8
    """Connections to one host at once."""
    fetch_at_once: int = 32
    """Connections to all hosts at once."""
    fetch_proxy: str = ""
    """``http://host:port`` of a proxy through which everything is fetched. It resolves the names, so which addresses
    may be reached is then its rule to keep. The environment names none."""
    fetch_ca_file: str = ""
    """PEM file of the certificates that are trusted; empty for the system's."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            StartupError: naming the field.
        """
        _positive(self, "fetch_per_host", "fetch_at_once")
        for name in ("fetch_seconds", "fetch_connect_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise StartupError(f"{name} must be a finite number above 0, not {getattr(self, name)}")
        if self.fetch_retries < 0:
            raise StartupError(f"fetch_retries must be at least 0, not {self.fetch_retries}")
        for port in self.fetch_ports:
            if not 0 < port < 1 << 16:
                raise StartupError(f"fetch_ports must be between 1 and 65535, not {port}")
        for host in self.fetch_hosts or ():
            if not _is_listable(host):
                raise StartupError(
                    f"fetch_hosts: {host!r} is no host; write a.example, *.a.example or an address, in lower case"
                )
