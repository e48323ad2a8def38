"""LoRA adapters: low-rank updates of the decoder's projections, for some of a batch's tokens.

    base        out[n]  = W x[n]
    adapted     out[n] += B (A x[n])        A [rank, inputs], B [outputs, rank], the scaling folded into B

Projections that read the same input are one matrix of the layer, and so their As are one matrix here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import linear

from triptych.models.projections import Matrix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triptych.core.adapter import AdapterInfo
    from triptych.models.contract import PackedBatch
    from triptych.models.layer import Layer


class Update(NamedTuple):
    """What an adapter adds to one matrix of one layer."""

    down: torch.Tensor
    """[sum of ranks, inputs]: the As of the matrix's projections, one below the other."""
    ranks: list[int]
    """One for each projection of the matrix; 0 where it is not adapted."""
    ups: list[torch.Tensor]
    """[outputs, rank] each: the Bs."""

    def add(self, out: torch.Tensor, inputs: torch.Tensor, rows: torch.Tensor) -> None:
        """Add it to some rows.

        Args:
            out: [N, outputs of all projections], changed in place.
            inputs: [N, inputs].
            rows: [K] different indices below N.
        """
        low = linear(inputs.index_select(0, rows), self.down).split(self.ranks, dim=1)
        added = [linear(part, up) for part, up in zip(low, self.ups, strict=True)]
        out.index_add_(0, rows, added[0] if len(added) == 1 else torch.cat(added, dim=1))


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """A :class:`~triptych.core.adapter.Adapter` of one decoder, in its type and on its device."""

    info: AdapterInfo
    digest: bytes
    layers: tuple[Mapping[Matrix, Update], ...]
    """For each layer the matrices that it changes."""


class _Part(NamedTuple):
    """One adapter's share in one layer of one step."""

    updates: Mapping[Matrix, Update]
    rows: torch.Tensor
    """[K] indices of the rows that use it."""


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A :class:`~triptych.models.layer.Layer` with the adapters of one step."""

    base: Layer
    parts: Sequence[_Part]
    later_parts: Sequence[_Part]
    """Those after attention, where fewer rows may be left."""

    @property
    def attention_norm(self) -> torch.Tensor:
        """As in the base."""
        return self.base.attention_norm

    @property
    def qk_norm(self) -> torch.Tensor | None:
        """As in the base."""
        return self.base.qk_norm

    @property
    def mlp_norm(self) -> torch.Tensor:
        """As in the base."""
        return self.base.mlp_norm

    def query_key_value(self, normed: torch.Tensor) -> torch.Tensor:
        """The base's, and the updates."""
        return _added(self.parts, Matrix.QKV, self.base.query_key_value(normed), normed)

    def add_attended(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The base's, and the updates."""
        return _added(self.later_parts, Matrix.OUTPUT, self.base.add_attended(hidden, attended), attended)

    def gates_and_ups(self, normed: torch.Tensor) -> torch.Tensor:
        """The base's, and the updates."""
        return _added(self.later_parts, Matrix.GATE_UP, self.base.gates_and_ups(normed), normed)

    def add_gated(self, hidden: torch.Tensor, gated: torch.Tensor) -> torch.Tensor:
        """The base's, and the updates."""
        return _added(self.later_parts, Matrix.DOWN, self.base.add_gated(hidden, gated), gated)


def _added(parts: Sequence[_Part], matrix: Matrix, out: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    for part in parts:
        update = part.updates.get(matrix)
        if update is not None:
            update.add(out, inputs, part.rows)
    return out


def adapted(layers: Sequence[Layer], batch: PackedBatch, narrowing: int) -> list[AdaptedLayer]:
    """A decoder's layers with the adapters of a batch.

    Args:
        layers: The decoder's.
        batch: Its adapters were loaded for this decoder.
        narrowing: The layer after whose attention only the rows ``sample_at`` go on; none has the number of layers.
    """
    adapters, at, wanted = [], [], []
    for use in batch.adapters:
        assert isinstance(use.adapter, LoraAdapter)
        adapters.append(use.adapter)
        at.append(use.at)
        wanted.append(torch.isin(batch.sample_at, use.at).nonzero().flatten())
    out = []
    for index, layer in enumerate(layers):
        updates = [adapter.layers[index] for adapter in adapters]
        parts = list(map(_Part, updates, at))
        out.append(AdaptedLayer(layer, parts, list(map(_Part, updates, wanted)) if index == narrowing else parts))
    return out
