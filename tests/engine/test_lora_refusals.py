"""Adapters that cannot be used: one line that names the adapter, and the file, the setting or the tensor."""

from __future__ import annotations

import json
import os
import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters import make_adapter
from triptych.core.adapter import AdapterInfo
from triptych.core.errors import InvalidRequest, Overloaded
from triptych.models import lora_load
from triptych.models.projections import NAMES
from triptych.models.registry import load_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from triptych.models.contract import TextModel

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
LAYERS = "base_model.model.model.language_model.layers"
ONE = f"{LAYERS}.1.self_attn.q_proj.lora_A.weight"
OTHER = f"{LAYERS}.1.self_attn.q_proj.lora_B.weight"
VISUAL = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"
TEXT_ONLY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
NOT_FINITE = "has numbers that are not finite in torch.float32"
MAX_RANK = 8
RANK = 4


@pytest.fixture(scope="module")
def text(checkpoint: Callable[[str], Path]) -> TextModel:
    return load_model(checkpoint("vl-deepstack")).text


@pytest.fixture(scope="module")
def whole(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    return make_adapter(checkpoint("vl-deepstack"), directory, seed=1, rank=RANK, targets=("q_proj", "down_proj"))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """An adapter that the test may break."""
    return shutil.copytree(whole, tmp_path / "adapter")


def refusal(text: TextModel, directory: Path | str) -> str:
    with pytest.raises(InvalidRequest) as refused:
        text.load_adapter(AdapterInfo(7, "poet", str(directory)), MAX_RANK)
    message = str(refused.value)
    assert message.startswith("LoRA adapter 'poet': ")
    assert "\n" not in message
    assert len(message) < 1500
    return message


def change_config(directory: Path, change: dict[str, Any]) -> None:
    settings = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps({**settings, **change}))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def test_the_adapter_that_the_others_break(text: TextModel, copy: Path) -> None:
    assert text.load_adapter(AdapterInfo(7, "poet", str(copy)), MAX_RANK).info.name == "poet"


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA' is supported"),
        ({"peft_type": None}, "peft_type is missing"),
        ({"bias": "lora_only"}, "bias is 'lora_only'; only 'none' is supported"),
        ({"use_dora": True}, "'use_dora' is set; only plain LoRA is supported"),
        ({"lora_bias": True}, "'lora_bias' is set"),
        ({"fan_in_fan_out": True}, "'fan_in_fan_out' is set"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is set"),
        ({"trainable_token_indices": [5]}, "'trainable_token_indices' is set"),
        ({"target_parameters": ["mlp.experts"]}, "'target_parameters' is set"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "'layer_replication' is set"),
        ({"alora_invocation_tokens": [1, 2]}, "'alora_invocation_tokens' is set"),
        ({"use_qalora": True}, "'use_qalora' is set"),
        ({"kasa_config": {"beta": 1}}, "'kasa_config' is set"),
        ({"use_tomorrows_variant": 1}, "'use_tomorrows_variant' is set"),
        ({"a\nb" * 500: 1}, "is set; only plain LoRA"),
        ({"init_lora_weights": "pissa_niter_16"}, "is 'pissa_niter_16', which changes the base model"),
        ({"init_lora_weights": "olora"}, "convert the adapter to plain LoRA"),
        ({"init_lora_weights": [1]}, "init_lora_weights is [1]"),
        ({"r": None}, "r is missing"),
        ({"r": 0}, "r must be a whole number >= 1, not 0"),
        ({"r": -3}, "r must be a whole number >= 1, not -3"),
        ({"r": 4.0}, "r must be a whole number"),
        ({"r": True}, "r must be a whole number"),
        ({"r": 9}, "r is 9; this engine takes ranks up to 8 (--max-lora-rank)"),
        ({"r": 10**400}, "(--max-lora-rank)"),
        ({"lora_alpha": None}, "lora_alpha is missing"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a finite number, not nan"),
        ({"lora_alpha": float("-inf")}, "lora_alpha must be a finite number, not -inf"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a finite number"),
        ({"lora_alpha": "16"}, "lora_alpha must be a finite number, not '16'"),
        ({"lora_alpha": 1e300}, f"q_proj.lora_B.weight, scaled by 2.5e+299, {NOT_FINITE}"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"rank_pattern": {"q_proj": 9}}, "rank_pattern: q_proj is 9; this engine takes ranks up to 8"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj must be a whole number >= 1"),
        ({"rank_pattern": {"q_proj": 3}}, "rank 3 on this model makes it [3, 64]"),
        ({"rank_pattern": {"(a+)+$": 3}}, "rank_pattern has '(a+)+$', which is no projection"),
        ({"rank_pattern": [3]}, "rank_pattern must be an object"),
        ({"alpha_pattern": {"q.proj": 3}}, "alpha_pattern has 'q.proj', which is no projection"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "alpha_pattern: q_proj must be a finite number"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": [1]}, "target_modules must be a list of strings"),
        ({"target_modules": {"q_proj": 1}}, "target_modules must be a list of strings"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules has 'embed_tokens'; the text"),
        ({"target_modules": ["lm_head"]}, "are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        ({"target_modules": ["conv1d"]}, "target_modules has 'conv1d'"),
        ({"target_modules": ["attn.qkv"]}, "target_modules has 'attn.qkv'"),
        ({"target_modules": ["layers.9.self_attn.q_proj"]}, "target_modules has 'layers.9.self_attn.q_proj'"),
        ({"target_modules": ["q_proj"]}, f"json does not cover: {LAYERS}.0.mlp.down_proj"),
        ({"layers_to_transform": [1, 4]}, "layers_to_transform has 4; the decoder's layers are 0 to 3"),
        ({"layers_to_transform": "1"}, "layers_to_transform has '1'"),
        ({"layers_to_transform": [1, 2, 3]}, f"does not cover: {LAYERS}.0."),
        ({"layers_pattern": "blocks"}, "layers_pattern is 'blocks'; it must be 'layers'"),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, dict) else "",
)  # fmt: skip
def test_settings(text: TextModel, copy: Path, change: dict[str, Any], words: str) -> None:
    change_config(copy, change)
    message = refusal(text, copy)
    assert words in message
    assert CONFIG in message or WEIGHTS in message


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"r": ' * 100_000, b'{"r": 1' + b"0" * 5000]
)
def test_settings_that_are_no_json_object(text: TextModel, copy: Path, content: bytes) -> None:
    (copy / CONFIG).write_bytes(content)
    assert CONFIG in refusal(text, copy)


def test_settings_of_a_size_that_none_have(text: TextModel, copy: Path) -> None:
    with (copy / CONFIG).open("ab") as file:
        file.truncate(2**20 + 1)
    assert "adapter_config.json has more than 1 MiB" in refusal(text, copy)


# --- tensors -----------------------------------------------------------------------------------------------------


def add(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def put(value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({ONE: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add(VISUAL, 4, 48), "1 tensor(s) that are not lora_A.weight or lora_B.weight of a text decoder's projection"),
        (add(VISUAL, 4, 48), f": '{VISUAL}'"),
        (add(TEXT_ONLY, 4, 64), f"({LAYERS}.N, {NAMES}): '{TEXT_ONLY}'"),
        (add("base_model.model.lm_head.lora_A.weight", 4, 64), "'base_model.model.lm_head.lora_A.weight'"),
        (add("base_model.model.model.language_model.embed_tokens.lora_embedding_A", 4, 704), "lora_embedding_A'"),
        (add(f"{LAYERS}.1.self_attn.q_proj.lora_magnitude_vector", 128), "lora_magnitude_vector'"),
        (add(f"{LAYERS}.1.self_attn.q_proj.lora_B.bias", 128), "lora_B.bias'"),
        (add(f"{LAYERS}.4.self_attn.q_proj.lora_A.weight", 4, 64), "layers.4.self_attn.q_proj.lora_A.weight'"),
        (add(f"{LAYERS}.01.self_attn.q_proj.lora_A.weight", 4, 64), "layers.01.self_attn"),
        (add("evil\nname" * 1000, 1), r"'evil\nnameevil"),
        (add(f"{LAYERS}.0.self_attn.v_proj.lora_A.weight", 4, 64), "does not cover"),
        (lambda t: t.pop(ONE), f"1 tensor(s) missing: {ONE}"),
        (lambda t: t.pop(OTHER), f"1 tensor(s) missing: {OTHER}"),
        (lambda t: [t.pop(ONE), t.pop(OTHER)], f"2 tensor(s) missing: {ONE}, {OTHER}"),
        (lambda t: t.clear(), "16 tensor(s) missing"),
        (put(torch.ones(4, 63)), f"{ONE} is [4, 63] in the file; rank 4 on this model makes it [4, 64]"),
        (put(torch.ones(64, 4)), f"{ONE} is [64, 4] in the file; rank 4 on this model makes it [4, 64]"),
        (put(torch.ones(256)), f"{ONE} is [256] in the file"),
        (put(torch.ones(4, 64, 1)), f"{ONE} is [4, 64, 1] in the file"),
        (put(torch.ones(0, 64)), f"{ONE} is [0, 64] in the file"),
        (put(torch.ones(4, 64, dtype=torch.int64)), f"'{ONE}': adapter_model.safetensors stores I64; supported: F32"),
        (put(torch.ones(4, 64).to(torch.float8_e4m3fn)), "stores F8_E4M3; supported: F32, F16, BF16"),
        (put(torch.full((4, 64), float("nan"))), f"{ONE}, scaled by 1, {NOT_FINITE}"),
        (lambda t: t[OTHER].view(-1)[-1:].fill_(float("inf")), f"{OTHER}, scaled by 4, {NOT_FINITE}"),
    ],
    ids=range(24),
)  # fmt: skip
def test_tensors(text: TextModel, copy: Path, change: Callable[[dict[str, torch.Tensor]], object], words: str) -> None:
    change_tensors(copy, change)
    message = refusal(text, copy)
    assert words in message
    assert WEIGHTS in message


def test_settings_of_another_kind_leave_it_to_the_tensors_but_pairs_are_pairs(text: TextModel, copy: Path) -> None:
    change_config(copy, {"target_modules": r".*\.q_proj"})
    change_tensors(copy, lambda tensors: tensors.pop(ONE))
    assert f"1 tensor(s) missing: {ONE}" in refusal(text, copy)
    change_tensors(copy, lambda tensors: tensors.clear())
    assert "adapter_model.safetensors holds no tensors" in refusal(text, copy)


def test_what_is_finite_in_the_file_must_be_finite_in_the_decoder(
    checkpoint: Callable[[str], Path], copy: Path
) -> None:
    half = load_model(checkpoint("vl-deepstack"), dtype="float16").text
    change_tensors(copy, put(torch.full((4, 64), 1e5)))
    assert f"{ONE}, scaled by 1, has numbers that are not finite in torch.float16" in refusal(half, copy)


# --- files -------------------------------------------------------------------------------------------------------


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)

    return change


def cut(kept: int) -> Callable[[Path], object]:
    return lambda directory: (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:kept])


def header(content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / WEIGHTS).write_bytes(len(content).to_bytes(8, "little") + content)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: (d / CONFIG).unlink(), "has no adapter_config.json: it is not a PEFT adapter directory"),
        (replaced(CONFIG, os.mkdir), "has no adapter_config.json"),
        (replaced(CONFIG, os.mkfifo), "has no adapter_config.json"),
        (replaced(CONFIG, lambda p: p.symlink_to("/dev/zero")), "has no adapter_config.json"),
        (replaced(CONFIG, lambda p: p.symlink_to(p)), "has no adapter_config.json"),
        (lambda d: (d / WEIGHTS).unlink(), "has no adapter_model.safetensors"),
        (lambda d: (d / WEIGHTS).rename(d / "adapter_model.bin"), "(only pickled weights, which are never loaded)"),
        (replaced(WEIGHTS, os.mkdir), "has no adapter_model.safetensors"),
        (replaced(WEIGHTS, os.mkfifo), "has no adapter_model.safetensors"),
        (replaced(WEIGHTS, lambda p: p.symlink_to("/dev/zero")), "has no adapter_model.safetensors"),
        (replaced(WEIGHTS, lambda p: p.symlink_to(p)), "has no adapter_model.safetensors"),
        (cut(0), "is damaged or cut off"),
        (cut(5), "is damaged or cut off"),
        (cut(200), "is damaged or cut off"),
        (cut(-1), "is damaged or cut off"),
        (lambda d: (d / WEIGHTS).write_bytes(b"\xff" * 99), "its header has 18446744073709551615 bytes"),
        (header(b" " * 2**25), "its header has 33554432 bytes"),
        (header(b"[]"), "is damaged or cut off"),
    ],
    ids=range(18),
)  # fmt: skip
def test_files(text: TextModel, copy: Path, change: Callable[[Path], object], words: str) -> None:
    change(copy)
    message = refusal(text, copy)
    assert words in message
    assert str(copy) in message


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nowhere/at/all", "/nowhere/at/all is not a directory"),
        ("/dev/null", "/dev/null is not a directory"),
        ("/" + "a" * 4000, "cannot be read: File name too long"),
    ],
    ids=range(3),
)
def test_paths_that_lead_to_no_directory(text: TextModel, path: str, words: str) -> None:
    assert words in refusal(text, path)


def test_links_to_an_adapter_are_followed(text: TextModel, whole: Path, tmp_path: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        (tmp_path / name).symlink_to(whole / name)
    direct, linked = (text.load_adapter(AdapterInfo(7, "poet", str(path)), MAX_RANK) for path in (whole, tmp_path))
    assert direct.digest == linked.digest


def test_a_file_that_becomes_shorter_while_it_is_read(
    text: TextModel, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def match_and_cut(self: lora_load.LoraFile, *args: Any) -> Any:
        used = match(self, *args)
        cut(-100)(copy)
        return used

    match = lora_load.LoraFile.match
    monkeypatch.setattr(lora_load.LoraFile, "match", match_and_cut)
    assert "was changed while it was read" in refusal(text, copy)


def test_damage_anywhere_is_one_line_or_none(text: TextModel, copy: Path) -> None:
    dice = random.Random(5)
    for name in (CONFIG, WEIGHTS):
        content = (copy / name).read_bytes()
        sound = len(content) if name == CONFIG else 2500  # bytes of its header
        messages = []
        for _ in range(300):
            damaged = bytearray(content)
            for _ in range(dice.randint(1, 3)):
                at = dice.randrange(sound)
                damaged[at : at + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
            (copy / name).write_bytes(damaged)
            try:
                text.load_adapter(AdapterInfo(7, "poet", str(copy)), MAX_RANK)
            except InvalidRequest as error:
                messages.append(str(error))
        assert len(messages) > 100
        assert "\n" not in "".join(messages)
        (copy / name).write_bytes(content)


def test_memory_that_cannot_be_had_is_no_fault_of_the_adapter(
    text: TextModel, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(lora_load._Reader, "update", refuse)
    with pytest.raises(Overloaded, match="LoRA adapter 'poet': not enough memory on cpu"):
        text.load_adapter(AdapterInfo(7, "poet", str(copy)), MAX_RANK)
