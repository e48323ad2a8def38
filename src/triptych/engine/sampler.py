"""From logits to tokens.

Order: repetition, frequency and presence penalties; the mask of the grammar, and of end tokens while the answer is
shorter than min_tokens; temperature; top-k; top-p over what is left; min-p. What is then left races (``race.py``): the
winner is a function of weights, seed and index of the token in the whole sequence. So the same seed gives the same
tokens whatever else is in the batch, after preemption, and on another engine that continues the answer, but for what
rounding changes: the winner where two are as good as level, and a filter's edge.

The grammar goes before min_tokens: where it leaves nothing but end tokens, they are not masked.
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from triptych.core.errors import Internal, InvalidRequest, TriptychError
from triptych.engine.race import Start, winners

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from triptych.core.guide import Matcher
    from triptych.core.request import Request, Sampling

logger = logging.getLogger(__name__)

_FLOAT32_MAX = float(np.finfo(np.float32).max)
NUCLEUS_CANDIDATES = (64, 1024)
"""How many likeliest tokens are looked at for top-p without top-k, until they carry the mass; then all."""
CACHED_LOGITS = 1 << 18
"""Logits that are worked on together: as many as stay in a core's cache between one pass and the next."""


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

    __slots__ = (
        *("_banned", "_grammar", "_matcher", "_min_tokens", "_prompt_len", "_request_id"),
        *("penalties", "sampling", "seed"),
    )

    def __init__(self, request: Request, vocab_size: int) -> None:
        sampling, stopping = request.sampling, request.stopping
        self.sampling: Sampling = sampling
        self.seed = sampling.seed or 0
        self._request_id = request.request_id
        self._prompt_len = len(request.plan)
        self._min_tokens = stopping.min_tokens
        # A grammar's answer ends with an end of sequence, ignored or not.
        eos_ends = not stopping.ignore_eos or request.grammar is not None
        ends = set(stopping.stop_token_ids) | (request.eos_token_ids if eos_ends else set())
        self._banned = sorted(token for token in ends if token < vocab_size)
        penalised = sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1
        self.penalties = Penalties(request) if penalised else None
        self._grammar = request.grammar
        self._matcher: Matcher | None = None
        """Made for the first token: what goes wrong with it then fails where the rest of the grammar does."""

    def adjusts(self, index: int) -> bool:
        """Whether the logits of the token at sequence index ``index`` must be changed first."""
        return self.penalties is not None or self._grammar is not None or self._bans(index)

    def adjust(self, logits: torch.Tensor, index: int) -> None:
        """Apply penalties, the grammar and the min_tokens mask to one row [vocab], in place. Repeating it is safe.

        Raises:
            InvalidRequest: what the grammar says of itself.
            Internal: the grammar failed otherwise.
        """
        if self.penalties is not None:
            self.penalties.apply(logits)
        banned = self._banned if self._bans(index) else []
        if self._grammar is not None:
            forbidden = torch.from_numpy(self._forbidden(len(logits), banned))
            logits.masked_fill_(forbidden.to(logits.device), -math.inf)
        elif banned:
            logits[banned] = -math.inf

    def observe(self, token: int) -> None:
        """Remember the token that was picked; once, or the grammar is a token ahead of the answer.

        Raises:
            InvalidRequest: what the grammar says of itself. The token then counts nowhere.
            Internal: the grammar failed otherwise; likewise.
        """
        if self._matcher is not None:
            with self._watched():
                self._matcher.accept(token)
        if self.penalties is not None:
            self.penalties.observe(token)

    def resume(self, token: int) -> None:
        """Remember a first token that was picked elsewhere; before anything else.

        Raises:
            InvalidRequest: what the grammar says of itself. The token then counts nowhere.
            Internal: the grammar failed otherwise; likewise.
        """
        if self._grammar is not None:
            with self._watched():
                self._matcher = self._grammar.matcher()
        self.observe(token)

    def _bans(self, index: int) -> bool:
        return index - self._prompt_len < self._min_tokens and bool(self._banned)

    def _forbidden(self, vocab_size: int, banned: list[int]) -> npt.NDArray[np.bool_]:
        """[vocab]: what may not come next. Logits and grammar may be padded differently: a missing id is forbidden."""
        forbidden = np.ones(vocab_size, np.bool_)
        with self._watched():
            if self._matcher is None:
                assert self._grammar is not None
                self._matcher = self._grammar.matcher()
            allowed = self._matcher.allowed()[:vocab_size]
            np.logical_not(allowed, out=forbidden[: len(allowed)])
        if banned:
            ends = forbidden[banned]
            forbidden[banned] = True
            if forbidden.all():
                forbidden[banned] = ends
        return forbidden

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Around calls of the grammar: a stranger's code, whose failure is that of its own request."""
        try:
            yield
        except InvalidRequest:
            raise
        except Exception as error:
            logger.exception("request %s: its grammar failed", self._request_id)
            raise Internal("the grammar of this request failed") from error


class Draw(NamedTuple):
    """One wanted token."""

    chooser: Chooser
    at: int
    """Index of the new token in the whole sequence, prompt included."""


def choose_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | TriptychError]:
    """One token for each row of ``logits`` [R, vocab] float32, which are left as they are; or why a row has none."""
    chosen: list[int | TriptychError] = [not_finite() if token is None else token for token in _best(logits)]
    adjusted = _adjust(logits, draws, chosen)
    groups: dict[_Filter, list[int]] = {}
    for row, draw in enumerate(draws):
        if isinstance(chosen[row], int) and not draw.chooser.sampling.greedy:
            groups.setdefault(_filter(draw.chooser.sampling, logits.shape[1]), []).append(row)
    at_once = max(1, CACHED_LOGITS // logits.shape[1])
    for kind, rows in groups.items():
        for start in range(0, len(rows), at_once):
            some = rows[start : start + at_once]
            own = logits[some]
            for place, row in enumerate(some):
                if row in adjusted:
                    own[place] = adjusted[row]
            for row, token in zip(some, _sample(own, [draws[row] for row in some], kind), strict=True):
                chosen[row] = token
    return chosen


def not_finite() -> Internal:
    """What a request hears whose logits are no numbers."""
    return Internal("the model produced logits that are not finite numbers")


def _nothing_left() -> Internal:
    return Internal("no token is left to choose from: the grammar, min_tokens or the model itself forbids every one")


def _adjust(logits: torch.Tensor, draws: Sequence[Draw], chosen: list[int | TriptychError]) -> dict[int, torch.Tensor]:
    """The changed logits [vocab] of the rows that are not taken as they are; their best token goes into ``chosen``."""
    rows = [row for row, draw in enumerate(draws) if isinstance(chosen[row], int) and draw.chooser.adjusts(draw.at)]
    if not rows:
        return {}
    changed = logits[rows]  # copies
    errors: dict[int, TriptychError] = {}
    for own, row in zip(changed, rows, strict=True):
        try:
            draws[row].chooser.adjust(own, draws[row].at)
        except TriptychError as error:
            errors[row] = error
    for row, token in zip(rows, _best(changed), strict=True):
        if row in errors:
            chosen[row] = errors[row]
        else:
            chosen[row] = _nothing_left() if token is None else token
    return dict(zip(rows, changed, strict=True))


def _best(logits: torch.Tensor) -> list[int | None]:
    """The most likely token of each row, the lowest id among equals.

    A maximum is NaN when any logit is, and infinite when one is +inf or all are -inf: no second pass is needed.
    """
    top = logits.max(dim=1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [token if math.isfinite(value) else None for token, value in pairs]


class _Filter(NamedTuple):
    """Rows that are cut to their likely tokens in the same way."""

    top_k: int
    nucleus: bool


def _filter(sampling: Sampling, vocab_size: int) -> _Filter:
    if 0 < sampling.top_k < vocab_size:
        return _Filter(sampling.top_k, nucleus=sampling.top_p < 1)
    return _Filter(0, nucleus=sampling.top_p < 1)


class _Columns(NamedTuple):
    """What the rows of a group ask for; tensors [n, 1] float64."""

    starts: list[Start]
    temperature: torch.Tensor
    top_p: torch.Tensor
    """Infinite where every token is kept."""
    min_p: torch.Tensor

    def of(self, rows: list[int]) -> _Columns:
        """Those of some rows."""
        starts = [self.starts[row] for row in rows]
        return _Columns(starts, self.temperature[rows], self.top_p[rows], self.min_p[rows])


def _columns(draws: Sequence[Draw], device: torch.device) -> _Columns:
    options = [draw.chooser.sampling for draw in draws]
    columns = (
        # Logits that differ at all differ by more than this can resolve: the limit of a temperature towards 0.
        [max(option.temperature, 1e-20) for option in options],
        [option.top_p if option.top_p < 1 else math.inf for option in options],
        [option.min_p for option in options],
    )
    starts = [Start(draw.chooser.seed, draw.at) for draw in draws]
    return _Columns(starts, *torch.tensor(columns, dtype=torch.float64, device=device).unsqueeze(2))


def _sample(logits: torch.Tensor, draws: Sequence[Draw], kind: _Filter) -> list[int]:
    """Pick one token for each row [n, vocab], which is used up; all rows are filtered in the same way."""
    asked = _columns(draws, logits.device)
    if kind.nucleus and not kind.top_k:
        return _sample_nucleus(logits, asked)
    if not kind.top_k:
        return _pick(_weights(logits, asked.temperature), None, asked)
    ids = largest(logits, kind.top_k)
    weights = _weights(logits.gather(1, ids).double(), asked.temperature)
    if kind.nucleus:
        weights = _nucleus(weights, asked.top_p, weights.sum(dim=1, keepdim=True))
    return _pick(weights, ids, asked)


def _sample_nucleus(logits: torch.Tensor, asked: _Columns) -> list[int]:
    """Top-p without top-k: a row is sorted as far as its nucleus reaches, which is seldom far."""
    tokens = [0] * len(logits)
    best = logits.amax(dim=1, keepdim=True)
    mass = ((logits - best) / asked.temperature.float()).exp_().sum(dim=1, keepdim=True, dtype=torch.float64)
    pending = list(range(len(logits)))
    limits = (*(limit for limit in NUCLEUS_CANDIDATES if limit < logits.shape[1]), logits.shape[1])
    for limit in limits:
        ids = largest(logits[pending], limit)
        part = asked.of(pending)
        weights = ((logits[pending].gather(1, ids).double() - best[pending]) / part.temperature).exp_()
        reached = weights.sum(dim=1, keepdim=True) >= part.top_p * mass[pending]
        ready = [row for row, done in enumerate(reached.flatten().tolist()) if done or limit == limits[-1]]
        if ready:
            ids, part = ids[ready], part.of(ready)
            kept = _nucleus(weights[ready], part.top_p, mass[pending][ready])
            for row, token in zip(ready, _pick(kept, ids, part), strict=True):
                tokens[pending[row]] = token
            pending = [number for row, number in enumerate(pending) if row not in ready]
        if not pending:
            break
    return tokens


def _weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Unnormalised probabilities in place of the logits; the best is 1, so neither temperature nor logit overflows."""
    return logits.sub_(logits.amax(dim=1, keepdim=True)).div_(temperature.to(logits.dtype)).exp_()


def _pick(weights: torch.Tensor, ids: torch.Tensor | None, asked: _Columns) -> list[int]:
    """One token id of each row of weights [n, c]; column ``c`` is token ``ids[:, c]``, or ``c`` itself."""
    if bool((asked.min_p > 0).any()):
        weights = torch.where(weights >= asked.min_p, weights, 0.0)
    places = winners(weights, ids, asked.starts)
    tokens = places if ids is None else ids.gather(1, places[:, None]).squeeze(1)
    return [int(token) for token in tokens.tolist()]


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids [n, count] of the largest logits of each row, ascending; among equals the lower ids are in."""
    if count == logits.shape[1]:
        return torch.arange(count, device=logits.device).expand(len(logits), -1)
    top = logits.topk(count + 1, dim=1)
    ids = top.indices[:, :count]
    least = top.values[:, count - 1]
    # topk breaks ties as it likes. Only a tie across the edge matters.
    for row in (least == top.values[:, count]).nonzero().flatten().tolist():
        above = ids[row][top.values[row, :count] > least[row]]
        equal = (logits[row] == least[row]).nonzero().flatten()
        ids[row] = torch.cat([above, equal[: count - len(above)]])
    return ids.sort(dim=1).values


def _nucleus(weights: torch.Tensor, top_p: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Zero all but the smallest set of likeliest tokens that reaches ``top_p`` of ``mass``."""
    ordered = weights.sort(dim=1, descending=True, stable=True)
    before = ordered.values.cumsum(dim=1) - ordered.values
    kept = torch.where(before < top_p * mass, ordered.values, 0.0)
    return torch.zeros_like(weights).scatter(1, ordered.indices, kept)
