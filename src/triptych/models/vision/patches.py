"""Patches of bytes to the numbers that a tower reads: one look-up a sample, in the tower's own number format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.encoder_input import EncoderInput

_PIECE = 256
"""Patches that are looked up at once: what lies between bytes and numbers then stays in a processor's cache."""


def patch_numbers(
    inputs: Sequence[EncoderInput], frames: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """[patches of all inputs, channels * frames * patch * patch]; a still is in every frame."""
    channels, _, *sides = inputs[0].patches.shape[1:]
    counts = [len(entry.patches) for entry in inputs]
    numbers = torch.empty((sum(counts), channels, frames, *sides), dtype=dtype, device=device)
    firsts = 256 * torch.arange(channels, dtype=torch.int32, device=device).view(channels, 1, 1, 1)
    for entry, own in zip(inputs, numbers.split(counts), strict=True):
        tones = torch.tensor(entry.tones).to(device, dtype).flatten()
        samples = torch.from_numpy(entry.patches).to(device)
        for part, out in zip(samples.split(_PIECE), own.split(_PIECE), strict=True):
            at = part.int().add_(firsts)
            out.copy_(tones.index_select(0, at.flatten()).view(at.shape))
    return numbers.flatten(1)
