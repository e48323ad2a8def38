"""What a tower reads of a picture: bit for bit what transformers' image processor without torchvision makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from tests.checkpoints import tokenise
from tests.fitted import encoder_input
from triptych.core.checkpoint import Section
from triptych.core.clip import MAX_ASPECT, FrameSize
from triptych.core.media import Picture
from triptych.core.picture_fit import PictureFit
from triptych.models.vision.patches import patch_numbers
from triptych.processors.qwen3_vl import Qwen3VLProcessor
from triptych.processors.registry import load_processor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from triptych.core.encoder_input import EncoderInput

HALF = [0.5, 0.5, 0.5]
SIZES = [
    (1, 1),
    (1, 200),
    (200, 1),
    (2, 399),
    (3, 3),
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
PUBLISHED = {
    "Qwen3-VL": {
        "patch_size": 16,
        "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
        "image_mean": HALF,
        "image_std": HALF,
    },
    "Qwen2-VL": {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12_845_056},
}
"""As the checkpoints' own files have them; what is left out has the same default on both sides."""


def picture(height: int, width: int) -> Picture:
    return Picture(np.random.default_rng(height * 7919 + width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def processor(**images: object) -> Qwen3VLProcessor:
    """With a tower of the same shape."""
    vision = {
        "patch_size": images["patch_size"],
        "spatial_merge_size": images.get("merge_size", 2),
        "temporal_patch_size": images.get("temporal_patch_size", 2),
    }
    config = Section("config.json", {"vision_config": vision})
    return Qwen3VLProcessor(config, Section("preprocessor_config.json", images), None, bytes(32), tokenise)


def numbers(entry: EncoderInput, frames: int = 2) -> torch.Tensor:
    return patch_numbers([entry], frames, torch.device("cpu"), torch.float32)


def assert_equal(entry: EncoderInput, reference: Qwen2VLImageProcessorPil, shown: Picture) -> None:
    expected = reference(Image.fromarray(shown.pixels), return_tensors="pt")
    assert tuple(entry.layout.grid) == tuple(expected["image_grid_thw"][0])
    assert expected["pixel_values"].dtype == torch.float32
    assert torch.equal(numbers(entry, reference.temporal_patch_size), expected["pixel_values"])
    assert entry.patches.nbytes * 4 * reference.temporal_patch_size == expected["pixel_values"].nbytes


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_patches_are_those_of_transformers(checkpoint: Callable[[str], Path], height: int, width: int) -> None:
    directory = checkpoint("vl-deepstack")
    shown = picture(height, width)
    entry = encoder_input(load_processor(directory, tokenise), 0, shown, bytes(32))
    assert_equal(entry, Qwen2VLImageProcessorPil.from_pretrained(directory), shown)


@pytest.mark.parametrize(("height", "width"), [(2170, 1536), (3000, 15), (2999, 1501)])
@pytest.mark.parametrize("family", PUBLISHED)
def test_large_pictures_with_published_settings(family: str, height: int, width: int) -> None:
    shown, images = picture(height, width), PUBLISHED[family]
    entry = encoder_input(processor(**images), 0, shown, bytes(32))
    assert_equal(entry, Qwen2VLImageProcessorPil(**images), shown)


@st.composite
def image_settings(draw: st.DrawFn) -> dict[str, object]:
    least = draw(st.integers(1, 150_000))
    scale = st.one_of(st.sampled_from([1 / 255, 1 / 256, 1 / 127.5, 1.0]), st.floats(1e-6, 10.0))
    three = {"min_size": 3, "max_size": 3}
    return {
        "patch_size": draw(st.sampled_from([14, 16, 8, 3])),
        "merge_size": draw(st.sampled_from([2, 1, 3])),
        "temporal_patch_size": draw(st.sampled_from([2, 1, 3])),
        "resample": draw(st.sampled_from([3, 2, 1, 0, 4, 5])),
        "size": {"shortest_edge": least, "longest_edge": draw(st.integers(least, 200_000))},
        "rescale_factor": draw(scale),
        "image_mean": draw(st.lists(st.floats(-3.0, 3.0), **three)),
        "image_std": draw(st.lists(st.one_of(st.floats(1e-3, 3.0), st.floats(-3.0, -1e-3)), **three)),
    }


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int]:
    """(height, width) up to 3000, at most 500,000 pixels, one side at most 200 times the other."""
    long = draw(st.integers(1, 3000))
    short = draw(st.integers(-(-long // 200), max(-(-long // 200), min(long, 500_000 // long))))
    return (long, short) if draw(st.booleans()) else (short, long)


@settings(max_examples=200)
@given(image_settings(), shapes())
def test_patches_of_any_shape_with_any_settings(images: dict[str, object], shape: tuple[int, int]) -> None:
    shown = picture(*shape)
    entry = encoder_input(processor(**images), 0, shown, bytes(32))
    assert_equal(entry, Qwen2VLImageProcessorPil(**images), shown)


sides = st.one_of(
    st.integers(1, 3000),
    st.integers(1, 65_535),
    st.builds(
        lambda count, half, beside: max(1, count * half + beside),  # half-way between two numbers of cells
        st.integers(1, 200),
        st.sampled_from([14, 16, 24]),
        st.integers(-1, 1),
    ),
)


@settings(max_examples=2000)
@given(sides, sides, st.sampled_from([1, 14, 28, 32, 48]), st.integers(1, 1 << 25), st.integers(0, 1 << 25))
def test_sizes_are_those_of_transformers(height: int, width: int, cell: int, least: int, more: int) -> None:
    fit = PictureFit(cell, least, least + more, 3)
    try:
        expected = smart_resize(height, width, cell, least, least + more)
    except ValueError:
        with pytest.raises(ValueError, match="is too narrow"):
            fit.size(FrameSize(height, width))
    else:
        assert max(height, width) <= MAX_ASPECT * min(height, width)
        assert fit.size(FrameSize(height, width)) == expected


@pytest.mark.parametrize(
    "images",
    [
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
        {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]},
        {"resample": 2},
        {"min_pixels": 40_000, "max_pixels": 50_000},
    ],
)
def test_settings_are_read_from_the_files_that_transformers_writes(
    checkpoint: Callable[[str], Path], tmp_path: Path, images: dict[str, object]
) -> None:
    reference = Qwen2VLImageProcessorPil(patch_size=16, **images)
    (tmp_path / "config.json").write_bytes((checkpoint("vl-deepstack") / "config.json").read_bytes())
    reference.save_pretrained(tmp_path)
    shown = picture(203, 517)
    assert_equal(encoder_input(load_processor(tmp_path, tokenise), 0, shown, bytes(32)), reference, shown)


def test_the_newer_file_that_holds_every_processor_is_read(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = checkpoint("vl-deepstack")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    inner = (directory / "preprocessor_config.json").read_text()
    (tmp_path / "processor_config.json").write_text(f'{{"image_processor": {inner}}}')
    shown = picture(90, 61)
    entries = [encoder_input(load_processor(d, tokenise), 0, shown, bytes(32)) for d in (directory, tmp_path)]
    assert torch.equal(*(numbers(entry) for entry in entries))
