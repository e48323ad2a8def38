"""A sampled token as the winner of a race, so that rounding seldom changes who wins.

Every token arrives after an exponential time divided by its weight, and the first one is taken: token i wins with
probability weight i over the sum of weights. The time is a hash of (seed, index of the token in the sequence, token id)
and of nothing else.

Logits that were computed in another batch differ in their last bits. An inverse distribution function has a boundary
for every token of the vocabulary at which such a difference changes the result; a race has one, between its first two.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Multipliers of murmur3's 32-bit finalizer, as signed numbers.
_FIRST, _SECOND = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)
_ODD = 0x9E3779B1 - (1 << 32)
_LATEST = 1 - 2.0**-24
"""The largest float32 below 1: no time is infinite."""


class Start(NamedTuple):
    """One race: whose seed, and for which place in the sequence."""

    seed: int
    at: int


def winners(weights: torch.Tensor, ids: torch.Tensor | None, starts: Sequence[Start]) -> torch.Tensor:
    """The column [n] that wins in each row.

    Args:
        weights: [n, c] >= 0, at least one of each row > 0; need not sum to anything. Used up.
        ids: [n, c] token ids of the columns, or None where column i is token i.
        starts: n races.
    """
    times = _times(weights.shape[1], ids, starts, weights.device)
    return weights.div_(times.to(weights.dtype)).argmax(dim=1)


def _times(width: int, ids: torch.Tensor | None, starts: Sequence[Start], device: torch.device) -> torch.Tensor:
    """Exponential times [n, width], float32, all positive and finite."""
    keys = [_key(start) for start in starts]
    low, high = torch.tensor([[_signed(key), _signed(key >> 32)] for key in keys], dtype=torch.int32, device=device).t()
    names = _names(width, device) if ids is None else _scatter(ids.to(torch.int32))
    hashed = torch.bitwise_xor(names, low[:, None])
    shifted = torch.empty_like(hashed)
    _fold(hashed, 16, shifted)
    hashed.mul_(_FIRST).add_(high[:, None])
    _fold(hashed, 13, shifted)
    hashed.mul_(_SECOND)
    _fold(hashed, 16, shifted)
    # 31 bits as a float: small numbers, whose tokens come early, keep all of their digits
    uniform = hashed.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_LATEST)
    return uniform.neg_().log1p_().neg_()


def _fold(hashed: torch.Tensor, by: int, shifted: torch.Tensor) -> None:
    """``hashed ^= hashed >>> by``, in place; torch shifts the sign in, which is masked out again."""
    torch.bitwise_right_shift(hashed, by, out=shifted)
    hashed.bitwise_xor_(shifted.bitwise_and_((1 << (32 - by)) - 1))


def _scatter(ids: torch.Tensor) -> torch.Tensor:
    """Ids that are close to one another become numbers that are not: a bijection of 32 bits."""
    names = ids * _ODD
    shifted = torch.empty_like(names)
    _fold(names, 15, shifted)
    return names.mul_(_SECOND)


@functools.lru_cache(maxsize=4)
def _names(width: int, device: torch.device) -> torch.Tensor:
    """[width]: what ``_scatter`` makes of all ids of a vocabulary."""
    return _scatter(torch.arange(width, dtype=torch.int32, device=device))


def _key(start: Start) -> int:
    """64 bits of which every one depends on all of seed and index."""
    return _mix((_mix(start.seed) + (start.at + 1) * _GOLDEN) & _MASK)


def _mix(value: int) -> int:
    """The finalizer of splitmix64: a bijection of 64-bit numbers without visible structure."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    value &= (1 << 32) - 1
    return value - (1 << 32) if value >> 31 else value
