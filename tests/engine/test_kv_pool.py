"""The KV pool: one block is one piece of memory, the same that attention reads and transports move."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch

from tests.engine.fakes import spec
from triptych.engine.blocks import BlockPool
from triptych.engine.kv_pool import allocate, transport_pool
from triptych.models.contract import KvCache, TextSpec


def shape(dtype: torch.dtype) -> TextSpec:
    return TextSpec(
        vocab_size=9,
        hidden_size=8,
        layers=3,
        kv_heads=2,
        head_size=4,
        max_context=64,
        position_axes=1,
        deepstack_levels=0,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def numbered(dtype: torch.dtype) -> KvCache:
    """Every number says where it stands, as far as the type can tell."""
    kv = allocate(shape(dtype), 5, 16)
    kv.storage.copy_(torch.arange(kv.storage.numel()).view(kv.storage.shape) % 251)
    return kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_is_one_piece_of_memory(dtype: torch.dtype) -> None:
    kv = numbered(dtype)
    memory = kv.memory()
    assert memory.dtype == np.uint8
    assert memory.shape == (5, kv.layout.block_bytes)
    for block in range(5):
        assert memory[block].tobytes() == kv.storage[block].contiguous().view(torch.uint8).numpy().tobytes()
    memory[3] = memory[1]
    assert torch.equal(kv.storage[3], kv.storage[1])
    assert memory.base is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layout_is_what_the_pool_is(dtype: torch.dtype) -> None:
    layout = numbered(dtype).layout
    assert (layout.layers, layout.kv_heads, layout.head_size, layout.block_size) == (3, 2, 4, 16)
    assert layout.dtype == {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype]
    assert layout.itemsize == dtype.itemsize
    assert layout.block_bytes == 16 * shape(dtype).kv_bytes_per_token()


def test_rows_and_views_are_the_same_memory() -> None:
    kv = numbered(torch.float32)
    for layer in range(3):
        for views, rows in ((kv.keys, kv.key_rows), (kv.values, kv.value_rows)):
            assert views[layer].shape == (5, 2, 16, 4)
            for block in range(5):
                for head in range(2):
                    row = rows[layer][block * kv.block_rows + head]
                    assert row.data_ptr() == views[layer][block, head].data_ptr()
                    assert torch.equal(row.view(16, 4), views[layer][block, head])
    assert torch.equal(kv.storage[:, 2, 1], kv.values[2])


def test_transports_see_the_pool_and_the_ledgers_generations() -> None:
    kv, ledger = numbered(torch.float32), BlockPool(5)
    pool = transport_pool(kv, ledger.generations)
    assert pool.layout == kv.layout
    assert pool.generations.tolist() == [0] * 5
    first = ledger.allocate(2)
    assert pool.generations[list(first)].tolist() == [1, 1]
    ledger.release(first)
    assert pool.generations.sum() == 2  # the content is still there
    ledger.allocate(5)
    assert sorted(pool.generations.tolist()) == [1, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="read-only"):
        pool.generations[0] = 7


def test_a_shared_block_keeps_its_generation() -> None:
    ledger = BlockPool(1)
    (block,) = ledger.allocate(1)
    ledger.enlist(block, b"content")
    ledger.release([block])
    ledger.share([block])
    assert ledger.generations[block] == 1


def test_every_page_of_a_pool_is_there_from_the_start() -> None:
    kv = allocate(spec(), 20_000, 16)
    address, size = kv.storage.data_ptr(), kv.storage.nbytes
    page = mmap.PAGESIZE
    first = -(-address // page) * page
    pages = (address + size - first) // page
    resident = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * page), resident) == 0
    assert pages > 1000
    assert all(each & 1 for each in resident)
