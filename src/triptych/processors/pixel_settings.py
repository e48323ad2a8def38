"""What decides the patches of a picture or of a video's frames, and their sizes; as the Qwen-VL families write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from triptych.core.checkpoint import Section

CHANNELS = 3
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""Pillow's numbers, as the configuration files write them."""
_HALF = (0.5, 0.5, 0.5)


class Bounds(NamedTuple):
    """Pixels of a picture, or of all frames of a video together."""

    least: int
    most: int

    def asked(self, least: int | None, most: int | None) -> Bounds:
        """With bounds that somebody asks for; the model's own other one is no obstacle to them."""
        if least is None:
            least = self.least if most is None else min(self.least, most)
        return Bounds(least, max(self.most, least) if most is None else most)


class Defaults(NamedTuple):
    """What holds where a file says nothing: of the classes that transformers reads it with."""

    bounds: Bounds
    mean: tuple[float, ...]
    std: tuple[float, ...]
    bound_names: tuple[str, str] | None = None
    """Keys that a file may have beside ``size``, and which then count."""
    fused: bool = False
    """See ``PixelSettings``."""


OF_PICTURES = Defaults(
    Bounds(56 * 56, 28 * 28 * 1280),
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
    ("min_pixels", "max_pixels"),
)
OF_VIDEOS = Defaults(Bounds(128 * 32 * 32, 768 * 32 * 32), _HALF, _HALF, fused=True)


@dataclass(frozen=True, slots=True)
class PixelSettings:
    """Everything that decides the patches of a picture, or of a video's frames."""

    patch: int
    merge: int
    temporal: int
    """Frames in one patch; a still picture stands for all of them."""
    bounds: Bounds
    resample: int
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fused: bool = False
    """Whether the reference rescales by the mean and the deviation, which shows in the last bit of a number."""

    @classmethod
    def read(cls, vision: Section, file: Section, defaults: Defaults) -> PixelSettings:
        """Combine the tower's configuration with a processor's.

        Raises:
            CheckpointError: a wrong value, two that contradict each other, or a step switched off.
        """
        for key in ("do_resize", "do_rescale", "do_normalize"):
            if not file.flag(key, True):
                raise file.error(key, "is false; only true is supported")
        shape: dict[str, int] = {}
        for key, tower_key, default in (
            ("patch_size", "patch_size", 16),
            ("merge_size", "spatial_merge_size", 2),
            ("temporal_patch_size", "temporal_patch_size", 2),
        ):
            in_tower = vision.integer(tower_key, default)
            shape[key] = file.integer(key, in_tower)
            if shape[key] != in_tower:
                raise file.error(key, f"is {shape[key]}, but {tower_key} of the tower is {in_tower}")
        settings = cls(
            patch=shape["patch_size"],
            merge=shape["merge_size"],
            temporal=shape["temporal_patch_size"],
            bounds=_read_bounds(file, defaults),
            resample=file.integer("resample", 3, least=0),
            rescale=file.number("rescale_factor", 1 / 255),
            mean=file.numbers("image_mean", defaults.mean),
            std=file.numbers("image_std", defaults.std),
            fused=defaults.fused,
        )
        settings._check(file)
        return settings

    def _check(self, file: Section) -> None:
        if self.resample not in _RESAMPLE:
            raise file.error("resample", f"must be one of {_RESAMPLE}, not {self.resample}")
        if len(self.mean) != CHANNELS or len(self.std) != CHANNELS or 0 in self.std:
            raise file.error("image_mean and image_std", "must be three numbers each, no deviation 0")
        if not np.isfinite(self.tones()).all():
            raise file.error("rescale_factor, image_mean and image_std", "make numbers that 32 bits do not hold")
        least, most = self.bounds
        if most < least:
            raise file.error("size", f"allows at least {least} and at most {most} pixels")

    @property
    def cell(self) -> int:
        """Pixels along one side of a merged cell."""
        return self.patch * self.merge

    @np.errstate(all="ignore")
    def tones(self) -> npt.NDArray[np.float32]:
        """What each of the 256 sample values becomes, [channels, 256], read-only; rounded as the reference rounds."""
        mean, std = np.array(self.mean).astype(np.float32), np.array(self.std).astype(np.float32)
        if self.fused:
            scale = (1 / np.float64(self.rescale)).astype(np.float32)
            mean, std, scaled = mean * scale, std * scale, np.arange(256, dtype=np.float32)
        else:
            scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        tones: npt.NDArray[np.float32] = (scaled[None] - mean[:, None]) / std[:, None]
        tones.setflags(write=False)
        return tones


def _read_bounds(file: Section, defaults: Defaults) -> Bounds:
    size = file.section("size")
    least = size.integer("shortest_edge", defaults.bounds.least)
    most = size.integer("longest_edge", defaults.bounds.most)
    if defaults.bound_names is not None:
        least, most = (
            file.integer(name, bound) for name, bound in zip(defaults.bound_names, (least, most), strict=True)
        )
    return Bounds(least, most)
