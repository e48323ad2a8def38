"""A text decoder's numbers, read from config.json; what this decoder cannot compute is refused by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.models.rotary import RotaryConfig

if TYPE_CHECKING:
    from triptych.core.checkpoint import Section

MAX_LAYERS = 1024
"""Far above any decoder; a damaged number must not build layers for hours."""


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """What a family fixes, and its configuration file does not say."""

    prefix: str
    """Of the decoder's tensor names."""
    qk_norm: bool
    """RMS norm over each query and key head."""
    qkv_bias: bool | None = None
    """None: as ``attention_bias`` says, which then holds for the output projection too."""
    head_size: int | None = None
    """Default of ``head_dim``; None: hidden size over heads."""
    rope_theta: float = 10_000.0
    """Default of ``rope_theta``."""
    mrope_section: tuple[int, ...] | None = None
    """Default of ``mrope_section``; None: one position axis."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The decoder's shape."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    norm_eps: float
    max_context: int
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    tied: bool
    """The output head is the token embedding."""
    rotary: RotaryConfig

    @classmethod
    def read(cls, text: Section, family: DecoderFamily, *, tied: bool) -> DecoderConfig:
        """Read the text part of config.json.

        Raises:
            CheckpointError: naming a key that is missing, wrong, or asks for what is not implemented.
        """
        _refuse_unsupported(text)
        hidden, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
        kv_heads = text.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise text.error("num_attention_heads", f"is {heads}, not a multiple of num_key_value_heads {kv_heads}")
        head_size = text.integer("head_dim", family.head_size or max(hidden // heads, 1))
        if head_size % 2:
            raise text.error("head_dim", f"must be even, not {head_size}")
        bias = text.flag("attention_bias", False)
        return cls(
            vocab_size=text.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=text.integer("intermediate_size"),
            layers=_layers(text),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            norm_eps=text.number("rms_norm_eps", 1e-6),
            max_context=text.integer("max_position_embeddings"),
            qk_norm=family.qk_norm,
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=bias if family.qkv_bias is None else False,
            tied=tied,
            rotary=RotaryConfig.read(text, head_size, family.rope_theta, family.mrope_section),
        )


def _layers(text: Section) -> int:
    layers = text.integer("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise text.error("num_hidden_layers", f"is {layers}; at most {MAX_LAYERS}")
    return layers


def _refuse_unsupported(text: Section) -> None:
    """Everything that would change the result and is not computed here."""
    if (act := text.text("hidden_act", "silu")) != "silu":
        raise text.error("hidden_act", f"is {act!r}; only 'silu' is supported")
    if text.flag("use_sliding_window", False):
        raise text.error("use_sliding_window", "is true; sliding-window attention is not supported")
    other = [kind for kind in text.texts("layer_types", ()) if kind != "full_attention"]
    if other:
        raise text.error("layer_types", f"has {other[0]!r}; only 'full_attention' is supported")
    if text.flag("mlp_bias", False):
        raise text.error("mlp_bias", "is true; it is not supported")
    for key in ("num_experts", "num_local_experts"):
        if text.has(key):
            raise text.error(key, "is set; mixtures of experts are not supported")
