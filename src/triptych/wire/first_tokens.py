"""First tokens as bytes that travel: a double in JSON would lose what two engines must agree on to the last bit.

bytes   = output, output, ...
output  = token id, number of the finish reason, kind of stop, 1 with a log probability, stop id or text bytes,
candidates; then the text, the log probability with its rank, the candidates' ids, log probabilities, ranks
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from triptych.core.errors import InvalidRequest
from triptych.core.finish import EosToken, FinishReason, StopMatch, StopText, StopToken
from triptych.core.logprobs import CandidateColumns, TokenLogprob
from triptych.core.request import MAX_STOP_CHARACTERS
from triptych.core.session import FirstToken

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_OUTPUTS = 1024
"""Above any configured limit."""

_HEAD = struct.Struct("<IBBBII")
_LOGPROB = struct.Struct("<dI")
_FINISHES = {1: FinishReason.STOP, 2: FinishReason.LENGTH, 3: FinishReason.CANCELLED}
_FINISH_NUMBERS = {finish: number for number, finish in _FINISHES.items()}
_NO_STOP, _STOP_ID, _EOS_ID, _STOP_TEXT = range(4)
_STOPS: dict[int, type[StopToken | EosToken]] = {_STOP_ID: StopToken, _EOS_ID: EosToken}
_CANDIDATE_BYTES = 12
_MAX_INT32 = 2**31 - 1


class _Head(NamedTuple):
    """What stands first of each output."""

    token_id: int
    finish: int
    """0: the output goes on."""
    stop: int
    logprob: int
    stop_value: int
    """The stop id, or how many bytes of text follow."""
    candidates: int

    @property
    def size(self) -> int:
        """Bytes that follow."""
        text = self.stop_value if self.stop == _STOP_TEXT else 0
        return text + (_LOGPROB.size if self.logprob else 0) + _CANDIDATE_BYTES * self.candidates


def encode_first(first: Sequence[FirstToken]) -> bytes:
    """Write the first token of each output, in order."""
    return b"".join(map(_encode, first))


def _encode(first: FirstToken) -> bytes:
    stop, value, text = _encode_stop(first.stop)
    logprob = first.logprob
    candidates = None if logprob is None else logprob.candidates
    head = _Head(
        token_id=first.token_id,
        finish=0 if first.finish is None else _FINISH_NUMBERS[first.finish],
        stop=stop,
        logprob=0 if logprob is None else 1,
        stop_value=value,
        candidates=0 if candidates is None else len(candidates.token_ids),
    )
    parts = [_HEAD.pack(*head), text]
    if logprob is not None:
        parts.append(_LOGPROB.pack(logprob.logprob, logprob.rank))
    if candidates is not None:
        parts += [
            candidates.token_ids.astype("<i4").tobytes(),
            candidates.logprobs.astype("<f4").tobytes(),
            candidates.ranks.astype("<i4").tobytes(),
        ]
    return b"".join(parts)


class _Stop(NamedTuple):
    """A stop match in its parts."""

    kind: int
    value: int
    text: bytes


def _encode_stop(stop: StopMatch | None) -> _Stop:
    match stop:
        case StopToken(token_id):
            return _Stop(_STOP_ID, token_id, b"")
        case EosToken(token_id):
            return _Stop(_EOS_ID, token_id, b"")
        case StopText(text):
            data = text.encode()
            return _Stop(_STOP_TEXT, len(data), data)
        case None:
            return _Stop(_NO_STOP, 0, b"")


def decode_first(data: bytes) -> tuple[FirstToken, ...]:
    """Read the first token of each output.

    Raises:
        InvalidRequest: the bytes are malformed; says at which output.
    """
    outputs: list[FirstToken] = []
    at = 0
    while at < len(data):
        index = len(outputs)
        if index == MAX_OUTPUTS:
            raise InvalidRequest(f"there are more than {MAX_OUTPUTS} outputs")
        if len(data) - at < _HEAD.size:
            raise InvalidRequest(f"output {index} is cut short")
        head = _Head(*_HEAD.unpack_from(data, at))
        at += _HEAD.size
        _check_head(index, head)
        if len(data) - at < head.size:
            raise InvalidRequest(f"output {index} is cut short")
        outputs.append(_decode(index, head, data[at : at + head.size]))
        at += head.size
    if not outputs:
        raise InvalidRequest("there is no output")
    return tuple(outputs)


def _check_head(index: int, head: _Head) -> None:
    if head.token_id > _MAX_INT32:
        raise InvalidRequest(f"output {index}: token id {head.token_id} is beyond 2^31")
    if head.finish and head.finish not in _FINISHES:
        raise InvalidRequest(f"output {index}: finish reason is number {head.finish}")
    if head.stop > _STOP_TEXT:
        raise InvalidRequest(f"output {index}: kind of stop is number {head.stop}")
    if head.stop and _FINISHES.get(head.finish) is not FinishReason.STOP:
        raise InvalidRequest(f"output {index}: it names a stop and has not stopped")
    if head.stop == _STOP_TEXT and head.stop_value > 4 * MAX_STOP_CHARACTERS:
        raise InvalidRequest(f"output {index}: the stop text has {head.stop_value} bytes")
    if head.logprob > 1 or (head.candidates and not head.logprob):
        raise InvalidRequest(f"output {index}: candidates without a log probability, or its mark is not 0 or 1")


def _decode(index: int, head: _Head, body: bytes) -> FirstToken:
    """One output; ``body`` has the size that its head says."""
    text_bytes = head.stop_value if head.stop == _STOP_TEXT else 0
    return FirstToken(
        token_id=head.token_id,
        logprob=_decode_logprob(index, head, body[text_bytes:]) if head.logprob else None,
        finish=_FINISHES.get(head.finish),
        stop=_decode_stop(index, head, body[:text_bytes]),
    )


def _decode_stop(index: int, head: _Head, text: bytes) -> StopMatch | None:
    if head.stop == _NO_STOP:
        return None
    if head.stop != _STOP_TEXT:
        return _STOPS[head.stop](head.stop_value)
    try:
        return StopText(text.decode())
    except UnicodeDecodeError:
        raise InvalidRequest(f"output {index}: the stop text is not UTF-8") from None


def _decode_logprob(index: int, head: _Head, body: bytes) -> TokenLogprob:
    logprob, rank = _LOGPROB.unpack_from(body)
    candidates = _decode_candidates(body[_LOGPROB.size :], head.candidates) if head.candidates else None
    numbers = (
        [logprob]
        if candidates is None
        else [logprob, *map(float, (candidates.logprobs.min(), candidates.logprobs.max()))]
    )
    if not all(map(math.isfinite, numbers)):
        raise InvalidRequest(f"output {index}: a log probability is not finite")
    ranks = [rank] if candidates is None else [rank, int(candidates.ranks.min())]
    if min(ranks) < 1 or rank > _MAX_INT32:
        raise InvalidRequest(f"output {index}: a rank is outside [1, 2^31)")
    if candidates is not None and int(candidates.token_ids.min()) < 0:
        raise InvalidRequest(f"output {index}: a candidate's token id is beyond 2^31")
    return TokenLogprob(logprob, rank, candidates)


def _decode_candidates(data: bytes, count: int) -> CandidateColumns:
    size = 4 * count
    return CandidateColumns(
        token_ids=np.frombuffer(data, "<i4", count).astype(np.int32),
        logprobs=np.frombuffer(data, "<f4", count, size).astype(np.float32),
        ranks=np.frombuffer(data, "<i4", count, 2 * size).astype(np.int32),
    )
