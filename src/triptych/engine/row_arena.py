"""Memory for encoder rows that move between engines: those that others read, and those that were read from others.

It is cut into small blocks, and the rows of an item lie one after the other over as many as they need: an item wastes
less than one block, and no gap is too small for the next item.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triptych.core.config import KIB, MIB
from triptych.core.errors import StartupError
from triptych.core.handles import RowLayout
from triptych.engine.kv_pool import available_bytes
from triptych.transport.contract import BlockMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

ROW_LAYOUT = RowLayout(64 * KIB)
"""Of all engines: they move rows only when their blocks have one size."""
_HOST = torch.device("cpu")


def count_row_blocks(layout: RowLayout, quota: int, weight_bytes: int = 0) -> int:
    """Blocks that fit into ``quota`` bytes.

    Args:
        layout: a block.
        quota: what the rows may take.
        weight_bytes: what the weights are still going to take of the memory that is available now.

    Raises:
        StartupError: naming the flag and the smallest possible value, or the memory that there is.
    """
    blocks = quota // layout.block_bytes
    if blocks < 1:
        raise StartupError(
            f"--encoder-quota {quota} holds no rows; the smallest possible value is {layout.block_bytes}"
        )
    available = available_bytes(_HOST)
    if available is not None and quota + weight_bytes > available:
        weights = f"and the weights take {weight_bytes // MIB} MiB, " if weight_bytes else ""
        raise StartupError(
            f"--encoder-quota {quota} needs {quota // MIB} MiB {weights}but {available // MIB} MiB are available; the "
            f"smallest value is {layout.block_bytes}"
        )
    return blocks


def allocate_rows(layout: RowLayout, generations: npt.NDArray[np.int64]) -> BlockMemory:
    """A block for each of the ledger's ``generations`` [num_blocks].

    Zeros are written: every page is there from the start, and no transfer has to wait for one.

    Raises:
        StartupError: the memory could not be had; names the flag.
    """
    try:
        memory = torch.zeros((len(generations), layout.block_bytes), dtype=torch.uint8, device=_HOST)
    except (RuntimeError, MemoryError) as error:
        total = len(generations) * layout.block_bytes
        raise StartupError(
            f"{total // MIB} MiB for encoder rows could not be allocated; lower --encoder-quota"
        ) from error
    return BlockMemory(layout, memory.numpy(), generations)


def write_rows(memory: BlockMemory, blocks: Sequence[int], rows: torch.Tensor) -> None:
    """Lay rows over blocks that have room for them, the bytes of each row after those of the one before.

    Args:
        memory: of which the blocks are.
        blocks: in order.
        rows: [rows, row width], contiguous, on any device.
    """
    flat = rows.cpu().reshape(-1).view(torch.uint8).numpy()
    size = memory.layout.block_bytes
    for index, block in enumerate(blocks):
        part = flat[index * size : (index + 1) * size]
        memory.memory[block, : len(part)] = part
        memory.memory[block, len(part) :] = 0  # what another item left is nobody else's business
