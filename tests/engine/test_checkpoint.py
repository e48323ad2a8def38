"""Loading: what is right loads, what is wrong is one line that names the file, the key or the tensor."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import TEXT_SHAPES, VISION_SHAPES, write_checkpoint
from tests.engine.fidelity import Pair
from tests.engine.paged import Paged
from triptych.core.errors import CheckpointError, StartupError, UnknownArchitecture
from triptych.models import weights
from triptych.models.registry import FAMILIES, describe, load_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WEIGHTS = "model.safetensors"
Change = dict[str, Any]


@pytest.fixture
def copy(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a checkpoint that the test may break."""
    return lambda shape: shutil.copytree(checkpoint(shape), tmp_path / shape)


def change_config(directory: Path, change: Change, section: str | None = None) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    (config if section is None else config[section]).update(change)
    path.write_text(json.dumps(config))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def refusal(directory: Path) -> str:
    """The one line that loading, and describing, gives."""
    with pytest.raises(CheckpointError) as loading:
        load_model(directory)
    with pytest.raises(CheckpointError) as describing:
        describe(directory)
    assert str(loading.value) == str(describing.value)
    assert "\n" not in str(loading.value)
    return str(loading.value)


@pytest.mark.parametrize("shape", [*VISION_SHAPES, *TEXT_SHAPES])
def test_a_description_is_what_loading_gives(checkpoint: Callable[[str], Path], shape: str) -> None:
    description, model = describe(checkpoint(shape)), load_model(checkpoint(shape))
    assert description.spec == model.text.spec
    assert (model.tower is not None) == (shape in VISION_SHAPES)
    assert description.weight_bytes >= (checkpoint(shape) / WEIGHTS).stat().st_size * 0.9


def test_progress_rises_to_the_total(checkpoint: Callable[[str], Path]) -> None:
    seen: list[tuple[int, int]] = []
    load_model(checkpoint("vl-deepstack"), progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {seen[-1][0]}


def test_shards_load_as_one_file_does(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.checkpoints.SHARD_BYTES", 300_000)
    monkeypatch.setattr(weights, "_MAPPED_BYTES", 100_000)
    sharded = write_checkpoint("vl-deepstack", tmp_path)
    assert len(list(sharded.glob("*.safetensors"))) > 3
    logits = []
    for directory in (sharded, checkpoint("vl-deepstack")):
        pair = Pair(directory)
        prompt = pair.prompt(seed=1, pictures=1)
        logits.append(Paged(pair.ours.text).prefill(prompt.sequence(), 1000))
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("stored", "asked", "loaded"),
    [
        (torch.float16, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
)
def test_element_types(tmp_path: Path, stored: torch.dtype, asked: str, loaded: torch.dtype) -> None:
    directory = write_checkpoint("qwen3", tmp_path, dtype=stored)
    assert load_model(directory, dtype=asked).text.spec.dtype is loaded
    assert describe(directory, dtype=asked).spec.dtype is loaded


def test_a_head_that_is_tied_may_be_stored_all_the_same(copy: Callable[[str], Path]) -> None:
    directory = copy("qwen3")
    change_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_model(directory)


def test_computed_frequencies_that_were_stored_are_no_fault(copy: Callable[[str], Path]) -> None:
    directory = copy("llama")
    change_tensors(directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load_model(directory)


def test_old_rope_keys_mean_what_the_new_ones_do(
    copy: Callable[[str], Path], checkpoint: Callable[[str], Path]
) -> None:
    old, new = copy("llama"), Pair(checkpoint("llama"))
    config = json.loads((old / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    (old / "config.json").write_text(json.dumps(config))
    prompt = new.prompt(seed=2, pictures=0, longest_text=90)
    one, other = (Paged(text).prefill(prompt.sequence(), 1000) for text in (new.ours.text, load_model(old).text))
    assert torch.equal(one, other)


# --- files -------------------------------------------------------------------------------------------------------


def test_no_model_directory(tmp_path: Path) -> None:
    assert "is not a directory" in refusal(tmp_path / "absent")
    assert "has no config.json: it is not a Hugging Face model directory" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", '{"a": ' * 100_000, "null"])
def test_a_configuration_that_is_no_json_object(copy: Callable[[str], Path], text: str) -> None:
    directory = copy("qwen3")
    (directory / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in refusal(directory)


def test_an_unknown_architecture_lists_the_known(copy: Callable[[str], Path]) -> None:
    directory = copy("qwen3")
    change_config(directory, {"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(UnknownArchitecture) as refused:
        load_model(directory)
    assert all(name in str(refused.value) for name in ("GPT2LMHeadModel", *FAMILIES))
    change_config(directory, {"architectures": []})
    assert "architectures is missing" in refusal(directory)


def test_pickled_weights_are_never_loaded(copy: Callable[[str], Path]) -> None:
    directory = copy("qwen3")
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")
    assert "only pickled weights, which are never loaded): safetensors are needed" in refusal(directory)


@pytest.mark.parametrize("kept", [0, 4, 100, -1, -5000])
def test_a_file_that_is_cut_off(copy: Callable[[str], Path], kept: int) -> None:
    path = copy("qwen3") / WEIGHTS
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{path} is damaged or cut off" in refusal(path.parent)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (
            "../llama/model.safetensors",
            "weight_map names '../llama/model.safetensors', which is not a safetensors file of this directory",
        ),
        ("/etc/passwd", "not a safetensors file of this directory"),
        (".hidden.safetensors", "not a safetensors file of this directory"),
        ("absent.safetensors", "absent.safetensors is missing"),
        (7, "must be a string"),
    ],
)
def test_an_index_that_leads_elsewhere(copy: Callable[[str], Path], file: object, reason: str) -> None:
    directory = copy("qwen3")
    names = load_file(directory / WEIGHTS)
    index = {"weight_map": dict.fromkeys(names, WEIGHTS) | {"model.norm.weight": file}}
    (directory / weights.INDEX).write_text(json.dumps(index))
    assert reason in refusal(directory)


def test_an_index_that_names_what_its_file_lacks(copy: Callable[[str], Path]) -> None:
    directory = copy("qwen3")
    (directory / weights.INDEX).write_text(json.dumps({"weight_map": {"a": WEIGHTS}}))
    assert "places a in model.safetensors, which does not have it" in refusal(directory)


# --- tensors -----------------------------------------------------------------------------------------------------


def test_missing_tensors_are_named_and_counted(copy: Callable[[str], Path]) -> None:
    directory = copy("vl-deepstack")
    change_tensors(directory, lambda t: [t.pop(n) for n in list(t) if "mlp.up_proj" in n or "merger.norm.bias" in n])
    text = refusal(directory)
    assert "5 tensor(s) missing" in text
    assert "model.language_model.layers.0.mlp.up_proj.weight" in text
    assert "model.visual.merger.norm.bias" in text


def test_left_over_tensors_are_named_and_counted(copy: Callable[[str], Path]) -> None:
    directory = copy("llama")
    change_tensors(directory, lambda t: t.update({f"model.layers.{n}.extra": torch.ones(1) for n in range(8)}))
    assert "8 tensor(s) that no part uses: model.layers.0.extra" in refusal(directory)
    assert "model.layers.7.extra" not in refusal(directory)


def test_an_untied_model_needs_its_head(copy: Callable[[str], Path]) -> None:
    directory = copy("llama")
    change_tensors(directory, lambda t: t.pop("lm_head.weight"))
    assert "1 tensor(s) missing: lm_head.weight" in refusal(directory)


def test_a_wrong_shape_names_the_tensor_and_both_shapes(copy: Callable[[str], Path]) -> None:
    directory = copy("llama")
    change_tensors(directory, lambda t: t.update({"model.norm.weight": torch.ones(47)}))
    assert "model.norm.weight is [47] in the file; config.json makes it [48]" in refusal(directory)


def test_whole_numbers_are_no_weights(copy: Callable[[str], Path]) -> None:
    directory = copy("llama")
    change_tensors(directory, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int64)}))
    assert "stores I64; supported: F32, F16, BF16" in refusal(directory)


# --- configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_experts": 8}, "num_experts"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'; supported: default, linear"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": 3}, "rope_parameters must be an object"),
        ({"hidden_size": "wide"}, "hidden_size must be a whole number"),
        ({"hidden_size": True}, "hidden_size must be a whole number"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 1 << 60}, "impossible sizes"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, not a multiple"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures must be a list of strings"),
    ],
)
def test_a_text_configuration_that_cannot_be_met(copy: Callable[[str], Path], change: Change, key: str) -> None:
    directory = copy("qwen3")
    change_config(directory, change)
    assert key in refusal(directory)


@pytest.mark.parametrize(
    ("section", "change", "key"),
    [
        ("text_config", {"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section must be 3 counts with sum 16"),
        ("text_config", {"rope_parameters": {"mrope_interleaved": False, "mrope_section": [6, 5, 5]}}, "interleaved"),
        ("vision_config", {"out_hidden_size": 65}, "out_hidden_size is 65; the text decoder's hidden_size is 64"),
        ("vision_config", {"deepstack_visual_indexes": [1, 4]}, "must be different layers below 4"),
        ("vision_config", {"deepstack_visual_indexes": [1, 1]}, "must be different layers below 4"),
        ("vision_config", {"hidden_act": "no such"}, "makes no Qwen3-VL tower"),
        ("vision_config", {"num_heads": "many"}, "makes no Qwen3-VL tower"),
    ],
)
def test_a_vision_configuration_that_cannot_be_met(
    copy: Callable[[str], Path], section: str, change: Change, key: str
) -> None:
    directory = copy("vl-deepstack")
    change_config(directory, change, section)
    assert key in refusal(directory)


@pytest.mark.parametrize(("device", "dtype"), [("abacus", "auto"), ("cpu", "int8"), ("cpu", "FLOAT32")])
def test_a_flag_that_is_wrong_is_named(checkpoint: Callable[[str], Path], device: str, dtype: str) -> None:
    with pytest.raises(StartupError, match="--device" if device != "cpu" else "--dtype"):
        load_model(checkpoint("qwen3"), device, dtype)


@pytest.mark.parametrize(
    ("device", "devices", "message"),
    [
        ("abacus", 0, r"--device 'abacus': use cpu, cuda or cuda:N"),
        ("mps", 0, r"--device 'mps': use cpu, cuda or cuda:N"),
        ("cuda", 0, r"--device cuda: this machine's torch sees no CUDA device; use --device cpu"),
        ("cuda:1", 0, r"--device cuda:1: this machine's torch sees no CUDA device"),
        ("cuda:2", 2, r"--device cuda:2: this machine's torch sees 2 CUDA device\(s\)"),
    ],
)
def test_a_device_that_is_not_there(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, device: str, devices: int, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    with pytest.raises(StartupError, match=message):
        describe(checkpoint("qwen3"), device)


def test_the_language_model_of_transformers_is_never_made(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise AssertionError("constructed")

    modeling = "transformers.models.qwen3_vl.modeling_qwen3_vl."
    for name in ("Qwen3VLTextModel", "Qwen3VLModel", "Qwen3VLForConditionalGeneration"):
        monkeypatch.setattr(f"{modeling}{name}.__init__", refuse)
    load_model(checkpoint("vl-deepstack"))
