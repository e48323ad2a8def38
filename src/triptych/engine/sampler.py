"""From logits to tokens.

Order: repetition, frequency and presence penalties; the mask of end tokens while the answer is shorter than
min_tokens; temperature; top-k; top-p over what is left; min-p. Then one uniform number picks a token by the
inverse of the cumulative distribution.

The number is a hash of (seed, index of the token in the whole sequence). It depends on nothing else, so the
same seed gives the same tokens whatever else is in the batch, after preemption, and on another engine that
continues the answer. The distribution is walked in the order of token ids and not of probabilities: two
nearly equal logits that change places through rounding then move the result by their difference only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.request import Request, Sampling

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FLOAT32_MAX = float(np.finfo(np.float32).max)
NUCLEUS_CANDIDATES = 1024
"""Tokens looked at first for top-p without top-k; all of them where these do not carry the mass."""


def _mix(value: int) -> int:
    """The finalizer of splitmix64: a bijection of 64-bit numbers without visible structure."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of its arguments alone."""
    return (_mix((_mix(seed) + (index + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


class Penalties:
    """The distinct tokens of one request with how often each was generated."""

    __slots__ = ("_counts", "_ids", "_sampling", "_size", "_slot")

    def __init__(self, request: Request) -> None:
        self._sampling = request.sampling
        # Only the repetition penalty looks at the prompt.
        seen = np.unique(request.plan.token_ids) if request.sampling.repetition_penalty != 1 else np.empty(0, np.int64)
        self._size = len(seen)
        self._ids = np.resize(seen.astype(np.int64), max(2 * self._size, 64))
        self._counts = np.zeros(len(self._ids))
        self._slot: dict[int, int] = {token: slot for slot, token in enumerate(seen.tolist())}

    def observe(self, token: int) -> None:
        """Count a generated token."""
        slot = self._slot.setdefault(token, self._size)
        if slot == self._size:
            if slot == len(self._ids):
                self._ids = np.resize(self._ids, 2 * slot)
                self._counts = np.concatenate([self._counts, np.zeros(slot)])
            self._ids[slot] = token
            self._size += 1
        self._counts[slot] += 1

    def apply(self, logits: torch.Tensor) -> None:
        """Change one row of logits [vocab] in place. Stays finite whatever the factors are."""
        if not self._size:
            return
        ids = torch.from_numpy(self._ids[: self._size]).to(logits.device)
        counts = torch.from_numpy(self._counts[: self._size]).to(logits.device)
        values = logits[ids].double()
        factor = self._sampling.repetition_penalty
        if factor != 1:
            values = torch.where(values < 0, values * factor, values / factor)
        values = values - self._sampling.frequency_penalty * counts - self._sampling.presence_penalty * (counts > 0)
        logits[ids] = values.clamp(-_FLOAT32_MAX, _FLOAT32_MAX).to(logits.dtype)


class Chooser:
    """How one request picks its tokens, and what it has picked so far."""

    __slots__ = ("_banned", "_min_tokens", "_prompt_len", "penalties", "sampling", "seed")

    def __init__(self, request: Request, vocab_size: int) -> None:
        sampling, stopping = request.sampling, request.stopping
        self.sampling: Sampling = sampling
        self.seed = sampling.seed or 0
        self._prompt_len = len(request.plan)
        self._min_tokens = stopping.min_tokens
        ends = set(stopping.stop_token_ids) | (set() if stopping.ignore_eos else request.eos_token_ids)
        self._banned = sorted(token for token in ends if token < vocab_size)
        penalised = sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1
        self.penalties = Penalties(request) if penalised else None

    def adjusts(self, index: int) -> bool:
        """Whether the logits of the token at sequence index ``index`` must be changed first."""
        return self.penalties is not None or self._bans(index)

    def adjust(self, logits: torch.Tensor, index: int) -> None:
        """Apply penalties and the min_tokens mask to one row [vocab], in place."""
        if self.penalties is not None:
            self.penalties.apply(logits)
        if self._bans(index):
            logits[self._banned] = -math.inf

    def observe(self, token: int) -> None:
        """Remember the token that was picked."""
        if self.penalties is not None:
            self.penalties.observe(token)

    def _bans(self, index: int) -> bool:
        return index - self._prompt_len < self._min_tokens and bool(self._banned)


class Draw(NamedTuple):
    """One wanted token."""

    chooser: Chooser
    at: int
    """Index of the new token in the whole sequence, prompt included."""


def choose_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """One token for each row of ``logits`` [R, vocab] float32, which is changed; None where a row is not finite."""
    chosen = _best(logits)
    adjusted = [row for row, draw in enumerate(draws) if chosen[row] is not None and draw.chooser.adjusts(draw.at)]
    for row in adjusted:
        draws[row].chooser.adjust(logits[row], draws[row].at)
    if adjusted:
        for row, token in zip(adjusted, _best(logits[adjusted]), strict=True):
            chosen[row] = token
    groups: dict[_Filter, list[int]] = {}
    for row, draw in enumerate(draws):
        if chosen[row] is not None and not draw.chooser.sampling.greedy:
            groups.setdefault(_filter(draw.chooser.sampling, logits.shape[1]), []).append(row)
    for kind, rows in groups.items():
        picked = _sample(logits[rows], [draws[row] for row in rows], kind)
        for row, token in zip(rows, picked, strict=True):
            chosen[row] = token
    return chosen


def _best(logits: torch.Tensor) -> list[int | None]:
    """The most likely token of each row, the lowest id among equals.

    A maximum is NaN when any logit is, and infinite when one is +inf or all are -inf: no second pass is needed.
    """
    top = logits.max(dim=1)
    finite = torch.isfinite(top.values).tolist()
    return [token if good else None for token, good in zip(top.indices.tolist(), finite, strict=True)]


class _Filter(NamedTuple):
    """Rows that are cut to their likely tokens in the same way."""

    top_k: int
    nucleus: bool


def _filter(sampling: Sampling, vocab_size: int) -> _Filter:
    if 0 < sampling.top_k < vocab_size:
        return _Filter(sampling.top_k, nucleus=sampling.top_p < 1)
    return _Filter(0, nucleus=sampling.top_p < 1)


def _sample(logits: torch.Tensor, draws: Sequence[Draw], kind: _Filter) -> list[int]:
    """Pick one token for each row [n, vocab]; all rows are filtered in the same way."""
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)

    options = [draw.chooser.sampling for draw in draws]
    numbers = column([uniform(draw.chooser.seed, draw.at) for draw in draws])
    top_p = column([option.top_p if option.top_p < 1 else math.inf for option in options])
    # Against the maximum first: neither a tiny temperature nor a huge logit overflows. The best weight is 1.
    shifted = (logits - logits.max(dim=1, keepdim=True).values).double()
    weights = (shifted / column([option.temperature for option in options])).exp()
    ids: torch.Tensor | None = None
    mass: torch.Tensor | None = None
    if kind.top_k:
        ids = _largest(logits, kind.top_k)
    elif kind.nucleus:
        mass = weights.sum(dim=1, keepdim=True)
        candidates = _largest(logits, min(NUCLEUS_CANDIDATES, logits.shape[1]))
        enough = weights.gather(1, candidates).sum(dim=1, keepdim=True) >= top_p * mass
        ids = candidates if bool(enough.all()) else None
    if ids is not None:
        weights = weights.gather(1, ids)
    if kind.nucleus:
        weights = _nucleus(weights, top_p, mass)
    floor = column([option.min_p for option in options])
    weights = torch.where(weights >= floor, weights, 0.0)
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1:]
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    places = torch.searchsorted(cumulative, target, right=True)
    tokens = places if ids is None else ids.gather(1, places)
    return [int(token) for token in tokens.squeeze(1).tolist()]


def _largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids [n, count] of the largest logits of each row, ascending; among equals the lower ids are in."""
    least = logits.topk(count, dim=1).values[:, -1:]
    above = logits > least
    equal = logits == least
    room = count - above.sum(dim=1, keepdim=True)
    keep = above | (equal & (equal.cumsum(dim=1) <= room))
    return keep.nonzero()[:, 1].view(len(logits), count)


def _nucleus(weights: torch.Tensor, top_p: torch.Tensor, mass: torch.Tensor | None) -> torch.Tensor:
    """Zero all but the smallest set of likeliest tokens that reaches ``top_p`` of ``mass`` (None: of all weights)."""
    ordered = weights.sort(dim=1, descending=True, stable=True)
    cumulative = ordered.values.cumsum(dim=1)
    whole = cumulative[:, -1:] if mass is None else mass
    keep = cumulative - ordered.values < top_p * whole
    return torch.zeros_like(weights).scatter(1, ordered.indices, torch.where(keep, ordered.values, 0.0))
