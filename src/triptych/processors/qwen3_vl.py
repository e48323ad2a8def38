"""Qwen3-VL: pictures to patches, markers to rows, three position axes.

Patches run over merged cells, and inside a cell over its patches:

    picture [H, W, 3] -> cell row, cell column, row in cell, column in cell -> [channel, frame, patch, patch]

so that each merge x merge stretch of patches becomes one row of the tower's output. Samples stay bytes; what number
each value becomes is said beside them, and the tower looks it up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from triptych.core.encoder_input import EncoderInput
from triptych.core.errors import MediaError, UnsupportedFeature
from triptych.core.layout import Grid, ItemLayout, Run
from triptych.core.media import Modality, Stage
from triptych.core.plan import PositionRule, PromptPlan
from triptych.processors.expand import check_counts, expand
from triptych.processors.identity import processor_fingerprint
from triptych.processors.positions import positions_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from triptych.core.checkpoint import Section
    from triptych.core.encoder_input import ItemInput
    from triptych.core.layout import Positions
    from triptych.core.media import Picture

MAX_ASPECT = 200
"""Longer side over shorter side; the family refuses more."""
CHANNELS = 3
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""Pillow's numbers, as the configuration files write them."""


class Size(NamedTuple):
    """Pixels."""

    height: int
    width: int


@dataclass(frozen=True, slots=True)
class PixelSettings:
    """Everything that decides the patches of a picture."""

    patch: int
    merge: int
    temporal: int
    """Frames in one patch; a still picture stands for all of them."""
    min_pixels: int
    max_pixels: int
    resample: int
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(cls, vision: Section, images: Section) -> PixelSettings:
        """Combine the tower's configuration with the image processor's.

        Raises:
            CheckpointError: a wrong value, two that contradict each other, or a step switched off.
        """
        for key in ("do_resize", "do_rescale", "do_normalize"):
            if not images.flag(key, True):
                raise images.error(key, "is false; only true is supported")
        shape: dict[str, int] = {}
        for key, tower_key, default in (
            ("patch_size", "patch_size", 16),
            ("merge_size", "spatial_merge_size", 2),
            ("temporal_patch_size", "temporal_patch_size", 2),
        ):
            in_tower = vision.integer(tower_key, default)
            shape[key] = images.integer(key, in_tower)
            if shape[key] != in_tower:
                raise images.error(key, f"is {shape[key]}, but {tower_key} of the tower is {in_tower}")
        size = images.section("size")
        settings = cls(
            patch=shape["patch_size"],
            merge=shape["merge_size"],
            temporal=shape["temporal_patch_size"],
            min_pixels=images.integer("min_pixels", size.integer("shortest_edge", 56 * 56)),
            max_pixels=images.integer("max_pixels", size.integer("longest_edge", 28 * 28 * 1280)),
            resample=images.integer("resample", 3, least=0),
            rescale=images.number("rescale_factor", 1 / 255),
            mean=images.numbers("image_mean", _CLIP_MEAN),
            std=images.numbers("image_std", _CLIP_STD),
        )
        if settings.resample not in _RESAMPLE:
            raise images.error("resample", f"must be one of {_RESAMPLE}, not {settings.resample}")
        if len(settings.mean) != CHANNELS or len(settings.std) != CHANNELS or 0 in settings.std:
            raise images.error("image_mean and image_std", "must be three numbers each, no deviation 0")
        if not np.isfinite(settings.tones()).all():
            raise images.error("rescale_factor, image_mean and image_std", "make numbers that 32 bits do not hold")
        if settings.max_pixels < settings.min_pixels:
            raise images.error(
                "size", f"allows at least {settings.min_pixels} and at most {settings.max_pixels} pixels"
            )
        return settings

    @property
    def cell(self) -> int:
        """Pixels along one side of a merged cell."""
        return self.patch * self.merge

    def fit(self, size: Size) -> Size:
        """The size a picture is resized to: whole cells, pixels within bounds, nearly the same proportions."""
        height, width = (round(side / self.cell) * self.cell for side in size)
        if height * width > self.max_pixels:
            shrink = math.sqrt((size.height * size.width) / self.max_pixels)
            height, width = (max(self.cell, math.floor(side / shrink / self.cell) * self.cell) for side in size)
        elif height * width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (size.height * size.width))
            height, width = (math.ceil(side * grow / self.cell) * self.cell for side in size)
        return Size(height, width)

    @np.errstate(all="ignore")
    def tones(self) -> npt.NDArray[np.float32]:
        """What each of the 256 sample values becomes, [channels, 256], read-only; rounded as the reference rounds."""
        scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        mean, std = np.array(self.mean).astype(np.float32), np.array(self.std).astype(np.float32)
        tones: npt.NDArray[np.float32] = (scaled[None] - mean[:, None]) / std[:, None]
        tones.setflags(write=False)
        return tones


class Qwen3VLProcessor:
    """A :class:`~triptych.processors.contract.Processor` for ``Qwen3VLForConditionalGeneration``."""

    def __init__(self, config: Section, images: Section, model_revision: bytes) -> None:
        """Read config.json and the image processor's settings.

        Raises:
            CheckpointError: a setting is wrong or unsupported.
        """
        self._settings = PixelSettings.read(config.section("vision_config"), images)
        self._image_token = config.integer("image_token_id", 151655, least=0)
        self._video_token = config.integer("video_token_id", 151656, least=0)
        self._tones = self._settings.tones()
        self.placeholders: Mapping[Modality, int] = {Modality.IMAGE: self._image_token}
        self.special_words: Mapping[str, int] = {
            "<|image_pad|>": self._image_token,
            "<|vision_start|>": config.integer("vision_start_token_id", 151652, least=0),
            "<|vision_end|>": config.integer("vision_end_token_id", 151653, least=0),
        }
        self.fingerprint = processor_fingerprint(
            model_revision, b"qwen3_vl", repr((self._settings, self._image_token)).encode()
        )

    def check_counts(self, token_ids: npt.NDArray[np.int32], modalities: Sequence[Modality]) -> None:
        """Match pictures with picture markers.

        Raises:
            PlaceholderMismatch: with both counts; a prompt that is expanded already has too many.
            UnsupportedFeature: an item, or a marker, of another kind.
        """
        check_counts(token_ids, modalities, self.placeholders)
        if (token_ids == self._video_token).any():
            raise UnsupportedFeature("the prompt has a video placeholder, but video is not accepted here")

    def encoder_input(self, index: int, picture: Picture, content_key: bytes) -> EncoderInput:
        """Resize and patch one picture.

        Raises:
            MediaError: one side is more than 200 times the other.
        """
        size = Size(picture.height, picture.width)
        if max(size) > MAX_ASPECT * min(size):
            raise MediaError(
                index,
                f"{size.width} x {size.height} is too narrow: one side may be {MAX_ASPECT} times the other",
                Stage.PREPROCESS,
            )
        settings = self._settings
        target = settings.fit(size)
        resized = Image.fromarray(picture.pixels).resize(
            (target.width, target.height), resample=Image.Resampling(settings.resample)
        )
        grid = Grid(1, target.height // settings.patch, target.width // settings.patch)
        encoder_tokens = grid.h * grid.w
        rows = encoder_tokens // settings.merge**2
        layout = ItemLayout(
            modality=Modality.IMAGE,
            runs=(Run(0, rows),),
            rows=rows,
            encoder_tokens=encoder_tokens,
            grid=grid,
            content_key=content_key,
        )
        return EncoderInput(layout, self._patches(resized, grid), self._tones)

    def _patches(self, picture: Image.Image, grid: Grid) -> npt.NDArray[np.uint8]:
        """[patches, channels, 1, patch, patch]."""
        patch, merge = self._settings.patch, self._settings.merge
        patches = np.empty((grid.h * grid.w, CHANNELS, 1, patch, patch), dtype=np.uint8)
        # One row of a patch is one element, which is copied whole: several times faster than sample by sample.
        row = np.dtype((np.void, patch))
        cells = patches.view(row).reshape(grid.h // merge, grid.w // merge, merge, merge, CHANNELS, patch)
        for channel, band in enumerate(picture.split()):
            rows = np.asarray(band).view(row).reshape(grid.h // merge, merge, patch, grid.w // merge, merge)
            # cell row, row in cell, row in patch, cell column, column in cell -> as above
            cells[..., channel, :] = rows.transpose(0, 3, 1, 4, 2)
        return patches

    def plan(
        self, token_ids: npt.NDArray[np.int32], inputs: Sequence[ItemInput]
    ) -> tuple[PromptPlan, tuple[ItemInput, ...]]:
        """Expand each picture marker into its picture's rows."""
        expansion = expand(token_ids, [self._image_token], [entry.layout for entry in inputs])
        plan = PromptPlan(
            token_ids=expansion.token_ids,
            items=expansion.layouts,
            rule=PositionRule.MROPE,
            spatial_merge=self._settings.merge,
            fingerprint=self.fingerprint,
        )
        placed = tuple(replace(entry, layout=layout) for entry, layout in zip(inputs, expansion.layouts, strict=True))
        return plan, placed

    def positions(self, plan: PromptPlan) -> Positions:
        """Three axes: time, height, width."""
        return positions_of(plan)
