"""How many KV blocks the given memory holds, and the storage itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from triptych.core.config import MIB
from triptych.core.errors import StartupError
from triptych.models.contract import KvCache
from triptych.transport.contract import BlockMemory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from triptych.models.contract import TextSpec

USEFUL_TOKENS = 256
"""A pool below this holds no small picture with its question; refused rather than served badly."""


def count_blocks(spec: TextSpec, kv_cache_bytes: int, block_size: int, weight_bytes: int = 0) -> int:
    """Blocks of ``block_size`` tokens that fit into ``kv_cache_bytes``.

    Args:
        spec: the decoder's shape.
        kv_cache_bytes: what the pool may take.
        block_size: tokens in one block.
        weight_bytes: what the weights are still going to take of the memory that is available now.

    Raises:
        StartupError: naming the flag and the smallest useful value, or the memory that there is.
    """
    per_token = spec.kv_bytes_per_token()
    blocks = kv_cache_bytes // (per_token * block_size)
    useful = -(-min(USEFUL_TOKENS, spec.max_context) // block_size)
    if blocks < useful:
        raise StartupError(
            f"--kv-cache-bytes {kv_cache_bytes} holds {blocks * block_size} tokens of {per_token} bytes each; "
            f"the smallest useful value is {useful * block_size * per_token}"
        )
    needed = blocks * block_size * per_token
    available = available_bytes(spec.device)
    if available is not None and needed + weight_bytes > available:
        weights = f"and the weights take {weight_bytes // MIB} MiB, " if weight_bytes else ""
        raise StartupError(
            f"--kv-cache-bytes {kv_cache_bytes} needs {needed // MIB} MiB {weights}but {available // MIB} MiB are "
            f"available on {spec.device}; the smallest useful value is {useful * block_size * per_token}"
        )
    return blocks


def available_bytes(device: torch.device) -> int | None:
    """Memory that could be allocated on the device now, or None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def allocate(spec: TextSpec, num_blocks: int, block_size: int) -> KvCache:
    """Storage for ``num_blocks`` blocks, zeroed: attention may multiply what it masks out, and 0 * NaN is NaN.

    The zeros are written: every page is there from the start, and no transfer has to wait for one.

    Raises:
        StartupError: the memory could not be had; names the flag.
    """
    shape = (num_blocks, spec.layers, 2, spec.kv_heads, block_size, spec.head_size)
    try:
        return KvCache(torch.zeros(shape, dtype=spec.dtype, device=spec.device))
    except (RuntimeError, MemoryError) as error:
        total = num_blocks * block_size * spec.kv_bytes_per_token()
        raise StartupError(
            f"{total // MIB} MiB for the KV pool could not be allocated on {spec.device}; lower --kv-cache-bytes"
        ) from error


def transport_pool(kv: KvCache, generations: npt.NDArray[np.int64]) -> BlockMemory:
    """The storage as transports see it. ``generations`` [num_blocks] is the ledger's; the storage is a CPU's."""
    return BlockMemory(kv.layout, kv.memory(), generations)
