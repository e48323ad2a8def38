"""Log probabilities: what a request asks for, and what stands at each token. Protobuf <-> core, both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet

from triptych.core.errors import Internal, InvalidRequest, UnsupportedFeature
from triptych.core.logprobs import (
    MAX_CANDIDATE_IDS,
    CandidateColumns,
    Candidates,
    GivenIds,
    LogprobOptions,
    TokenLogprob,
    TopN,
    WholeVocabulary,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from triptych.wire.gen import generation_pb2 as pb


def decode_options(message: pb.ResponseOptions) -> LogprobOptions:
    """Read which log probabilities are wanted.

    Raises:
        InvalidRequest: a selection is out of bounds or contradicts the rest.
        UnsupportedFeature: a selection of a kind that this release of the contract does not have.
    """
    return LogprobOptions(
        prompt=message.return_prompt_logprobs,
        prompt_candidates=_decode_selection("response.prompt_candidates", message.prompt_candidates),
        prompt_start=message.prompt_logprob_start,
        output=message.return_output_logprobs,
        output_candidates=_decode_selection("response.output_candidates", message.output_candidates),
    )


def _decode_selection(field: str, message: pb.CandidateTokenSelection) -> Candidates | None:
    match message.WhichOneof("selection"):
        case "top_n":
            return TopN(message.top_n)
        case "token_ids":
            count = len(message.token_ids.ids)
            if count > MAX_CANDIDATE_IDS:  # before there is an object for each
                raise InvalidRequest(f"{field}.token_ids has {count} ids; at most {MAX_CANDIDATE_IDS}")
            return GivenIds(tuple(message.token_ids.ids))
        case "all":
            return WholeVocabulary()
    if len(UnknownFieldSet(message)):
        raise UnsupportedFeature(f"{field} has a selection that is not supported by this engine")
    return None


def encode_options(options: LogprobOptions, message: pb.ResponseOptions) -> None:
    """Write which log probabilities are wanted."""
    message.return_prompt_logprobs = options.prompt
    message.return_output_logprobs = options.output
    if options.prompt:
        message.prompt_logprob_start = options.prompt_start
    if options.prompt_candidates is not None:
        _encode_selection(options.prompt_candidates, message.prompt_candidates)
    if options.output_candidates is not None:
        _encode_selection(options.output_candidates, message.output_candidates)


def _encode_selection(candidates: Candidates, message: pb.CandidateTokenSelection) -> None:
    match candidates:
        case TopN(count):
            message.top_n = count
        case GivenIds(token_ids):
            message.token_ids.ids.extend(token_ids)
        case WholeVocabulary():
            message.all.SetInParent()


def encode_token(
    message: pb.TokenInfo, token_id: int, logprob: TokenLogprob | None, token_text: Callable[[int], str]
) -> None:
    """Write one token, with its number and its candidates where it has them."""
    message.token_id = token_id
    message.token = token_text(token_id)
    if logprob is None:
        return
    message.logprob = logprob.logprob
    message.rank = logprob.rank
    if logprob.candidates is None:
        return
    columns, add = logprob.candidates, message.candidates.add
    rows = zip(columns.token_ids.tolist(), columns.logprobs.tolist(), columns.ranks.tolist(), strict=True)
    for candidate, number, rank in rows:
        add(token_id=candidate, logprob=number, rank=rank, token=token_text(candidate))


def decode_token(message: pb.TokenInfo) -> TokenLogprob | None:
    """Read what stands at one token; a rank that the engine does not report is 0.

    Raises:
        Internal: there are candidates, and the token has no number of its own.
    """
    candidates = message.candidates
    if not message.HasField("logprob"):
        if len(candidates):
            raise Internal("the engine sent candidates for a token without its log probability")
        return None
    if not len(candidates):
        return TokenLogprob(message.logprob, message.rank)
    columns = CandidateColumns(
        token_ids=np.array([candidate.token_id for candidate in candidates], np.uint32).astype(np.int32),
        logprobs=np.array([candidate.logprob for candidate in candidates], np.float64).astype(np.float32),
        ranks=np.array([candidate.rank for candidate in candidates], np.uint32).astype(np.int32),
    )
    return TokenLogprob(message.logprob, message.rank, columns)
