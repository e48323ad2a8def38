"""How a checkpoint's makers want it sampled: the defaults in ``generation_config.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.checkpoint import read_json_if_present
from triptych.core.errors import CheckpointError, InvalidRequest
from triptych.core.request import Sampling

if TYPE_CHECKING:
    from pathlib import Path


def read_sampling(directory: Path) -> Sampling:
    """What applies where a request says nothing. ``do_sample: false`` is greedy; without the file nothing is changed.

    Raises:
        CheckpointError: the file is broken, or a value is out of bounds.
    """
    settings = read_json_if_present(directory, "generation_config.json")
    if not settings.flag("do_sample", True):
        return Sampling(temperature=0.0)
    plain = Sampling()
    try:
        return Sampling(
            temperature=settings.number("temperature", plain.temperature),
            top_p=settings.number("top_p", plain.top_p),
            top_k=settings.integer("top_k", plain.top_k, least=0),
            min_p=settings.number("min_p", plain.min_p),
            repetition_penalty=settings.number("repetition_penalty", plain.repetition_penalty),
        )
    except InvalidRequest as error:
        raise CheckpointError(f"{directory / settings.file}: {error}") from None
