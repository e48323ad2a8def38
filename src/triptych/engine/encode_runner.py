"""Obeys a plan of an encoder engine: drops rows, withdraws, encodes, and hands rows to other engines.

What goes wrong with one item fails that item, and those that would have had its rows in the same step. Only a lost
device is passed on.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from triptych.core.errors import Internal, TriptychError
from triptych.engine.encode_step import EncodeResult
from triptych.engine.encoder import Encoder, Trouble
from triptych.engine.row_arena import write_rows
from triptych.engine.transfers import hand_on
from triptych.models.contract import is_lost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triptych.core.encoder_input import EncoderInput
    from triptych.core.handles import RowHandle
    from triptych.core.request import EncodeRequest
    from triptych.engine.encode_step import EncodePlan, ItemStep
    from triptych.models.contract import TowerModel
    from triptych.transport.contract import BlockMemory, Publisher

logger = logging.getLogger(__name__)


class EncodeRunner:
    """Owns the cached rows. Belongs to the engine thread.

    Args:
        model: what encodes.
        memory: what other engines read.
        publisher: the transport that reads it for them.
    """

    def __init__(self, model: TowerModel, memory: BlockMemory, publisher: Publisher) -> None:
        self._encoder = Encoder(model.tower, model.spec)
        self._memory = memory
        self._publisher = publisher
        self._rows: dict[bytes, torch.Tensor] = {}
        """By content key, each [rows, row width] in the decoder's dtype."""

    def check(self, request: EncodeRequest) -> None:
        """Refuse an item whose input is another's. Reads only constants: safe from any thread.

        Raises:
            Internal: it is.
        """
        if request.input is not None and request.input.layout.content_key != request.layout.content_key:
            raise Internal("the input of a media item is that of another one")

    def statistics(self) -> dict[str, dict[str, float]]:
        """What the transport counts and holds, by ledger name; from any thread, without waiting."""
        return {"row_transport": self._publisher.statistics()}

    @torch.inference_mode()
    def run(self, plan: EncodePlan) -> EncodeResult:
        """One step. Nothing of an item in ``failures`` was handed on.

        Raises:
            AcceleratorError: the device is lost.
        """
        for key in plan.evictions:
            del self._rows[key]
        for session_id in plan.withdrawals:
            self._publisher.withdraw(session_id)
        begin = time.perf_counter()
        fresh = [each.request for each in plan.items if each.encodes]
        troubles = self._encode(fresh) if fresh else {}
        seconds = time.perf_counter() - begin if fresh else 0.0
        failures: dict[str, TriptychError] = {}
        stored = {}
        for each in plan.items:
            handle = self._store(each, troubles)
            if isinstance(handle, TriptychError):
                failures[each.request.request_id] = handle
            else:
                stored[each.request.export] = handle
        encoded = tuple(request.layout.content_key for request in fresh if request.layout.content_key not in troubles)
        return EncodeResult(encoded, failures, stored, seconds)

    def _encode(self, requests: Sequence[EncodeRequest]) -> Mapping[bytes, Trouble]:
        """Keep the rows of items of different keys; what went wrong, by key."""
        troubles = {}
        inputs = [_input(request) for request in requests]
        for request, rows in zip(requests, self._encoder.encode(inputs), strict=True):
            if isinstance(rows, Trouble):
                logger.error("request %s: its media item %s", request.request_id, rows.reason)
                troubles[request.layout.content_key] = rows
            else:
                self._rows[request.layout.content_key] = rows
        return troubles

    def _store(self, each: ItemStep, troubles: Mapping[bytes, Trouble]) -> RowHandle | TriptychError:
        """Where an item's rows are, or why they are nowhere."""
        key = each.request.layout.content_key
        rows = self._rows.get(key)
        if rows is None:
            trouble = troubles.get(key) or Trouble(Internal, "has no rows")
            return trouble.kind(trouble.reason)
        try:
            write_rows(self._memory, each.store.blocks, rows)
            return hand_on(self._publisher, each.store) or Internal("its rows were not sealed")
        except TriptychError as error:
            return error
        except Exception as error:
            if is_lost(error):
                raise
            logger.exception("request %s: its rows could not be stored for another engine", each.request.request_id)
            return Internal("its rows could not be stored for another engine")


def _input(request: EncodeRequest) -> EncoderInput:
    if request.input is None:
        raise Internal(f"request {request.request_id!r} was to be encoded and has no input")
    return request.input
