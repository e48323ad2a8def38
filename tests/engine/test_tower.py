"""A tower without its decoder: the same rows and number format, and nothing else is built, read or looked at."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import TEXT_SHAPES, VISION_SHAPES, tokenise, write_checkpoint
from tests.fitted import encoder_input
from triptych.core.errors import CheckpointError, StartupError, UnknownArchitecture
from triptych.core.media import Picture
from triptych.models.registry import describe, describe_tower, load_model, load_tower
from triptych.models.text_decoder import TextDecoder
from triptych.processors.registry import load_processor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from triptych.core.encoder_input import EncoderInput

WEIGHTS = "model.safetensors"
TOWER = "model.visual."
EMBEDDING = "model.language_model.embed_tokens.weight"


@pytest.fixture
def copy(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a checkpoint that the test may break."""
    return lambda shape: shutil.copytree(checkpoint(shape), tmp_path / shape)


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def pictures(directory: Path) -> list[EncoderInput]:
    processor, noise = load_processor(directory, tokenise), np.random.default_rng(7)
    sizes = ((40, 70), (96, 33), (64, 64))
    return [
        encoder_input(processor, index, Picture(noise.integers(0, 256, (*size, 3), np.uint8)), bytes([index]) * 32)
        for index, size in enumerate(sizes)
    ]


def refusal(directory: Path, kind: type[Exception] = CheckpointError) -> str:
    """The one line that loading, and describing, gives."""
    with pytest.raises(kind) as loading:
        load_tower(directory)
    with pytest.raises(kind) as describing:
        describe_tower(directory)
    assert str(loading.value) == str(describing.value)
    assert "\n" not in str(loading.value)
    return str(loading.value)


@pytest.mark.parametrize("shape", VISION_SHAPES)
def test_rows_are_those_of_the_whole_model(checkpoint: Callable[[str], Path], shape: str) -> None:
    directory = checkpoint(shape)
    whole, alone, inputs = load_model(directory), load_tower(directory), pictures(directory)
    assert whole.tower is not None
    assert alone.spec == whole.text.spec.rows
    for ours, theirs, entry in zip(alone.tower.encode(inputs), whole.tower.encode(inputs), inputs, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.shape == (entry.layout.rows, alone.spec.row_width)


@pytest.mark.parametrize("shape", VISION_SHAPES)
def test_a_description_is_what_loading_gives(checkpoint: Callable[[str], Path], shape: str) -> None:
    directory = checkpoint(shape)
    alone, whole = describe_tower(directory), describe(directory)
    assert alone.spec == load_tower(directory).spec
    assert (alone.vocab_size, alone.max_context) == (whole.spec.vocab_size, whole.spec.max_context)
    tensors = load_file(directory / WEIGHTS)
    assert alone.weight_bytes == sum(t.nbytes for name, t in tensors.items() if name.startswith(TOWER))


@pytest.mark.parametrize(
    ("text", "tower", "asked"),
    [
        (torch.bfloat16, torch.float32, "auto"),
        (torch.float32, torch.bfloat16, "auto"),
        (torch.float16, torch.bfloat16, "auto"),
        (torch.float32, torch.float32, "bfloat16"),
    ],
)
def test_rows_are_of_the_decoders_number_format(
    copy: Callable[[str], Path], text: torch.dtype, tower: torch.dtype, asked: str
) -> None:
    directory = copy("vl-deepstack")
    change_tensors(
        directory, lambda t: t.update({n: x.to(tower if n.startswith(TOWER) else text) for n, x in t.items()})
    )
    alone, whole = load_tower(directory, dtype=asked), load_model(directory, dtype=asked)
    assert alone.spec == whole.text.spec.rows == describe_tower(directory, dtype=asked).spec
    assert {rows.dtype for rows in alone.tower.encode(pictures(directory))} == {alone.spec.dtype}


def test_no_decoder_is_built_and_none_of_its_tensors_is_looked_at(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise AssertionError("constructed")

    directory = copy("vl-plain")

    def wreck(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if not name.startswith(TOWER) and name != EMBEDDING]:
            del tensors[name]
        tensors["model.language_model.layers.0.extra"] = torch.ones(1)

    change_tensors(directory, wreck)
    modeling = "transformers.models.qwen3_vl.modeling_qwen3_vl."
    for name in ("Qwen3VLTextModel", "Qwen3VLModel", "Qwen3VLForConditionalGeneration"):
        monkeypatch.setattr(f"{modeling}{name}.__init__", refuse)
    monkeypatch.setattr(TextDecoder, "__init__", refuse)
    seen: list[tuple[int, int]] = []
    load_tower(directory, progress=lambda done, total: seen.append((done, total)))
    tensors = load_file(directory / WEIGHTS)
    assert seen[-1] == (seen[-1][1], sum(t.nbytes for name, t in tensors.items() if name.startswith(TOWER)))


def test_missing_and_left_over_tensors_of_the_tower_are_named(copy: Callable[[str], Path]) -> None:
    directory = copy("vl-deepstack")
    change_tensors(directory, lambda t: t.update({f"{TOWER}extra": torch.ones(1)}))
    assert f"1 tensor(s) that no part uses: {TOWER}extra" in refusal(directory)
    change_tensors(directory, lambda t: t.pop(f"{TOWER}merger.norm.bias"))
    assert f"1 tensor(s) missing: {TOWER}merger.norm.bias" in refusal(directory)


def test_a_wrong_shape_names_the_tensor_and_both_shapes(copy: Callable[[str], Path]) -> None:
    directory = copy("vl-deepstack")
    change_tensors(directory, lambda t: t.update({f"{TOWER}merger.norm.bias": torch.ones(47)}))
    assert f"{TOWER}merger.norm.bias is [47] in the file; config.json makes it [48]" in refusal(directory)


@pytest.mark.parametrize("shape", TEXT_SHAPES)
def test_a_text_model_is_no_encoder(checkpoint: Callable[[str], Path], shape: str) -> None:
    assert "an encoder engine needs a model with a vision tower" in refusal(checkpoint(shape), StartupError)


def test_what_the_decoders_engine_would_refuse_is_refused_here(copy: Callable[[str], Path]) -> None:
    directory = copy("vl-deepstack")
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["hidden_size"] = 65
    (directory / "config.json").write_text(json.dumps(config))
    assert "out_hidden_size is 64; the text decoder's hidden_size is 65" in refusal(directory)
    config["architectures"] = ["GrandModel"]
    (directory / "config.json").write_text(json.dumps(config))
    assert "GrandModel" in refusal(directory, UnknownArchitecture)


@pytest.mark.parametrize(("device", "dtype", "flag"), [("abacus", "auto", "--device"), ("cpu", "int8", "--dtype")])
def test_a_flag_that_is_wrong_is_named(checkpoint: Callable[[str], Path], device: str, dtype: str, flag: str) -> None:
    with pytest.raises(StartupError, match=flag):
        load_tower(checkpoint("vl-plain"), device, dtype)


def test_memory_that_runs_out_is_said(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError

    monkeypatch.setattr("triptych.models.weights.Checkpoint.fill", fail)
    with pytest.raises(StartupError, match="not enough memory on cpu"):
        load_tower(checkpoint("vl-plain"))


def test_a_tower_of_float16_computes_in_float32(tmp_path: Path) -> None:
    assert load_tower(write_checkpoint("vl-plain", tmp_path, dtype=torch.float16)).spec.dtype is torch.float32
