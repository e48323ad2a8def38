"""Log probabilities: what a client may ask for, and what comes back.

They are those of the model itself: before penalties, masks, temperature and filters. A rank counts from 1, the most
likely token; tokens of equal logits share the better rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.core.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_TOP_N = 128
MAX_CANDIDATE_IDS = 1024
"""Explicit ids of one selection."""
MAX_PROMPT_ENTRIES = 1_000_000
"""Log probabilities of one request's prompt, candidates included: they leave in one message."""
MAX_OUTPUT_ENTRIES = 8_000_000
"""Log probabilities of one request's answers, candidates included: a reader may be slow, and they wait in memory."""


@dataclass(frozen=True, slots=True)
class TopN:
    """The ``count`` most likely tokens, most likely first."""

    count: int

    def __post_init__(self) -> None:
        """Check the bound.

        Raises:
            InvalidRequest: naming the limit.
        """
        if not 0 <= self.count <= MAX_TOP_N:
            raise InvalidRequest(f"candidates: top_n must be in [0, {MAX_TOP_N}], not {self.count}")


@dataclass(frozen=True, slots=True)
class GivenIds:
    """These tokens, in this order."""

    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the bound; whether the ids are in the vocabulary is checked where it is known.

        Raises:
            InvalidRequest: naming the limit.
        """
        if not 1 <= len(self.token_ids) <= MAX_CANDIDATE_IDS:
            raise InvalidRequest(
                f"candidates: token_ids must have between 1 and {MAX_CANDIDATE_IDS} ids, not {len(self.token_ids)}"
            )


@dataclass(frozen=True, slots=True)
class WholeVocabulary:
    """Every token, in id order."""


Candidates = TopN | GivenIds | WholeVocabulary


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Which log probabilities a request wants."""

    prompt: bool = False
    prompt_candidates: Candidates | None = None
    prompt_start: int = 0
    """First prompt token, by its index in the expanded prompt, that gets one; the token at 0 never has one."""
    output: bool = False
    output_candidates: Candidates | None = None

    def __post_init__(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            InvalidRequest: naming the field.
        """
        if not self.prompt and (self.prompt_candidates is not None or self.prompt_start):
            raise InvalidRequest(
                "response.prompt_candidates and prompt_logprob_start need response.return_prompt_logprobs"
            )
        if not self.output and self.output_candidates is not None:
            raise InvalidRequest("response.output_candidates needs response.return_output_logprobs")


@dataclass(frozen=True, slots=True, eq=False)
class CandidateColumns:
    """The candidates of one place in the sequence; C of them."""

    token_ids: npt.NDArray[np.int32]
    """[C]."""
    logprobs: npt.NDArray[np.float32]
    """[C], finite."""
    ranks: npt.NDArray[np.int32]
    """[C], from 1."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprob:
    """One token's own number, and the candidates for its place."""

    logprob: float
    rank: int
    candidates: CandidateColumns | None = None
    """None where none were asked for."""
