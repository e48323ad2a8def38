"""Sampling defaults of a checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from triptych.core.errors import CheckpointError
from triptych.core.request import Sampling
from triptych.text.generation import read_sampling

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, Sampling()),
        ({}, Sampling()),
        ({"do_sample": False, "temperature": 0.7}, Sampling(temperature=0)),
        ({"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}, Sampling(0.7, 0.8, 20)),
        ({"temperature": 0.6, "repetition_penalty": 1.05}, Sampling(temperature=0.6, repetition_penalty=1.05)),
    ],
)
def test_defaults(tmp_path: Path, settings: dict[str, object] | None, expected: Sampling) -> None:
    if settings is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert read_sampling(tmp_path) == expected


@pytest.mark.parametrize(
    "settings", [{"temperature": "hot"}, {"top_p": 3}, {"top_k": True}, {"top_k": 1.5}, {"do_sample": 1}]
)
def test_nonsense_is_named(tmp_path: Path, settings: dict[str, object]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=next(iter(settings))):
        read_sampling(tmp_path)
