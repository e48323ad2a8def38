"""Families that read text only: nothing to expand, one position axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.errors import UnsupportedFeature
from triptych.core.media_options import OptionLayer
from triptych.core.plan import PositionRule, PromptPlan
from triptych.processors.expand import check_counts
from triptych.processors.identity import processor_fingerprint
from triptych.processors.positions import positions_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from triptych.core.clip import Clip, ClipSurvey, FrameFit, FrameSize
    from triptych.core.encoder_input import EncoderInput, ItemInput
    from triptych.core.layout import ItemLayout, Positions
    from triptych.core.media import Modality, Picture
    from triptych.core.media_options import ClipOptions, PictureOptions
    from triptych.core.picture_fit import PictureFit


class TextProcessor:
    """A :class:`~triptych.processors.contract.Processor` that accepts no media."""

    def __init__(self, model_revision: bytes) -> None:
        self.placeholders: Mapping[Modality, int] = {}
        self.special_words: Mapping[str, int] = {}
        self.fingerprint = processor_fingerprint(model_revision, b"text")

    def check_counts(self, token_ids: npt.NDArray[np.int32], modalities: Sequence[Modality]) -> None:
        """Refuse every item.

        Raises:
            UnsupportedFeature: there is an item.
        """
        check_counts(token_ids, modalities, self.placeholders)

    @property
    def preferences(self) -> OptionLayer:
        """None."""
        return OptionLayer()

    def picture_fit(self, options: PictureOptions) -> PictureFit:
        """Never: likewise."""
        raise AssertionError("check_counts refuses every item first")

    def encoder_input(self, index: int, picture: Picture, content_key: bytes) -> EncoderInput:
        """Never: a text-only family has no encoder."""
        raise AssertionError("check_counts refuses every item first")

    def frame_fit(self, options: ClipOptions) -> FrameFit:
        """Never.

        Raises:
            UnsupportedFeature: always.
        """
        raise UnsupportedFeature("video is not accepted here; accepted: text only")

    def clip_input(self, index: int, clip: Clip, content_key: bytes) -> EncoderInput:
        """Never: likewise."""
        raise AssertionError("check_counts refuses every item first")

    def fewest_tokens(self, layout: ItemLayout) -> int:
        """Never: likewise."""
        raise AssertionError("check_counts refuses every item first")

    def picture_tokens(self, size: FrameSize, options: PictureOptions) -> int:
        """Never: likewise."""
        raise AssertionError("check_counts refuses every item first")

    def fewest_clip_tokens(self, survey: ClipSurvey) -> int:
        """Never: likewise."""
        raise AssertionError("check_counts refuses every item first")

    def plan(
        self, token_ids: npt.NDArray[np.int32], inputs: Sequence[ItemInput]
    ) -> tuple[PromptPlan, tuple[ItemInput, ...]]:
        """The prompt as it is."""
        own = token_ids.copy()
        own.setflags(write=False)
        return PromptPlan(own, (), PositionRule.LINEAR, spatial_merge=1, fingerprint=self.fingerprint), ()

    def fold(self, plan: PromptPlan) -> npt.NDArray[np.int32]:
        """The prompt as it is."""
        return plan.token_ids

    def positions(self, plan: PromptPlan) -> Positions:
        """0, 1, 2, ..."""
        return positions_of(plan)
