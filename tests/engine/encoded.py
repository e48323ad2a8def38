"""Requests whose items come with rows that somebody else has computed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from tests.engine.fakes import FakeTower
from triptych.core.encoder_input import EncodedInput, EncoderInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from triptych.core.request import Request
    from triptych.models.contract import VisionTower


def as_bytes(rows: torch.Tensor) -> npt.NDArray[np.uint8]:
    """[rows, row bytes]."""
    return rows.contiguous().view(torch.uint8).numpy()


def came_encoded(made: Request, tower: VisionTower | None = None) -> Request:
    """The same request, each of its items encoded by another tower, alone."""
    tower = tower or FakeTower()
    return dataclasses.replace(made, inputs=tuple(_encoded(tower, item) for item in _fresh(made)))


def _fresh(made: Request) -> Sequence[EncoderInput]:
    return [item for item in made.inputs if isinstance(item, EncoderInput)]


@torch.inference_mode()
def _encoded(tower: VisionTower, item: EncoderInput) -> EncodedInput:
    (rows,) = tower.encode([item])
    return EncodedInput(item.layout, as_bytes(rows))
