"""A LoRA adapter's settings, read from PEFT's adapter_config.json.

Only plain LoRA is computed. PEFT writes every setting it knows, and new variants come as new settings; so a setting
that is not listed here must be unset, or the adapter is refused by the setting's name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from triptych.core.checkpoint import read_json
from triptych.core.config import MIB
from triptych.core.errors import CheckpointError
from triptych.models.projections import NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from triptych.core.checkpoint import Section
    from triptych.models.projections import Module

CONFIG = "adapter_config.json"
_MAX_BYTES = MIB
_READ = frozenset(
    {
        "peft_type", "bias", "init_lora_weights", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    }
)  # fmt: skip
_WITHOUT_EFFECT = frozenset(
    {
        "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
        "lora_dropout", "eva_config", "megatron_core", "qalora_group_size",
    }
)  # fmt: skip
"""On a forward pass, or on one without another setting that is refused."""
_INITIAL_WEIGHTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to begin that leave the base model alone. The others change it too, and with it what the adapter means."""


class _Pattern(NamedTuple):
    """A setting for some modules."""

    order: int
    """The first that fits a module counts."""
    value: float


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """How the two matrices of a module are sized and scaled, and which modules have them."""

    rank: int
    alpha: float
    rank_stabilised: bool
    """Scaled by 1 / sqrt(rank) instead of 1 / rank."""
    ranks: Mapping[str, _Pattern]
    """By ending of the module's name, or by ``^`` and the whole name."""
    alphas: Mapping[str, _Pattern]
    targets: frozenset[str] | None
    """Endings of module names. None: settings of another kind; the tensors alone say which modules there are."""
    layers: frozenset[int] | None
    """None: all."""

    @classmethod
    def read(cls, directory: Path, modules: Sequence[Module], max_rank: int) -> LoraConfig:
        """Read the file, for a decoder that has these modules.

        Raises:
            CheckpointError: no such file, or a setting that is missing, wrong, too large or not plain LoRA; names it.
        """
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory")
        if not (directory / CONFIG).is_file():
            raise CheckpointError(f"{directory} has no {CONFIG}: it is not a PEFT adapter directory")
        section = read_json(directory, CONFIG, _MAX_BYTES)
        _refuse_unsupported(section)
        endings = {ending for module in modules for ending in module.endings()}
        keys = endings | {f"^{module.name}" for module in modules}
        ranks = _patterns(section, "rank_pattern", keys, lambda part, key: _rank(part, key, max_rank))
        return cls(
            rank=_rank(section, "r", max_rank),
            alpha=section.number("lora_alpha"),
            rank_stabilised=section.flag("use_rslora", False),
            ranks=ranks,
            alphas=_patterns(section, "alpha_pattern", keys, lambda part, key: part.number(key)),
            targets=_targets(section, endings),
            layers=_layers(section, 1 + max(module.layer for module in modules)),
        )

    def rank_of(self, module: Module) -> int:
        """Rows of the module's A, columns of its B."""
        return int(_first(self.ranks, module, self.rank))

    def scaling_of(self, module: Module) -> float:
        """Factor of the module's update."""
        rank = self.rank_of(module)
        return _first(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilised else rank)

    def covers(self, module: Module) -> bool | None:
        """Whether the settings say that the module is adapted; None where only the tensors can say."""
        if self.layers is not None and module.layer not in self.layers:
            return False
        return None if self.targets is None else any(ending in self.targets for ending in module.endings())


def _refuse_unsupported(section: Section) -> None:
    """Everything that would change the result and is not computed."""
    if (kind := section.text("peft_type")) != "LORA":
        raise section.error("peft_type", f"is {kind!r:.100}; only 'LORA' is supported")
    if (bias := section.text("bias", "none")) != "none":
        raise section.error("bias", f"is {bias!r:.100}; only 'none' is supported")
    initial = section.values.get("init_lora_weights")
    if initial not in _INITIAL_WEIGHTS:
        raise section.error(
            "init_lora_weights", f"is {initial!r:.100}, which changes the base model; convert the adapter to plain LoRA"
        )
    for key, value in section.values.items():
        if key not in _READ and key not in _WITHOUT_EFFECT and value not in (None, False, "", [], {}):
            raise CheckpointError(f"{section.file}: {key!r:.100} is set; only plain LoRA is supported")
    if section.has("layers_pattern") and section.values["layers_pattern"] not in ("layers", ["layers"], "", []):
        raise section.error("layers_pattern", f"is {section.values['layers_pattern']!r:.100}; it must be 'layers'")


def _rank(section: Section, key: str, max_rank: int) -> int:
    rank = section.integer(key)
    if rank > max_rank:
        raise section.error(key, f"is {rank!r:.100}; this engine takes ranks up to {max_rank} (--max-lora-rank)")
    return rank


def _patterns(
    section: Section, name: str, keys: Collection[str], read: Callable[[Section, str], float]
) -> dict[str, _Pattern]:
    """PEFT takes the keys for regular expressions, which are not run on behalf of a file; plain names mean the same."""
    part = section.section(name)
    for key in part.values:
        if key not in keys:
            raise section.error(
                name,
                f"has {key!r:.100}, which is no projection of the text decoder (regular expressions are not read)",
            )
    return {key: _Pattern(order, read(part, key)) for order, key in enumerate(part.values)}


def _first(patterns: Mapping[str, _Pattern], module: Module, default: float) -> float:
    names = (*module.endings(), f"^{module.name}") if patterns else ()
    return min((patterns[name] for name in names if name in patterns), default=_Pattern(0, default)).value


def _targets(section: Section, endings: Collection[str]) -> frozenset[str] | None:
    if isinstance(section.values.get("target_modules"), str):
        return None  # a regular expression
    names = section.texts("target_modules")
    if not names:
        raise section.error("target_modules", "is empty")
    for name in names:
        if name not in endings:
            raise section.error("target_modules", f"has {name!r:.100}; the text decoder's projections are {NAMES}")
    return None if section.values.get("exclude_modules") else frozenset(names)


def _layers(section: Section, count: int) -> frozenset[int] | None:
    value = section.values.get("layers_to_transform")
    layers = value if isinstance(value, list) else [] if value is None else [value]
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or layer not in range(count):
            raise section.error("layers_to_transform", f"has {layer!r:.100}; the decoder's layers are 0 to {count - 1}")
    return frozenset(layers) or None
