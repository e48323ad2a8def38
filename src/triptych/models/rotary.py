"""Rotary position tables: plain, linear and llama3 frequencies, one axis or three interleaved ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from triptych.core.checkpoint import Section

SUPPORTED = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """How positions turn into angles."""

    head_size: int
    theta: float
    kind: str = "default"
    """One of ``SUPPORTED``."""
    factor: float = 1.0
    """Wavelengths grow by this (linear: all, llama3: the long ones)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: float = 0.0
    """llama3: positions of the first training."""
    mrope_section: tuple[int, ...] | None = None
    """Frequencies for (time, height, width); None: one axis."""

    @classmethod
    def read(cls, text: Section, head_size: int, theta: float, mrope_section: tuple[int, ...] | None) -> RotaryConfig:
        """Read ``rope_parameters``, or the older ``rope_theta`` with ``rope_scaling``.

        Args:
            text: The text part of config.json.
            head_size: Width of one head.
            theta: The family's default base.
            mrope_section: The family's default sections; None: the family has one axis.

        Raises:
            CheckpointError: naming a key that is wrong or a kind that is not implemented.
        """
        rope = text.section("rope_parameters" if text.has("rope_parameters") else "rope_scaling")
        kind = rope.text("rope_type", rope.text("type", "default"))
        if kind == "mrope":
            kind = "default"
        if kind not in SUPPORTED:
            raise rope.error("rope_type", f"is {kind!r}; supported: {', '.join(SUPPORTED)}")
        if rope.number("partial_rotary_factor", text.number("partial_rotary_factor", 1.0)) != 1.0:
            raise rope.error("partial_rotary_factor", "is not 1; rotating a part of a head is not supported")
        sections = None
        if mrope_section is not None:
            sections = tuple(int(n) for n in rope.numbers("mrope_section", mrope_section))
            if len(sections) != 3 or min(sections) < 0 or sum(sections) != head_size // 2:
                raise rope.error("mrope_section", f"must be 3 counts with sum {head_size // 2}, not {sections}")
            if not rope.flag("mrope_interleaved", True):
                raise rope.error("mrope_interleaved", "is false; only interleaved sections are supported")
        scaled, llama3 = kind != "default", kind == "llama3"
        return cls(
            head_size=head_size,
            theta=rope.number("rope_theta", text.number("rope_theta", theta)),
            kind=kind,
            factor=rope.number("factor") if scaled else 1.0,
            low_freq_factor=rope.number("low_freq_factor") if llama3 else 1.0,
            high_freq_factor=rope.number("high_freq_factor") if llama3 else 4.0,
            original_context=rope.number("original_max_position_embeddings") if llama3 else 0.0,
            mrope_section=sections,
        )


class RotaryTables(NamedTuple):
    """Factors of one step, the same for every layer and head: ``x * cos + swapped halves of x * sin``."""

    cos: torch.Tensor
    """[T, 1, 2, head_size / 2]."""
    sin: torch.Tensor
    """The same shape; the first half carries the minus sign of the rotation."""


class Rotary:
    """Makes the tables of a step."""

    def __init__(self, config: RotaryConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._frequencies = inverse_frequencies(config).to(device)
        self._axes = None if config.mrope_section is None else axis_of_frequency(config.mrope_section).to(device)
        self._dtype = dtype

    def tables(self, positions: torch.Tensor) -> RotaryTables:
        """Tables for positions [axes, T]."""
        # [T, head_size / 2], each frequency with the position of its own axis
        by_axis = positions[0][:, None] if self._axes is None else positions.index_select(0, self._axes).t()
        angles = by_axis.float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return RotaryTables(
            torch.stack((cos, cos), dim=1)[:, None].to(self._dtype),
            torch.stack((-sin, sin), dim=1)[:, None].to(self._dtype),
        )


def rotate(heads: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Rotate [T, heads, head_size], each head against the tables of its token."""
    halves = heads.unflatten(-1, (2, -1))
    return torch.addcmul(halves * tables.cos, halves.flip(2), tables.sin).flatten(2)


def inverse_frequencies(config: RotaryConfig) -> torch.Tensor:
    """Radians per position, [head_size / 2] float32."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    plain = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return plain
    if config.kind == "linear":
        return plain / config.factor
    # llama3: short waves stay, long ones grow by the factor, those between blend from one to the other
    turns = config.original_context / (2 * math.pi / plain)
    span = config.high_freq_factor - config.low_freq_factor
    keep = ((turns - config.low_freq_factor) / span).clamp(0, 1)
    return (1 - keep) * (plain / config.factor) + keep * plain


def axis_of_frequency(sections: tuple[int, ...]) -> torch.Tensor:
    """Which axis each frequency follows, [sum of sections]: t h w t h w ... as long as h and w last, then t."""
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : sections[axis] * 3 : 3] = axis
    return axes
