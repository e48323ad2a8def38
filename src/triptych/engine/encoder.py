"""Rows of media items: encoded by the tower, or brought by whoever had them encoded.

A call of the tower that fails for several items is repeated for each alone, so that only the bad one is lost. Memory
that runs out is no exception: what does not fit even alone is refused as overload. Only a lost device is passed on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from triptych.core.encoder_input import EncodedInput
from triptych.core.errors import Internal, InvalidRequest, Overloaded, RowTransferFailed, TriptychError, one_line
from triptych.models.contract import is_lost, is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triptych.core.encoder_input import EncoderInput, ItemInput
    from triptych.models.contract import RowSpec, VisionTower

logger = logging.getLogger(__name__)


class Trouble(NamedTuple):
    """Why a media item has no rows: the kind of error, and what follows the item's name in its message."""

    kind: type[TriptychError]
    reason: str

    def error(self, item: int) -> TriptychError:
        """For one of the requests that need the rows; ``item`` is its own index of them."""
        return self.kind(f"media item {item} {self.reason}")


class Encoder:
    """Belongs to the engine thread.

    Args:
        tower: None where items come encoded, or not at all.
        spec: the rows that the decoder reads.
    """

    def __init__(self, tower: VisionTower | None, spec: RowSpec) -> None:
        self._tower = tower
        self._spec = spec

    def check(self, index: int, item: ItemInput) -> None:
        """Refuse what can be seen to be wrong with a request's item. Reads only constants: safe from any thread.

        Raises:
            InvalidRequest: there is no tower for it, or its rows are not shaped as the decoder's.
        """
        if not isinstance(item, EncodedInput):
            if self._tower is None:
                raise InvalidRequest("the request has media but the model has no tower")
            return
        reason = self._misshapen(item)
        if reason is not None:
            raise InvalidRequest(f"media item {index} {reason}")

    def encode(self, inputs: Sequence[ItemInput]) -> list[torch.Tensor | Trouble]:
        """For each input its rows [rows, row width], in storage of their own, or what is wrong with them.

        Raises:
            AcceleratorError: the device is lost.
        """
        fresh = [item for item in inputs if not isinstance(item, EncodedInput)]
        encoded = iter(self._encode(fresh))
        return [self._place(item) if isinstance(item, EncodedInput) else next(encoded) for item in inputs]

    def _encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor | Trouble]:
        """In one call of the tower, or one by one when that fails."""
        outputs = self._call(inputs) if inputs else []
        if len(inputs) > 1 and any(isinstance(output, Trouble) for output in outputs):
            return [self._call([single])[0] for single in inputs]
        return outputs

    def _call(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor | Trouble]:
        if self._tower is None:
            return [Trouble(Internal, "needs a tower that the model does not have")] * len(inputs)
        try:
            outputs = self._tower.encode(inputs)
            if len(outputs) == len(inputs):
                return [self._checked(rows, single.layout.rows) for rows, single in zip(outputs, inputs, strict=True)]
        except Exception as error:
            if _ran_out(error, f"{len(inputs)} media item(s) could not be encoded at once"):
                return [_too_large(single) for single in inputs]
            return [Trouble(Internal, "could not be encoded")] * len(inputs)
        return [Trouble(Internal, f"came back in {len(outputs)} outputs for {len(inputs)} items")] * len(inputs)

    def _checked(self, rows: torch.Tensor, expected: int) -> torch.Tensor | Trouble:
        width = self._spec.row_width
        if rows.shape != (expected, width):
            return Trouble(Internal, f"was encoded to {list(rows.shape)}, not [{expected}, {width}]")
        own = self._own(rows)  # first: what is finite for the tower may be too large for the decoder's dtype
        if not bool(torch.isfinite(own).all()):
            return Trouble(Internal, "was encoded to numbers that are not finite")
        return own

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows in the decoder's dtype, in storage of their own: a view would keep its whole batch alive."""
        rows = rows.to(device=self._spec.device, dtype=self._spec.dtype)
        own = rows.is_contiguous() and rows.untyped_storage().nbytes() == rows.nbytes
        return rows if own else rows.clone(memory_format=torch.contiguous_format)

    def _place(self, item: EncodedInput) -> torch.Tensor | Trouble:
        """The rows that an item came with, on the device."""
        reason = self._misshapen(item)
        if reason is not None:
            return Trouble(RowTransferFailed, reason)
        try:
            # Copied: what the request holds may be part of something larger, lie at an odd address, or be read-only.
            rows = torch.empty((item.layout.rows, self._spec.row_width), dtype=self._spec.dtype)
            rows.view(torch.uint8).numpy()[:] = item.rows
            if bool(torch.isfinite(rows).all()):
                return rows.to(self._spec.device)
        except Exception as error:
            if _ran_out(error, "rows that another engine encoded could not be placed"):
                return Trouble(Overloaded, f"does not fit into memory: {item.rows.nbytes} bytes of rows; retry later")
            return Trouble(Internal, "came with rows that could not be placed")
        return Trouble(RowTransferFailed, "came with numbers that are not finite")

    def _misshapen(self, item: EncodedInput) -> str | None:
        """What is wrong with the shape of the rows that an item came with, if anything."""
        expected, rows = (item.layout.rows, self._spec.row_bytes), item.rows
        if rows.shape == expected and rows.dtype == np.uint8:
            return None
        return f"came with {rows.dtype} rows {list(rows.shape)}, not uint8 {list(expected)}"


def _ran_out(error: Exception, what: str) -> bool:
    """Note what failed; whether it was for want of memory.

    Raises:
        AcceleratorError: the error itself, if the device is lost.
    """
    if is_lost(error):
        raise error
    if is_out_of_memory(error):
        logger.warning("%s: %s", what, one_line(error))
        return True
    logger.error("%s", what, exc_info=error)
    return False


def _too_large(single: EncoderInput) -> Trouble:
    tokens = single.layout.encoder_tokens
    return Trouble(
        Overloaded,
        f"does not fit into memory: {tokens} encoder tokens at once; retry later, send a smaller one, "
        "or lower max_pixels (longest_edge) of the model's processor, or in media_options",
    )
