"""Architecture name to model: one row a family. Towers are imported when a checkpoint has one.

Element types: ``auto`` is what the checkpoint stores, except that float16 becomes float32 on a CPU, which has
no float16 arithmetic worth using. bfloat16 stays bfloat16: the memory is what its owner chose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from triptych.core.checkpoint import Section, architecture_of, read_json
from triptych.core.errors import CheckpointError, StartupError, UnknownArchitecture
from triptych.models.contract import Model, is_out_of_memory
from triptych.models.decoder_config import DecoderConfig, DecoderFamily
from triptych.models.layer import Placement
from triptych.models.text_decoder import TextDecoder
from triptych.models.weights import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from triptych.models.contract import TextSpec
    from triptych.models.vision.qwen3_vl import Qwen3VLTower
    from triptych.models.weights import Slot, Stored

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_TOWER_PREFIX = "model.visual."
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One row: what the architecture's name alone says."""

    decoder: DecoderFamily
    text_section: str | None = None
    """Key of config.json that holds the decoder's numbers; None: the file itself."""
    has_tower: bool = False


FAMILIES: Mapping[str, ModelFamily] = {
    "Qwen3VLForConditionalGeneration": ModelFamily(
        DecoderFamily(
            prefix="model.language_model.",
            qk_norm=True,
            head_size=128,
            rope_theta=500_000.0,
            mrope_section=(24, 20, 20),
        ),
        text_section="text_config",
        has_tower=True,
    ),
    "Qwen3ForCausalLM": ModelFamily(DecoderFamily(prefix="model.", qk_norm=True, head_size=128)),
    "Qwen2ForCausalLM": ModelFamily(DecoderFamily(prefix="model.", qk_norm=False, qkv_bias=True)),
    "LlamaForCausalLM": ModelFamily(DecoderFamily(prefix="model.", qk_norm=False)),
}


class Description(NamedTuple):
    """A checkpoint without its tensors."""

    spec: TextSpec
    weight_bytes: int
    """Memory that the loaded weights will take."""


def describe(directory: str | Path, device: str = "cpu", dtype: str = "auto", *, tower: bool = True) -> Description:
    """What :func:`load_model` would load, checked but not read: headers only.

    Raises:
        CheckpointError: a file is missing, damaged or unsupported; a tensor is missing, left over or misshapen.
        UnknownArchitecture: no row.
        StartupError: an unknown element type or device.
    """
    plan = _plan(Path(directory), device, dtype, tower=tower)
    parts = _build(plan, torch.device("meta"))
    plan.checkpoint.match(parts.slots(), ignored=plan.ignored)
    weight_bytes = sum(slot.target.nbytes for slot in parts.slots())
    spec = replace(parts.text.spec, device=plan.device)
    return Description(spec, weight_bytes)


def load_model(
    directory: str | Path,
    device: str = "cpu",
    dtype: str = "auto",
    progress: Callable[[int, int], None] | None = None,
    *,
    tower: bool = True,
) -> Model:
    """Load the model of a Hugging Face directory.

    Args:
        directory: Holds config.json and safetensors.
        device: A torch device.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``.
        progress: Called with bytes read and bytes in all.
        tower: False leaves out the encoder of a model that has one; its tensors are then not looked at.

    Raises:
        CheckpointError: a file is missing, damaged or unsupported; a tensor is missing, left over or misshapen.
        UnknownArchitecture: no row.
        StartupError: an unknown element type or device, or too little memory.
    """
    plan = _plan(Path(directory), device, dtype, tower=tower)
    # Shapes first: sizes that only config.json claims are never allocated.
    plan.checkpoint.match(_build(plan, torch.device("meta")).slots(), ignored=plan.ignored)
    try:
        parts = _build(plan, plan.device)
        plan.checkpoint.fill(parts.slots(), progress=progress)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise StartupError(f"not enough memory on {device} for the weights of {directory}") from error
    return Model(parts.text, parts.tower)


class _Plan(NamedTuple):
    """Everything about a checkpoint but its tensors."""

    family: ModelFamily
    decoder: DecoderConfig
    vision: Section | None
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    tower: bool
    """Whether an encoder is loaded, where there is one."""

    def ignored(self, name: str) -> bool:
        """Tensors that old exporters wrote and nothing needs, and those of an encoder that is left out."""
        if self.family.has_tower and not self.tower and name.startswith(_TOWER_PREFIX):
            return True
        return name.endswith("rotary_emb.inv_freq") or (self.decoder.tied and name == _HEAD)


class _Parts(NamedTuple):
    """A model with empty weights."""

    text: TextDecoder
    tower: Qwen3VLTower | None

    def slots(self) -> Iterator[Slot]:
        yield from self.text.slots()
        if self.tower is not None:
            yield from self.tower.slots(_TOWER_PREFIX)


def _plan(directory: Path, device: str, dtype: str, *, tower: bool) -> _Plan:
    config = read_json(directory, "config.json")
    architecture = architecture_of(config)
    if architecture not in FAMILIES:
        raise UnknownArchitecture(architecture, list(FAMILIES))
    if config.has("quantization_config"):
        raise config.error("quantization_config", "is set; quantised weights are not supported")
    family = FAMILIES[architecture]
    text = config.section(family.text_section) if family.text_section else config
    tied = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False))
    decoder = DecoderConfig.read(text, family.decoder, tied=tied)
    checkpoint = Checkpoint(directory)
    where = _device(device)
    return _Plan(
        family=family,
        decoder=decoder,
        vision=_vision(config, decoder) if family.has_tower else None,
        checkpoint=checkpoint,
        device=where,
        dtype=_dtype(dtype, checkpoint.stored.get(f"{family.decoder.prefix}embed_tokens.weight"), where),
        tower=tower,
    )


def _vision(config: Section, decoder: DecoderConfig) -> Section:
    vision = config.section("vision_config")
    width = vision.integer("out_hidden_size")
    if width != decoder.hidden_size:
        raise vision.error("out_hidden_size", f"is {width}; the text decoder's hidden_size is {decoder.hidden_size}")
    depth, levels = vision.integer("depth"), vision.numbers("deepstack_visual_indexes", ())
    if len(set(levels)) != len(levels) or any(level not in range(depth) for level in levels):
        raise vision.error("deepstack_visual_indexes", f"must be different layers below {depth}, not {list(levels)}")
    if len(levels) > decoder.layers:
        raise vision.error("deepstack_visual_indexes", f"has {len(levels)} levels for {decoder.layers} text layers")
    return vision


def _build(plan: _Plan, device: torch.device) -> _Parts:
    levels = 0 if plan.vision is None else len(plan.vision.numbers("deepstack_visual_indexes", ()))
    tower = None
    try:
        text = TextDecoder(plan.decoder, plan.family.decoder.prefix, levels, Placement(device, plan.dtype))
    except RuntimeError as error:
        if device.type != "meta":
            raise
        raise CheckpointError(f"{plan.checkpoint.directory}: config.json asks for impossible sizes") from error
    if plan.vision is not None and plan.tower:
        from triptych.models.vision.qwen3_vl import Qwen3VLTower

        tower = Qwen3VLTower(plan.vision, device, plan.dtype)
    return _Parts(text, tower)


def _dtype(asked: str, stored: Stored | None, device: torch.device) -> torch.dtype:
    if asked in DTYPES:
        return DTYPES[asked]
    if asked != "auto":
        raise StartupError(f"--dtype must be one of auto, {', '.join(DTYPES)}, not {asked!r}")
    kept = torch.float32 if stored is None else stored.dtype
    return torch.float32 if device.type == "cpu" and kept is torch.float16 else kept


def _device(asked: str) -> torch.device:
    try:
        device = torch.device(asked)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise StartupError(f"--device {asked!r}: use cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise StartupError(f"--device {asked}: this machine's torch sees no CUDA device; use --device cpu")
        if device.index is not None and device.index >= count:
            raise StartupError(f"--device {asked}: this machine's torch sees {count} CUDA device(s), counted from 0")
    return device
