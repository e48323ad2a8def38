"""From logits to the log probabilities that requests ask for.

The logits are the model's own, as they were before penalties, masks, temperature and filters. A log probability is
the log-softmax in float32, not below the lowest finite number. A rank compares logits, because two different ones may
round to the same log probability: 1 and the number of strictly larger logits, so equal logits share the better rank.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from triptych.core.logprobs import CandidateColumns, GivenIds, TokenLogprob, TopN
from triptych.engine.sampler import largest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from triptych.core.logprobs import Candidates

LOGITS_AT_ONCE = 1 << 20
"""Logits that are worked on together: few enough for memory that is at hand, many enough for few calls."""
_LOWEST = float(np.finfo(np.float32).min)


def token_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], wanted: Sequence[Candidates | None]
) -> list[TokenLogprob | None]:
    """One token's log probability for each row, with its candidates.

    Rows that want the same candidates are worked on together, a bounded number at a time.

    Args:
        logits: [n, vocab] float32; left as it is.
        tokens: the token of each row.
        wanted: the candidates of each row. ``TopN(0)`` is the same as None; more than the vocabulary has are all.

    Returns:
        One for each row; None where a row is not finite: a NaN, a positive infinity, or nothing but negative ones.
    """
    at_once = max(1, LOGITS_AT_ONCE // logits.shape[1])
    found: list[TokenLogprob | None] = []
    for begin in range(0, len(logits), at_once):
        some = slice(begin, begin + at_once)
        found += _token_logprobs(logits[some], tokens[some], wanted[some])
    return found


def _token_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], wanted: Sequence[Candidates | None]
) -> list[TokenLogprob | None]:
    """As above, all at once; takes a few times the memory of ``logits``."""
    logprobs = logits.log_softmax(dim=1)
    best = logits.amax(dim=1, keepdim=True)
    at = torch.tensor(tokens, dtype=torch.int64, device=logits.device).unsqueeze(1)
    own = logits.gather(1, at)
    ranks = torch.ones_like(at)
    if bool((own < best).any()):  # what was sampled is often the best
        ranks += torch.count_nonzero(logits > own, dim=1).unsqueeze(1)
    finite = torch.isfinite(best).flatten().tolist()
    candidates: dict[int, CandidateColumns] = {}
    for selection, rows in _groups(wanted, finite).items():
        some = (logits, logprobs) if len(rows) == len(logits) else (logits[rows], logprobs[rows])
        candidates.update(zip(rows, _select(*some, selection), strict=True))
    values = _finite(logprobs.gather(1, at))
    pairs = zip(values.flatten().tolist(), ranks.flatten().tolist(), strict=True)
    return [
        TokenLogprob(value, rank, candidates.get(row)) if finite[row] else None
        for row, (value, rank) in enumerate(pairs)
    ]


def _groups(wanted: Sequence[Candidates | None], finite: Sequence[bool]) -> dict[Candidates, list[int]]:
    """Rows that are finite by what they want."""
    groups: dict[Candidates, list[int]] = {}
    last: Candidates | None = None
    rows: list[int] = []
    for row, selection in enumerate(wanted):
        if not finite[row] or selection is None or (isinstance(selection, TopN) and not selection.count):
            continue
        if selection is not last:  # neighbours are often of one request, and a thousand ids are not hashed in no time
            last = selection
            rows = groups.setdefault(selection, [])
        rows.append(row)
    return groups


def _select(logits: torch.Tensor, logprobs: torch.Tensor, selection: Candidates) -> Iterator[CandidateColumns]:
    """The candidates of each row of ``logits`` and ``logprobs``, [n, vocab] each."""
    match selection:
        case TopN(count):
            return _top(logits, logprobs, count)
        case GivenIds(token_ids):
            return _given(logits, logprobs, token_ids)
        case _:
            return _whole(logits, logprobs)


def _top(logits: torch.Tensor, logprobs: torch.Tensor, count: int) -> Iterator[CandidateColumns]:
    ids = largest(logits, min(count, logits.shape[1]))
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order.indices)
    rising = -order.values
    # whatever is larger than a candidate is a candidate itself
    ranks = torch.searchsorted(rising, rising) + 1
    columns = (_ints(ids), _floats(logprobs.gather(1, ids)), _ints(ranks))
    for row in zip(*columns, strict=True):
        # Copies: a reader may be slow, and a view would keep the candidates of the whole batch.
        yield CandidateColumns(*(column.copy() for column in row))


def _given(logits: torch.Tensor, logprobs: torch.Tensor, token_ids: tuple[int, ...]) -> Iterator[CandidateColumns]:
    ids = np.array(token_ids, np.int32)
    ids.setflags(write=False)  # one array for all rows
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    for row, values in zip(logits.cpu().numpy(), _floats(logprobs[:, chosen]), strict=True):
        above = len(row) - np.sort(row).searchsorted(row[ids], side="right")
        yield CandidateColumns(ids, values.copy(), (above + 1).astype(np.int32))


def _whole(logits: torch.Tensor, logprobs: torch.Tensor) -> Iterator[CandidateColumns]:
    ids = _all_ids(logits.shape[1])
    for row, values in zip(logits.cpu().numpy(), _floats(logprobs), strict=True):
        yield CandidateColumns(ids, values.copy(), _ranks(row))


@functools.lru_cache(maxsize=1)
def _all_ids(vocab_size: int) -> npt.NDArray[np.int32]:
    """One array for all answers; nobody may write to it."""
    ids = np.arange(vocab_size, dtype=np.int32)
    ids.setflags(write=False)
    return ids


def _ranks(row: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
    """The rank of each token of one row [vocab]: the place in falling order at which its run of equals begins."""
    order = np.argsort(row)[::-1]
    falling = row[order]
    places = np.arange(1, len(row) + 1, dtype=np.int32)
    places[1:][falling[1:] == falling[:-1]] = 0
    ranks = np.empty(len(row), np.int32)
    ranks[order] = np.maximum.accumulate(places)
    return ranks


def _finite(values: torch.Tensor) -> torch.Tensor:
    """With the lowest finite number for the logarithm of nothing."""
    return values.clamp(min=_LOWEST)


def _floats(values: torch.Tensor) -> npt.NDArray[np.float32]:
    return _finite(values).cpu().numpy()


def _ints(values: torch.Tensor) -> npt.NDArray[np.int32]:
    return values.to(torch.int32).cpu().numpy()
