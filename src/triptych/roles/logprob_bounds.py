"""How many log probabilities a request may cause: refused with the number and what to lower, before it is accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.errors import InvalidRequest
from triptych.core.logprobs import MAX_OUTPUT_ENTRIES, MAX_PROMPT_ENTRIES, Candidates, GivenIds, TopN

if TYPE_CHECKING:
    from triptych.core.logprobs import LogprobOptions
    from triptych.core.request import GenerateRequest


def check_candidate_ids(options: LogprobOptions, vocab_size: int) -> None:
    """Refuse explicit candidates that no token of this model has.

    Raises:
        InvalidRequest: naming the first such id.
    """
    for field, candidates in (
        ("prompt_candidates", options.prompt_candidates),
        ("output_candidates", options.output_candidates),
    ):
        if isinstance(candidates, GivenIds):
            for token_id in candidates.token_ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(
                        f"response.{field}: token id {token_id} is outside the vocabulary of {vocab_size}"
                    )


def check_prompt_entries(options: LogprobOptions, prompt_tokens: int, vocab_size: int) -> None:
    """Bound the log probabilities of a prompt.

    Call it with the unexpanded prompt too, which is never the longer one.

    Raises:
        InvalidRequest: naming the count and the limit.
    """
    if not options.prompt:
        return
    tokens = prompt_tokens - max(options.prompt_start, 1)  # the token at 0 never has one
    each = 1 + _count(options.prompt_candidates, vocab_size)
    if tokens * each > MAX_PROMPT_ENTRIES:
        raise InvalidRequest(
            f"the prompt's log probabilities are {tokens * each} ({tokens} tokens with {each} each); at most "
            f"{MAX_PROMPT_ENTRIES}: ask for fewer response.prompt_candidates or raise response.prompt_logprob_start"
        )


def check_prompt_start(options: LogprobOptions, prompt_tokens: int) -> None:
    """Refuse a start behind the end of the expanded prompt.

    Raises:
        InvalidRequest: naming both.
    """
    if options.prompt and options.prompt_start >= prompt_tokens:
        raise InvalidRequest(
            f"response.prompt_logprob_start is {options.prompt_start} but the prompt has only {prompt_tokens} tokens"
        )


def check_output_entries(request: GenerateRequest, room: int, vocab_size: int) -> None:
    """Bound the log probabilities of all outputs.

    Args:
        request: whose outputs they are.
        room: tokens that the context window leaves for one of them.
        vocab_size: candidates where all are asked for.

    Raises:
        InvalidRequest: naming the count and the limit.
    """
    options, outputs = request.logprobs, request.num_sequences
    if not options.output:
        return
    tokens = min(request.stopping.max_tokens or room, room)
    each = 1 + _count(options.output_candidates, vocab_size)
    total = tokens * outputs * each
    if total > MAX_OUTPUT_ENTRIES:
        raise InvalidRequest(
            f"the answer may have {total} log probabilities ({outputs} outputs of up to {tokens} tokens with {each} "
            f"each); at most {MAX_OUTPUT_ENTRIES}: lower max_tokens, num_sequences or response.output_candidates"
        )


def _count(candidates: Candidates | None, vocab_size: int) -> int:
    match candidates:
        case None:
            return 0
        case TopN(count):
            return min(count, vocab_size)
        case GivenIds(token_ids):
            return len(token_ids)
        case _:
            return vocab_size
