"""Bytes to numbers: every sample by the table of its own item and channel, in any number format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.requests import item
from triptych.core.encoder_input import EncoderInput
from triptych.models.vision.patches import patch_numbers

CPU = torch.device("cpu")
COUNTS = (1, 255, 256, 257, 700)
"""Patches of each item: what is looked up at once, and one more and less."""


def made(tokens: int, frames: int, channels: int = 3, side: int = 2) -> EncoderInput:
    noise = np.random.default_rng(tokens)
    patches = noise.integers(0, 256, (tokens, channels, frames, side, side), np.uint8)
    tones = noise.standard_normal((channels, 256), np.float32)
    tones.setflags(write=False)
    return EncoderInput(item(tokens, (0, tokens), encoder_tokens=tokens), patches, tones)


def expected(entry: EncoderInput, frames: int) -> torch.Tensor:
    """Sample by sample."""
    tokens, channels, own, *sides = entry.patches.shape
    numbers = np.empty((tokens, channels, frames, *sides), np.float32)
    for channel in range(channels):
        for frame in range(frames):
            numbers[:, channel, frame] = entry.tones[channel][entry.patches[:, channel, frame if own > 1 else 0]]
    return torch.from_numpy(numbers.reshape(tokens, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_item_has_its_own_table(dtype: torch.dtype) -> None:
    inputs = [made(count, 1) for count in COUNTS]
    numbers = patch_numbers(inputs, 2, CPU, dtype)
    assert numbers.dtype == dtype
    assert torch.equal(numbers, torch.cat([expected(entry, 2) for entry in inputs]).to(dtype))


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_stills_fill_every_frame_and_clips_have_their_own(frames: int) -> None:
    inputs = [made(5, 1), made(7, frames), made(3, 1)]
    numbers = patch_numbers(inputs, frames, CPU, torch.float32)
    assert torch.equal(numbers, torch.cat([expected(entry, frames) for entry in inputs]))


def test_the_largest_sample_of_the_last_channel_is_in_the_table() -> None:
    entry = EncoderInput(item(1, (0, 1)), np.full((1, 4, 1, 1, 1), 255, np.uint8), made(4, 1, channels=4).tones)
    assert patch_numbers([entry], 1, CPU, torch.float32)[0].tolist() == entry.tones[:, 255].tolist()
