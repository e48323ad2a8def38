"""Random-weight checkpoints in the layout of Hugging Face: small ones for tests, real shapes for measurements.

The scale of the weights keeps the logits at a deviation of about two, so that greedy choices are choices and not
near-ties.
"""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.chat_files import make_tokenizer, write_chat_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedModel

SHARD_BYTES = 512 * 1024 * 1024
SMALL_VOCABULARY = 704
"""The test tokenizer's words, and a few ids beyond them."""
QWEN_VOCABULARY = 151_936
GAINS = {"embed_tokens": 2.0, "lm_head": 2.0, "o_proj": 3.0, "down_proj": 3.0}
"""Deviations by name, over 1 / sqrt(inputs); what layers add must outweigh the token itself, or a tied model only
repeats it."""

PREPROCESSOR = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorPil",
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "temporal_patch_size": 2,
}


VIDEO_PREPROCESSOR = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "do_sample_frames": True,
    "fps": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_frames": 768,
    "merge_size": 2,
    "min_frames": 4,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 4096, "longest_edge": 96 * 1024},
    "temporal_patch_size": 2,
    "video_processor_type": "Qwen3VLVideoProcessor",
}


@cache
def _tokenizer() -> Tokenizer:
    return make_tokenizer()


def token_ids() -> dict[str, int]:
    """The test tokenizer's added tokens."""
    return {token.content: index for index, token in _tokenizer().get_added_tokens_decoder().items()}


def tokenise(text: str) -> list[int]:
    """Ids of the test tokenizer; for ``load_processor``."""
    return list(_tokenizer().encode(text, add_special_tokens=False).ids)


def _vl(text: dict[str, Any], vision: dict[str, Any], *, tied: bool) -> Qwen3VLConfig:
    ids = token_ids()
    text = {
        "vocab_size": SMALL_VOCABULARY,
        "max_position_embeddings": 4096,
        "eos_token_id": ids["<|im_end|>"],
        "tie_word_embeddings": tied,
        **text,
    }
    vision = {
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
        **vision,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tied,
    )


def _rope(sections: list[int], theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, "mrope_section": sections, "mrope_interleaved": True}


def _tower(hidden: int, depth: int, heads: int, positions: int, deepstack: list[int]) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "depth": depth,
        "num_heads": heads,
        "num_position_embeddings": positions,
        "deepstack_visual_indexes": deepstack,
    }


def _text(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_size: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
    }


def _vl_deepstack() -> PreTrainedConfig:
    text = _text(64, 128, 4, 4, 2, 32) | {"rope_parameters": _rope([6, 5, 5], 10_000.0)}
    return _vl(text, _tower(48, 4, 4, 64, [1, 2]), tied=True)


def _vl_plain() -> PreTrainedConfig:
    text = _text(48, 96, 3, 3, 3, 16) | {"rope_parameters": _rope([4, 2, 2], 500_000.0)}
    return _vl(text, _tower(32, 2, 2, 36, []), tied=False)


def _vl_shared_kv() -> PreTrainedConfig:
    text = _text(64, 96, 3, 6, 1, 24) | {"rope_parameters": _rope([6, 3, 3], 5_000_000.0)}
    return _vl(text, _tower(32, 3, 2, 144, [0, 1, 2]), tied=False)


def _vl_half_billion() -> PreTrainedConfig:
    text = _text(1024, 3072, 20, 16, 8, 128) | {
        "vocab_size": QWEN_VOCABULARY,
        "max_position_embeddings": 32_768,
        "rope_parameters": _rope([24, 20, 20], 5_000_000.0),
    }
    return _vl(text, _tower(768, 12, 12, 2304, [2, 5, 8]), tied=True)


def _vl_2b() -> PreTrainedConfig:
    text = _text(2048, 6144, 28, 16, 8, 128) | {
        "vocab_size": QWEN_VOCABULARY,
        "max_position_embeddings": 262_144,
        "rope_parameters": _rope([24, 20, 20], 5_000_000.0),
    }
    return _vl(text, _tower(1024, 24, 16, 2304, [5, 11, 17]), tied=True)


def _vl_demo() -> PreTrainedConfig:
    text = _text(256, 768, 4, 4, 2, 64) | {"rope_parameters": _rope([12, 10, 10], 10_000.0)}
    return _vl(text, _tower(128, 4, 4, 256, [1, 2]), tied=True)


def _plain_text(**extra: Any) -> dict[str, Any]:
    return {
        "vocab_size": SMALL_VOCABULARY,
        "max_position_embeddings": 4096,
        "eos_token_id": token_ids()["<|im_end|>"],
        **extra,
    }


def _qwen3() -> PreTrainedConfig:
    return Qwen3Config(**_plain_text(tie_word_embeddings=True), **_text(64, 128, 3, 4, 2, 32))


def _wide_kv() -> PreTrainedConfig:
    """128 KiB of KV a token in float32, for little work."""
    return Qwen3Config(
        **_plain_text(tie_word_embeddings=True, max_position_embeddings=32_768), **_text(64, 128, 8, 16, 16, 128)
    )


def _wide_rows() -> PreTrainedConfig:
    """Encoder rows as wide as those of the 2 B shape, 16 KiB in bfloat16, for little work."""
    text = _text(2048, 256, 3, 2, 1, 64) | {
        "max_position_embeddings": 32_768,
        "rope_parameters": _rope([12, 10, 10], 10_000.0),
    }
    return _vl(text, _tower(64, 3, 2, 256, [0, 1, 2]), tied=True)


def _qwen2() -> PreTrainedConfig:
    return Qwen2Config(**_plain_text(tie_word_embeddings=False), **_text(64, 128, 3, 4, 2, 16))


def _llama() -> PreTrainedConfig:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return LlamaConfig(**_plain_text(tie_word_embeddings=False, rope_parameters=rope), **_text(48, 96, 3, 4, 4, 16))


SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "vl-deepstack": _vl_deepstack,
    "vl-plain": _vl_plain,
    "vl-shared-kv": _vl_shared_kv,
    "qwen3": _qwen3,
    "qwen2": _qwen2,
    "llama": _llama,
    "wide-kv": _wide_kv,
    "wide-rows": _wide_rows,
    "tiny": _vl_demo,
    "0.5b": _vl_half_billion,
    "2b": _vl_2b,
}
VISION_SHAPES = ("vl-deepstack", "vl-plain", "vl-shared-kv")
TEXT_SHAPES = ("qwen3", "qwen2", "llama")

MODELS: dict[type, type[PreTrainedModel]] = {
    Qwen3VLConfig: Qwen3VLForConditionalGeneration,
    Qwen3Config: Qwen3ForCausalLM,
    Qwen2Config: Qwen2ForCausalLM,
    LlamaConfig: LlamaForCausalLM,
}


def write_checkpoint(
    shape: str,
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_pixels: int = 4096 * 64,
    videos: bool = False,
) -> Path:
    """Write a whole model directory: weights, configuration, tokenizer, chat template, image settings.

    Holds one shard in memory at a time. With ``videos`` a model that has a tower reads them, too.
    """
    write_chat_files(directory)
    config = SHAPES[shape]()
    model_class = MODELS[type(config)]
    config.architectures = [model_class.__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(directory)
    if isinstance(config, Qwen3VLConfig):
        size = {"shortest_edge": 1024, "longest_edge": max_pixels}
        settings = PREPROCESSOR | {"patch_size": config.vision_config.patch_size, "size": size}
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))
        if videos:
            write_video_settings(directory)
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in model_class(config).state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    _write_tensors(directory, shapes, torch.Generator().manual_seed(seed), dtype)
    return directory


def write_video_settings(directory: Path, **changes: Any) -> None:
    """Let the Qwen3-VL checkpoint there read videos."""
    patch = json.loads((directory / "config.json").read_text())["vision_config"]["patch_size"]
    settings = VIDEO_PREPROCESSOR | {"patch_size": patch} | changes
    (directory / "video_preprocessor_config.json").write_text(json.dumps(settings))


def _write_tensors(
    directory: Path, shapes: dict[str, tuple[int, ...]], generator: torch.Generator, dtype: torch.dtype
) -> None:
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    files = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    )
    for file, names in zip(files, shards, strict=True):
        tensors = {name: _random(name, shapes[name], generator, dtype) for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if len(shape) == 1:
        middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        return tensor.normal_(middle, 0.1, generator=generator)
    fan_in = tensor.numel() // shape[0]
    gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
    return tensor.normal_(0.0, gain * fan_in**-0.5, generator=generator)
