"""Patches, bit for bit, against the image processor of transformers that needs no torchvision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from triptych.core.media import Picture
from triptych.processors.registry import load_processor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from triptych.core.encoder_input import EncoderInput

SIZES = [
    (1, 1),
    (1, 200),
    (200, 1),
    (2, 399),
    (31, 33),
    (32, 32),
    (47, 48),
    (16, 3000),
    (97, 211),
    (224, 224),
    (333, 640),
    (700, 500),
    (1013, 769),
]


def picture(height: int, width: int) -> Picture:
    return Picture(np.random.default_rng(height * 7919 + width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def assert_equal(entry: EncoderInput, reference: Qwen2VLImageProcessorPil, given: Picture) -> None:
    expected = reference(Image.fromarray(given.pixels), return_tensors="np")
    assert tuple(entry.layout.grid) == tuple(expected["image_grid_thw"][0])
    assert entry.patches.dtype == expected["pixel_values"].dtype == np.float32
    assert np.array_equal(entry.patches, expected["pixel_values"])


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_patches_are_those_of_transformers(checkpoint: Callable[[str], Path], height: int, width: int) -> None:
    directory = checkpoint("vl-deepstack")
    given = picture(height, width)
    entry = load_processor(directory).encoder_input(0, given, bytes(32))
    assert_equal(entry, Qwen2VLImageProcessorPil.from_pretrained(directory), given)


@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
        {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]},
        {"resample": 2},
        {"min_pixels": 40_000, "max_pixels": 50_000},
    ],
)
def test_other_settings_give_other_equal_patches(
    checkpoint: Callable[[str], Path], tmp_path: Path, settings: dict[str, object]
) -> None:
    reference = Qwen2VLImageProcessorPil(patch_size=16, **settings)
    (tmp_path / "config.json").write_bytes((checkpoint("vl-deepstack") / "config.json").read_bytes())
    reference.save_pretrained(tmp_path)
    given = picture(203, 517)
    assert_equal(load_processor(tmp_path).encoder_input(0, given, bytes(32)), reference, given)


def test_the_newer_file_that_holds_every_processor_is_read(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = checkpoint("vl-deepstack")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    inner = (directory / "preprocessor_config.json").read_text()
    (tmp_path / "processor_config.json").write_text(f'{{"image_processor": {inner}}}')
    given = picture(90, 61)
    patches = [load_processor(d).encoder_input(0, given, bytes(32)).patches for d in (directory, tmp_path)]
    assert np.array_equal(*patches)
