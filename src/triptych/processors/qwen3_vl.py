"""Qwen3-VL: pictures and videos to patches, markers to rows, three position axes.

Patches run over groups of frames, in each over merged cells, and inside a cell over its patches:

    picture [H, W, 3]        ->  cell row, cell column, row in cell, column in cell  ->  [channel, 1, patch, patch]
    video   [frames, H, W, 3] -> group, and then the same                            ->  [channel, frame, patch, patch]

so that each merge x merge stretch of patches becomes one row of the tower's output. Samples stay bytes; what number
each value becomes is said beside them, and the tower looks it up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from triptych.core.clip import FrameFit
from triptych.core.encoder_input import EncoderInput
from triptych.core.errors import InvalidRequest, MediaError, UnsupportedFeature
from triptych.core.layout import Grid, ItemLayout, Run
from triptych.core.media import Modality, Stage
from triptych.core.media_options import OptionLayer
from triptych.core.picture_fit import PictureFit
from triptych.core.plan import PositionRule, PromptPlan
from triptych.processors.expand import ItemText, check_counts, expand
from triptych.processors.identity import processor_fingerprint
from triptych.processors.pixel_settings import CHANNELS, OF_PICTURES, PixelSettings
from triptych.processors.positions import positions_of
from triptych.processors.video_prompt import (
    FEWEST_WRITTEN,
    VideoTokens,
    group_times,
    video_text,
    written_before,
)
from triptych.processors.video_settings import VideoSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from triptych.core.checkpoint import Section
    from triptych.core.clip import Clip, ClipSurvey, FrameSize
    from triptych.core.encoder_input import ItemInput
    from triptych.core.layout import Positions
    from triptych.core.media import Picture
    from triptych.core.media_options import ClipOptions, PictureOptions
    from triptych.processors.video_prompt import Tokenise


class Qwen3VLProcessor:
    """A :class:`~triptych.processors.contract.Processor` for ``Qwen3VLForConditionalGeneration``."""

    def __init__(
        self, config: Section, images: Section, videos: Section | None, model_revision: bytes, tokenise: Tokenise
    ) -> None:
        """Read config.json and the processors' settings.

        Args:
            config: config.json.
            images: The image processor's settings.
            videos: The video processor's; None where there are none, and videos are not read.
            model_revision: 32 bytes.
            tokenise: How the times of a video are written.

        Raises:
            CheckpointError: a setting is wrong or unsupported.
        """
        vision = config.section("vision_config")
        self._images = PixelSettings.read(vision, images, OF_PICTURES)
        self._videos = None if videos is None else VideoSettings.read(vision, videos)
        self._image_tones = self._images.tones()
        self._video_tones = self._image_tones if self._videos is None else self._videos.pixels.tones()
        self._tokenise = tokenise
        self._tokens = VideoTokens(
            pad=config.integer("video_token_id", 151656, least=0),
            start=config.integer("vision_start_token_id", 151652, least=0),
            end=config.integer("vision_end_token_id", 151653, least=0),
        )
        self._image_token = config.integer("image_token_id", 151655, least=0)
        self.placeholders: Mapping[Modality, int] = {Modality.IMAGE: self._image_token}
        self.special_words: Mapping[str, int] = {
            "<|image_pad|>": self._image_token,
            "<|vision_start|>": self._tokens.start,
            "<|vision_end|>": self._tokens.end,
        }
        if self._videos is not None:
            self.placeholders |= {Modality.VIDEO: self._tokens.pad}
            self.special_words |= {"<|video_pad|>": self._tokens.pad}
        self.fingerprint = processor_fingerprint(
            model_revision, b"qwen3_vl", repr((self._images, self._videos, self._image_token, self._tokens)).encode()
        )

    @property
    def preferences(self) -> OptionLayer:
        """Frames as the video processor's settings choose them. Bounds of pixels are left to where they are used."""
        return OptionLayer() if self._videos is None else OptionLayer(video=self._videos.frames)

    def check_counts(self, token_ids: npt.NDArray[np.int32], modalities: Sequence[Modality]) -> None:
        """Match items with markers of their kind.

        Raises:
            PlaceholderMismatch: with both counts; a prompt that is expanded already has too many.
            InvalidRequest: pictures and videos stand in another order than their markers.
            UnsupportedFeature: an item, or a marker, of another kind.
        """
        check_counts(token_ids, modalities, self.placeholders)
        if self._videos is None and (token_ids == self._tokens.pad).any():
            raise UnsupportedFeature("the prompt has a video placeholder, but video is not accepted here")

    def picture_fit(self, options: PictureOptions) -> PictureFit:
        """Whole cells, within the model's bounds or those that are asked for."""
        settings = self._images
        least, most = settings.bounds.asked(options.min_pixels, options.max_pixels)
        return PictureFit(settings.cell, least, most, settings.resample)

    def encoder_input(self, index: int, picture: Picture, content_key: bytes) -> EncoderInput:
        """Patch one picture.

        Raises:
            MediaError: it is not of the size that ``picture_fit`` gives.
        """
        settings = self._images
        _check_cells(index, "pixels", picture.height, picture.width, settings)
        grid = Grid(1, picture.height // settings.patch, picture.width // settings.patch)
        patches = _empty(grid, 1, settings)
        _patch(picture.pixels, _cells(patches, grid, settings)[0, ..., 0, :, :])
        return EncoderInput(_layout(Modality.IMAGE, grid, settings, content_key), patches, self._image_tones)

    def frame_fit(self, options: ClipOptions) -> FrameFit:
        """Whole cells, and one budget of pixels for all frames.

        Raises:
            UnsupportedFeature: the checkpoint has no settings for videos.
        """
        settings = self._of_videos().pixels
        least, most = settings.bounds.asked(options.min_pixels, options.max_pixels)
        return FrameFit(settings.cell, settings.temporal, least, most, settings.resample)

    def clip_input(self, index: int, clip: Clip, content_key: bytes) -> EncoderInput:
        """Patch the frames of one video; the last one fills up its group.

        Raises:
            MediaError: its frames are not of the size that ``frame_fit`` gives.
            UnsupportedFeature: the checkpoint has no settings for videos.
        """
        settings = self._of_videos().pixels
        count, height, width, _ = clip.frames.shape
        _check_cells(index, "frames", height, width, settings)
        grid = Grid(-(-count // settings.temporal), height // settings.patch, width // settings.patch)
        patches = _empty(grid, settings.temporal, settings)
        cells = _cells(patches, grid, settings)
        for at in range(grid.t * settings.temporal):
            group, frame = divmod(at, settings.temporal)
            _patch(clip.frames[min(at, count - 1)], cells[group, ..., frame, :, :])
        layout = _layout(
            Modality.VIDEO, grid, settings, content_key, group_times(clip.plan.timestamps, settings.temporal)
        )
        return EncoderInput(layout, patches, self._video_tones)

    def _of_videos(self) -> VideoSettings:
        if self._videos is None:
            raise UnsupportedFeature("video is not accepted here: the checkpoint has no settings for videos")
        return self._videos

    def fewest_tokens(self, layout: ItemLayout) -> int:
        """Its rows, and what is written around each group of frames."""
        return layout.span + FEWEST_WRITTEN * len(layout.times)

    def picture_tokens(self, size: FrameSize, options: PictureOptions) -> int:
        """One a merged cell."""
        try:
            return self.picture_fit(options).size(size).pixels // self._images.cell**2
        except ValueError:  # too narrow, which is for whoever decodes it to say
            return 1

    def fewest_clip_tokens(self, survey: ClipSurvey) -> int:
        """One a merged cell of each group of frames, and what is written around the group."""
        settings = self._of_videos().pixels
        rows = survey.kept_pixels // survey.frames // settings.cell**2
        return -(-survey.frames // settings.temporal) * (rows + FEWEST_WRITTEN)

    def plan(
        self, token_ids: npt.NDArray[np.int32], inputs: Sequence[ItemInput]
    ) -> tuple[PromptPlan, tuple[ItemInput, ...]]:
        """Expand each marker into its picture's rows, or its video's rows and times.

        Raises:
            InvalidRequest: a layout, which another engine may have made, is not one of this family.
        """
        layouts = [entry.layout for entry in inputs]
        texts = [self._text(index, layout) for index, layout in enumerate(layouts)]
        expansion = expand(token_ids, list(self.placeholders.values()), layouts, texts)
        plan = PromptPlan(
            token_ids=expansion.token_ids,
            items=expansion.layouts,
            rule=PositionRule.MROPE,
            spatial_merge=self._images.merge,
            fingerprint=self.fingerprint,
        )
        placed = tuple(replace(entry, layout=layout) for entry, layout in zip(inputs, expansion.layouts, strict=True))
        return plan, placed

    def _text(self, index: int, layout: ItemLayout) -> ItemText:
        """What stands in the prompt for an item."""
        grid, merge = layout.grid, self._images.merge
        if len(layout.runs) > 1 or layout.framing or layout.cells(merge) is None:
            raise InvalidRequest(
                f"media item {index}: {layout.rows} rows in {len(layout.runs)} run(s), {len(layout.framing)} positions "
                f"without one, are not its grid {tuple(grid)} merged {merge} x {merge} in one stretch"
            )
        if layout.modality is Modality.VIDEO:
            if len(layout.times) != grid.t:
                raise InvalidRequest(
                    f"media item {index}: a video is written with the time of each step, and of {grid.t} steps it has "
                    f"{len(layout.times)}"
                )
            return video_text(layout.times, grid, merge, self._tokens, self._tokenise)
        return ItemText(np.full(layout.span, self._image_token, np.int32), (Run(0, layout.span),))

    def fold(self, plan: PromptPlan) -> npt.NDArray[np.int32]:
        """Of each item one marker, and nothing of what is written around the runs of a video."""
        keep = np.ones(len(plan), dtype=bool)
        for item in plan.items:
            begin, end = item.start, item.end
            if item.modality is Modality.VIDEO:
                begin -= written_before(plan.token_ids[:begin], self._tokenise)
                end += 1
            keep[begin:end] = False
            keep[item.start] = True
        return plan.token_ids[keep]

    def positions(self, plan: PromptPlan) -> Positions:
        """Three axes: time, height, width."""
        return positions_of(plan)


def _layout(
    modality: Modality, grid: Grid, settings: PixelSettings, content_key: bytes, times: tuple[float, ...] = ()
) -> ItemLayout:
    """One stretch from position 0, until what is written inside it is known."""
    encoder_tokens = grid.t * grid.h * grid.w
    rows = encoder_tokens // settings.merge**2
    return ItemLayout(modality, (Run(0, rows),), rows, encoder_tokens, grid, content_key, times=times)


def _check_cells(index: int, what: str, height: int, width: int, settings: PixelSettings) -> None:
    if height % settings.cell or width % settings.cell:
        raise MediaError(
            index,
            f"{what} of {width} x {height} are not whole cells of {settings.cell} x {settings.cell}",
            Stage.PREPROCESS,
        )


def _empty(grid: Grid, frames: int, settings: PixelSettings) -> npt.NDArray[np.uint8]:
    """[patches, channels, frames, patch, patch]."""
    patch = settings.patch
    return np.empty((grid.t * grid.h * grid.w, CHANNELS, frames, patch, patch), dtype=np.uint8)


def _cells(patches: npt.NDArray[np.uint8], grid: Grid, settings: PixelSettings) -> npt.NDArray[np.uint8]:
    """[groups, cell rows, cell columns, merge, merge, channels, frames, patch, patch] of the same memory."""
    merge = settings.merge
    return patches.reshape(grid.t, grid.h // merge, grid.w // merge, merge, merge, *patches.shape[1:])


def _patch(pixels: npt.NDArray[np.uint8], cells: npt.NDArray[np.uint8]) -> None:
    """Write [height, width, channels] into [cell rows, cell columns, merge, merge, channels, patch, patch].

    One copy, in which other threads run.
    """
    down, across, merge, _, channels, patch, _ = cells.shape
    # cell row, row in cell, row in patch, cell column, column in cell, column in patch, channel -> as above
    cells[...] = pixels.reshape(down, merge, patch, across, merge, patch, channels).transpose(0, 3, 1, 4, 6, 2, 5)
