"""The linear projections of a decoder, as adapters know them: their names, their sizes, the matrix each is part of."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triptych.models.decoder_config import DecoderConfig

NAMES = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
"""For messages."""


class Matrix(enum.Enum):
    """The four matrices of a layer."""

    QKV = enum.auto()
    OUTPUT = enum.auto()
    GATE_UP = enum.auto()
    DOWN = enum.auto()


class Projection(NamedTuple):
    """Some consecutive rows of a matrix: what checkpoints store as one tensor [outputs, inputs]."""

    name: str
    """Relative to the layer."""
    matrix: Matrix
    inputs: int
    outputs: int


class Module(NamedTuple):
    """One projection of one layer."""

    name: str
    """As in the checkpoint: ``model.layers.0.self_attn.q_proj``."""
    layer: int
    projection: Projection

    def endings(self) -> Iterator[str]:
        """The name, and all that follows each of its dots."""
        rest = self.name
        yield rest
        while "." in rest:
            _, _, rest = rest.partition(".")
            yield rest


def projections(config: DecoderConfig) -> tuple[Projection, ...]:
    """One layer's, in the order in which they lie in their matrices."""
    hidden, inner = config.hidden_size, config.intermediate_size
    attended, shared = config.heads * config.head_size, config.kv_heads * config.head_size
    return (
        Projection("self_attn.q_proj", Matrix.QKV, hidden, attended),
        Projection("self_attn.k_proj", Matrix.QKV, hidden, shared),
        Projection("self_attn.v_proj", Matrix.QKV, hidden, shared),
        Projection("self_attn.o_proj", Matrix.OUTPUT, attended, hidden),
        Projection("mlp.gate_proj", Matrix.GATE_UP, hidden, inner),
        Projection("mlp.up_proj", Matrix.GATE_UP, hidden, inner),
        Projection("mlp.down_proj", Matrix.DOWN, inner, hidden),
    )


def modules(config: DecoderConfig, prefix: str) -> tuple[Module, ...]:
    """Those of all layers, layer by layer; ``prefix`` begins the names of the decoder's tensors."""
    return tuple(
        Module(f"{prefix}layers.{layer}.{projection.name}", layer, projection)
        for layer in range(config.layers)
        for projection in projections(config)
    )
