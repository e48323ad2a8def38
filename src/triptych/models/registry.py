"""Architecture name to model: one row a family. Towers are imported when a checkpoint has one.

Element types: ``auto`` is what the checkpoint stores, except that float16 becomes float32 on a CPU, which has
no float16 arithmetic worth using. bfloat16 stays bfloat16: the memory is what its owner chose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch

from triptych.core.checkpoint import Section, architecture_of, read_json
from triptych.core.errors import CheckpointError, Internal, StartupError, UnknownArchitecture
from triptych.models.contract import Model, RowSpec, TowerModel, is_out_of_memory
from triptych.models.decoder_config import DecoderConfig, DecoderFamily
from triptych.models.layer import Placement
from triptych.models.text_decoder import TextDecoder
from triptych.models.weights import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


class TowerDescription(NamedTuple):
    """A checkpoint's tower without its tensors, and what config.json says of the decoder that reads its rows."""

    spec: RowSpec
    weight_bytes: int
    """Memory that the tower's weights will take."""
    vocab_size: int
    max_context: int
    """Positions the checkpoint was made for."""


def describe(directory: str | Path, device: str = "cpu", dtype: str = "auto", *, tower: bool = True) -> Description:
    """What :func:`load_model` would load, checked but not read: headers only.

    Raises:
        CheckpointError: a file is missing, damaged or unsupported; a tensor is missing, left over or misshapen.
        UnknownArchitecture: no row.
        StartupError: an unknown element type or device.
    """
    plan = _plan(Path(directory), device, dtype, text=True, tower=tower)
    parts = _checked(plan, _model)
    return Description(replace(parts.text.spec, device=plan.device), _bytes(parts))


def describe_tower(directory: str | Path, device: str = "cpu", dtype: str = "auto") -> TowerDescription:
    """What :func:`load_tower` would load, checked but not read: headers only.

    Raises:
        CheckpointError: as for :func:`load_tower`.
        UnknownArchitecture: no row.
        StartupError: an unknown element type or device, or a checkpoint without a tower.
    """
    plan = _plan(Path(directory), device, dtype, text=False, tower=True)
    weight_bytes = _bytes(_checked(plan, _tower))
    return TowerDescription(plan.rows, weight_bytes, plan.decoder.vocab_size, plan.decoder.max_context)


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
    parts = _filled(_plan(Path(directory), device, dtype, text=True, tower=tower), _model, progress)
    return Model(parts.text, parts.tower)


def load_tower(
    directory: str | Path,
    device: str = "cpu",
    dtype: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> TowerModel:
    """Load the tower of a Hugging Face directory, and nothing of its decoder, whose tensors are not looked at.

    Its rows are what the decoder reads that :func:`load_model` loads with the same arguments, ``auto`` included.

    Raises:
        CheckpointError: a file is missing, damaged or unsupported; a tensor of the tower is missing, left over or
            misshapen.
        UnknownArchitecture: no row.
        StartupError: an unknown element type or device, too little memory, or a checkpoint without a tower.
    """
    plan = _plan(Path(directory), device, dtype, text=False, tower=True)
    return TowerModel(_filled(plan, _tower, progress).tower, plan.rows)


class _Plan(NamedTuple):
    """Everything about a checkpoint but its tensors."""

    family: ModelFamily
    decoder: DecoderConfig
    vision: Section | None
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    text: bool
    """Whether the decoder is loaded."""
    tower: bool
    """Whether an encoder is loaded, where there is one."""

    @property
    def levels(self) -> int:
        """Deepstack levels."""
        return 0 if self.vision is None else len(self.vision.numbers("deepstack_visual_indexes", ()))

    @property
    def rows(self) -> RowSpec:
        """The rows that the decoder reads."""
        return RowSpec(self.decoder.hidden_size * (1 + self.levels), self.dtype, self.device)

    def ignored(self, name: str) -> bool:
        """Tensors of a part that is left out, and those that old exporters wrote and nothing needs."""
        if self.family.has_tower and not (self.tower if name.startswith(_TOWER_PREFIX) else self.text):
            return True
        return name.endswith("rotary_emb.inv_freq") or (self.decoder.tied and name == _HEAD)


class _Parts(Protocol):
    """Some of a checkpoint, with empty weights."""

    def slots(self) -> Iterator[Slot]:
        """All places."""
        ...


P = TypeVar("P", bound=_Parts)
_Build = Callable[[_Plan, torch.device], P]


class _Model(NamedTuple):
    """All of it, or all but the tower."""

    text: TextDecoder
    tower: Qwen3VLTower | None

    def slots(self) -> Iterator[Slot]:
        yield from self.text.slots()
        if self.tower is not None:
            yield from self.tower.slots(_TOWER_PREFIX)


class _Tower(NamedTuple):
    """The tower alone."""

    tower: Qwen3VLTower

    def slots(self) -> Iterator[Slot]:
        return self.tower.slots(_TOWER_PREFIX)


def _checked(plan: _Plan, build: _Build[P]) -> P:
    """Parts that take no memory: sizes that only config.json claims are never allocated."""
    parts = build(plan, torch.device("meta"))
    plan.checkpoint.match(parts.slots(), ignored=plan.ignored)
    return parts


def _filled(plan: _Plan, build: _Build[P], progress: Callable[[int, int], None] | None) -> P:
    _checked(plan, build)
    try:
        parts = build(plan, plan.device)
        plan.checkpoint.fill(parts.slots(), progress=progress)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        where = plan.checkpoint.directory
        raise StartupError(f"not enough memory on {plan.device} for the weights of {where}") from error
    return parts


def _bytes(parts: _Parts) -> int:
    return sum(slot.target.nbytes for slot in parts.slots())


def _plan(directory: Path, device: str, dtype: str, *, text: bool, tower: bool) -> _Plan:
    config = read_json(directory, "config.json")
    architecture = architecture_of(config)
    if architecture not in FAMILIES:
        raise UnknownArchitecture(architecture, list(FAMILIES))
    if config.has("quantization_config"):
        raise config.error("quantization_config", "is set; quantised weights are not supported")
    family = FAMILIES[architecture]
    if not (text or family.has_tower):
        raise StartupError(
            f"{directory}: {architecture} reads text only; an encoder engine needs a model with a vision tower"
        )
    section = config.section(family.text_section) if family.text_section else config
    tied = config.flag("tie_word_embeddings", section.flag("tie_word_embeddings", False))
    decoder = DecoderConfig.read(section, family.decoder, tied=tied)
    checkpoint = Checkpoint(directory)
    where = _device(device)
    return _Plan(
        family=family,
        decoder=decoder,
        vision=_vision(config, decoder) if family.has_tower else None,
        checkpoint=checkpoint,
        device=where,
        dtype=_dtype(dtype, checkpoint.stored.get(f"{family.decoder.prefix}embed_tokens.weight"), where),
        text=text,
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


def _model(plan: _Plan, device: torch.device) -> _Model:
    prefix = plan.family.decoder.prefix
    try:
        text = TextDecoder(plan.decoder, prefix, plan.levels, Placement(device, plan.dtype))
    except RuntimeError as error:
        if device.type != "meta":
            raise
        raise CheckpointError(f"{plan.checkpoint.directory}: config.json asks for impossible sizes") from error
    return _Model(text, _tower(plan, device).tower if plan.vision is not None and plan.tower else None)


def _tower(plan: _Plan, device: torch.device) -> _Tower:
    from triptych.models.vision.qwen3_vl import Qwen3VLTower

    if plan.vision is None:
        raise Internal("a tower was asked for that the family does not have")
    return _Tower(Qwen3VLTower(plan.vision, device, plan.dtype))


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
