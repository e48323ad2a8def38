"""One planned request becomes as many requests of the engine as it has outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from triptych.core.errors import Internal
from triptych.core.request import derived_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.request import Request


def fan_out(request: Request, serials: Sequence[str], arrival: float) -> tuple[Request, ...]:
    """One request for each serial: seeds are derived, everything that is large is shared.

    Only the first asks for the prompt's log probabilities: it is the one that computes the prompt.
    """
    seed = request.sampling.seed
    if seed is None:
        raise Internal("a request was prepared without a seed")
    follower = replace(request.logprobs, prompt=False, prompt_candidates=None, prompt_start=0)
    return tuple(
        replace(
            request,
            request_id=serial,
            arrival=arrival,
            sampling=replace(request.sampling, seed=derived_seed(seed, index)),
            logprobs=request.logprobs if index == 0 else follower,
        )
        for index, serial in enumerate(serials)
    )
