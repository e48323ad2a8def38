"""Names for KV content: one 256-bit hash a full block, chained, so that equal hashes mean equal KV.

A block's hash covers everything that its keys and values depend on:

    parent          hash of the block before it; the first block's parent is a digest of the domain tag,
                    the caller's salt and the LoRA adapter's digest (of nothing for the base model)
    token ids       of the block, int32 little endian
    media           for each stretch of an item inside the block: offset in the block, length, offset
                    inside the item, and the item's grid, which positions follow from, and content key

Every field has a fixed width, so no two different inputs are the same bytes. Placeholder ids alone never
name a picture: two prompts that differ in a picture share exactly the blocks before its first position.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.layout import Grid
    from triptych.core.plan import PromptPlan

DOMAIN = b"triptych kv block 3"
_FIELD = struct.Struct("<Q")
_STRETCH = struct.Struct("<III3I32s")
_end = attrgetter("end")


def chain_seed(salt: str, adapter: bytes) -> bytes:
    """The parent of a first block: 32 bytes over length-prefixed fields.

    Args:
        salt: The tenant's namespace.
        adapter: Digest of the LoRA adapter that the keys and values are computed with; empty for none.
    """
    hasher = blake3()
    for field in (DOMAIN, salt.encode(errors="surrogatepass"), adapter):
        hasher.update(_FIELD.pack(len(field)))
        hasher.update(field)
    return hasher.digest()


class _Stretch(NamedTuple):
    """One run of one item, with the item's identity."""

    start: int
    end: int
    offset: int
    """Span positions of the item before this run."""
    grid: Grid
    key: bytes


class BlockChain:
    """The block hashes of one request, computed on demand and each only once.

    Known tokens never change, so the chain survives preemption. ``hashes[i]`` names block ``i``.

    Args:
        plan: The prompt.
        seed: What ``chain_seed`` made of everything else.
        block_size: Tokens of a block.
    """

    __slots__ = ("_block_size", "_items", "_next_stretch", "_parent", "_prompt", "_stretches", "hashes")

    def __init__(self, plan: PromptPlan, seed: bytes, block_size: int) -> None:
        self.hashes: list[bytes] = []
        self._prompt = plan.token_ids
        self._items = plan.items
        self._block_size = block_size
        self._parent = seed
        self._stretches: list[_Stretch] = []
        self._next_stretch = 0
        for item in plan.items:
            offset = 0
            for run in item.runs:
                self._stretches.append(_Stretch(run.start, run.end, offset, item.grid, item.content_key))
                offset += run.length

    def extend(self, output: Sequence[int], blocks: int) -> None:
        """Hash until ``hashes`` has ``blocks`` entries; the prompt and ``output`` must fill that many."""
        size = self._block_size
        for index in range(len(self.hashes), blocks):
            start, end = index * size, (index + 1) * size
            data = b"".join((self._parent, self._tokens(output, start, end), *self._media(start, end)))
            self._parent = blake3(data).digest()
            self.hashes.append(self._parent)

    def adopt(self, other: BlockChain) -> None:
        """Take over the hashes of a chain that has the same seed and, as far as it got, the same tokens."""
        self.hashes = other.hashes.copy()
        self._parent, self._next_stretch = other._parent, other._next_stretch

    def token_ids(self, output: Sequence[int], index: int) -> tuple[int, ...]:
        """The tokens of block ``index``; placeholders where rows stand."""
        start, end = index * self._block_size, (index + 1) * self._block_size
        first, last = max(start - len(self._prompt), 0), max(end - len(self._prompt), 0)
        return (*self._prompt[start:end].tolist(), *output[first:last])

    def item_keys(self, index: int) -> tuple[bytes, ...]:
        """Content keys of the items with a position in block ``index``, in prompt order."""
        start, end = index * self._block_size, (index + 1) * self._block_size
        keys = []
        for item in self._items[bisect_right(self._items, start, key=_end) :]:
            if item.start >= end:
                break
            if item.overlaps(start, end):
                keys.append(item.content_key)
        return tuple(keys)

    def _tokens(self, output: Sequence[int], start: int, end: int) -> bytes:
        prompt = self._prompt[start:end].astype("<i4").tobytes()
        first, last = max(start - len(self._prompt), 0), end - len(self._prompt)
        return prompt if last <= 0 else prompt + struct.pack(f"<{last - first}i", *output[first:last])

    def _media(self, start: int, end: int) -> list[bytes]:
        fields = []
        while self._next_stretch < len(self._stretches):
            run = self._stretches[self._next_stretch]
            first, last = max(run.start, start), min(run.end, end)
            if first < last:
                inside = run.offset + first - run.start
                fields.append(_STRETCH.pack(first - start, last - first, inside, *run.grid, run.key))
            if run.end > end:
                break
            self._next_stretch += 1
        return fields
