"""What intake asks of a model family's processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from triptych.core.clip import Clip, ClipSurvey, FrameFit, FrameSize
    from triptych.core.encoder_input import EncoderInput, ItemInput
    from triptych.core.layout import ItemLayout, Positions
    from triptych.core.media import Modality, Picture
    from triptych.core.media_options import ClipOptions, OptionLayer, PictureOptions
    from triptych.core.picture_fit import PictureFit
    from triptych.core.plan import PromptPlan


class Processor(Protocol):
    """Turns one family's prompts and pictures into plans. Pure and thread-safe; costs CPU, so call it off the loop."""

    @property
    def placeholders(self) -> Mapping[Modality, int]:
        """The token id that marks one un-expanded item, for each modality the family accepts."""
        ...

    @property
    def special_words(self) -> Mapping[str, int]:
        """The added tokens that prompts of the family are made of, with the ids that config.json gives them."""
        ...

    @property
    def fingerprint(self) -> bytes:
        """32 bytes over everything that changes pixels, rows or expansion: model revision and settings."""
        ...

    def check_counts(self, token_ids: npt.NDArray[np.int32], modalities: Sequence[Modality]) -> None:
        """Match items with markers before any item is opened.

        Raises:
            PlaceholderMismatch: with both counts.
            UnsupportedFeature: a modality that the family does not accept.
        """
        ...

    @property
    def preferences(self) -> OptionLayer:
        """How the family wants its media read where nobody says otherwise."""
        ...

    def picture_fit(self, options: PictureOptions) -> PictureFit:
        """How large a picture is made where it is decoded.

        A bound that is asked for moves the model's own other one out of its way.
        """
        ...

    def encoder_input(self, index: int, picture: Picture, content_key: bytes) -> EncoderInput:
        """Patch one picture, which has its size; its layout is one run from position 0 until it is placed.

        Raises:
            MediaError: it is not of the size that ``picture_fit`` gives (index names the item).
        """
        ...

    def frame_fit(self, options: ClipOptions) -> FrameFit:
        """How large the frames of a video are made while it is decoded; bounds as for pictures.

        Raises:
            UnsupportedFeature: the family reads no videos.
        """
        ...

    def clip_input(self, index: int, clip: Clip, content_key: bytes) -> EncoderInput:
        """Patch the frames of one video, which have the size that ``frame_fit`` gives.

        Its layout is one run from position 0, with the times that are written when it is placed: then each step of time
        has a run of its own.

        Raises:
            MediaError: its shape cannot be used (index names the item).
            UnsupportedFeature: the family reads no videos.
        """
        ...

    def fewest_tokens(self, layout: ItemLayout) -> int:
        """How many tokens an item's marker becomes at least, known before any of them is made."""
        ...

    def picture_tokens(self, size: FrameSize, options: PictureOptions) -> int:
        """How many tokens the marker of a picture becomes, known before it is decoded.

        Args:
            size: as its header says; upright or on its side, it comes to the same.
            options: how it is read. What cannot be read at all, for being too narrow, counts as one token.
        """
        ...

    def fewest_clip_tokens(self, survey: ClipSurvey) -> int:
        """How many tokens the marker of a video becomes at least, known before it is decoded.

        Args:
            survey: with the ``frame_fit`` of the options that it is read by.
        """
        ...

    def plan(
        self, token_ids: npt.NDArray[np.int32], inputs: Sequence[ItemInput]
    ) -> tuple[PromptPlan, tuple[ItemInput, ...]]:
        """Expand each marker into its item's rows, at token level; ids outside of what it becomes are unchanged.

        Returns the plan, and the inputs with their layouts at their final places. Layouts are all that is looked at.

        Raises:
            InvalidRequest: a layout that another engine made is not one of this family; naming the item.
        """
        ...

    def fold(self, plan: PromptPlan) -> npt.NDArray[np.int32]:
        """The prompt as it was before it was expanded into the plan."""
        ...

    def positions(self, plan: PromptPlan) -> Positions:
        """Rotary positions of the whole prompt."""
        ...
