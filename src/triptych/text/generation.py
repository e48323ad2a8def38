"""How a checkpoint's makers want it sampled: the defaults in ``generation_config.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.errors import CheckpointError, InvalidRequest
from triptych.core.request import Sampling
from triptych.text.files import read_object_if_present

if TYPE_CHECKING:
    from pathlib import Path

_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_sampling(directory: Path) -> Sampling:
    """What applies where a request says nothing. ``do_sample: false`` is greedy; without the file nothing is changed.

    Raises:
        CheckpointError: the file is broken, or a value is out of bounds.
    """
    path = directory / "generation_config.json"
    settings = read_object_if_present(path)
    if settings.get("do_sample") is False:
        return Sampling(temperature=0.0)
    given = {name: settings[name] for name in _NUMBERS if settings.get(name) is not None}
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in given.values()):
        raise CheckpointError(f"{path}: {', '.join(given)} must be numbers")
    try:
        return Sampling(**given)  # type: ignore[arg-type]
    except InvalidRequest as error:
        raise CheckpointError(f"{path}: {error}") from None
