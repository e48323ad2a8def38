"""A dense training forward over the parameters of `Qwen3VLForConditionalGeneration`.

All pictures of a batch share one grid, so the tower runs on [pictures, patches, width] without the
loop over pictures that transformers has, and the conversations on [rows, length, width] with one
mask. `check.py` holds it to the original
before every run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

if TYPE_CHECKING:
    from transformers import Qwen3VLForConditionalGeneration


class Seen(NamedTuple):
    """What the tower makes of the pictures."""

    rows: Tensor
    """[pictures, tokens, width], put in the place of the picture's tokens."""
    deep: list[Tensor]
    """One such tensor per deepstack level, added after the first text layers."""


class GridTables(NamedTuple):
    """What depends on the grid alone, in the order in which patches merge."""

    taps: Tensor
    weights: Tensor
    cos: Tensor
    sin: Tensor


@lru_cache(maxsize=16)
def grid_tables(model: Qwen3VLForConditionalGeneration, grid: tuple[int, int]) -> GridTables:
    """Position taps [patches, 4] with weights, and the tower's rotary angles [patches, head width]."""
    tower = model.model.visual
    thw = torch.tensor([[1, *grid]])
    taps, weights = get_vision_interpolation_indices_and_weights(
        thw,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.spatial_merge_size,
    )
    cos, sin = tower.rotary_pos_emb(weights, get_vision_position_ids(thw, tower.spatial_merge_size))
    return GridTables(taps, weights[..., None], cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding over the last dimension, halves paired."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention written out: at these lengths plain products beat the CPU's flash kernel backwards."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e4)
    return scores.softmax(-1) @ value


def merge(merger: nn.Module, x: Tensor) -> Tensor:
    """Four neighbouring patches [n, patches, width] become one token [n, patches / 4, width]."""
    n, patches, width = x.shape
    if merger.use_postshuffle_norm:
        x = merger.norm(x.reshape(n, patches // 4, width * 4))
    else:
        x = merger.norm(x).reshape(n, patches // 4, width * 4)
    return merger.linear_fc2(functional.gelu(merger.linear_fc1(x)))


def see(model: Qwen3VLForConditionalGeneration, patches: Tensor, tables: GridTables) -> Seen:
    """The tower over [pictures, patches, 3 * 16 * 16] in -1 .. 1; both frames of a still are equal."""
    tower = model.model.visual
    kernel = tower.patch_embed.proj.weight.sum(2).flatten(1)
    position = (tower.pos_embed(tables.taps) * tables.weights).sum(1)
    x = functional.linear(patches, kernel, tower.patch_embed.proj.bias) + position
    n, length, width = x.shape
    deep = []
    for depth, block in enumerate(tower.blocks):
        heads = block.attn.num_heads
        qkv = block.attn.qkv(block.norm1(x)).view(n, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        query, key = rotate(qkv[:2], tables.cos, tables.sin).unbind(0)
        mixed = attend(query, key, qkv[2])
        x = x + block.attn.proj(mixed.transpose(1, 2).reshape(n, length, width))
        x = x + block.mlp(block.norm2(x))
        if depth in tower.deepstack_visual_indexes:
            deep.append(merge(tower.deepstack_merger_list[len(deep)], x))
    return Seen(merge(tower.merger, x), deep)


def norm(module: nn.Module, x: Tensor) -> Tensor:
    """Root-mean-square norm."""
    return functional.rms_norm(x.float(), x.shape[-1:], module.weight, module.variance_epsilon)


def text_angles(model: Qwen3VLForConditionalGeneration, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Interleaved multimodal rotary angles [rows, 1, length, head width] of positions [3, rows, length]."""
    cos, sin = model.model.language_model.rotary_emb(model.model.language_model.norm.weight, positions)
    return cos[:, None], sin[:, None]


def read(
    model: Qwen3VLForConditionalGeneration,
    ids: Tensor,
    seen: Seen,
    slots: Tensor,
    mask: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Hidden states [rows, length, width] of conversations.

    `slots` are the flat positions (row * length + column) of all pictures' tokens in order;
    `mask` [rows, 1, length, length] is true where a query may look.
    """
    text = model.model.language_model
    x = text.embed_tokens(ids)
    rows, length, width = x.shape
    x = x.view(-1, width).index_copy(0, slots, seen.rows.reshape(-1, width)).view(rows, length, width)
    for depth, layer in enumerate(text.layers):
        attention, head = layer.self_attn, layer.self_attn.head_dim
        h = norm(layer.input_layernorm, x)
        query = norm(attention.q_norm, attention.q_proj(h).view(rows, length, -1, head)).transpose(1, 2)
        key = norm(attention.k_norm, attention.k_proj(h).view(rows, length, -1, head)).transpose(1, 2)
        value = attention.v_proj(h).view(rows, length, -1, head).transpose(1, 2)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        groups = attention.num_key_value_groups
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = attend(query, key, value, mask)
        x = x + attention.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        x = x + layer.mlp(norm(layer.post_attention_layernorm, x))
        if depth < len(seen.deep):
            x = x.view(-1, width).index_add(0, slots, seen.deep[depth].reshape(-1, width)).view(rows, length, width)
    return norm(text.norm, x)
