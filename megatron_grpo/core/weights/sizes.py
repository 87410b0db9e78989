"""Optional parts of a model's shape: rope scaling, experts, multi-latent attention, linear attention, vision. Plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

RopeType = Literal["default", "linear", "llama3", "yarn"]
Activation = Literal["silu", "gelu_tanh", "clamped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeShape:
    """Rotary position embedding. `rope.rope_inverse_frequencies` computes its frequencies.

    Args:
        dim: Rotated channels of a head.
        original_max_position_embeddings: Context length before scaling, in tokens.
        low_freq_factor: Llama 3's low_freq_factor.
        high_freq_factor: Llama 3's high_freq_factor.
        beta_fast: YaRN's beta_fast.
        beta_slow: YaRN's beta_slow.
        truncate: Whether YaRN's ramp begins and ends at whole channels.
        attention_scaling: Factor on cos and sin.
        interleaved: Whether the axes alternate, instead of one block each.
    """

    type: RopeType
    dim: int
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scaling: float = 1.0
    # Positions with three axes (frame, row, column): how many of the dim / 2 frequencies each axis has; () for plain positions.
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    @property
    def axes(self) -> tuple[int, ...]:
        """Axis of each of the dim / 2 frequencies; () for plain positions."""
        if not self.sections:
            return ()
        if not self.interleaved:
            return tuple(axis for axis, count in enumerate(self.sections) for _ in range(count))
        return tuple(i % 3 if i < 3 * self.sections[i % 3] else 0 for i in range(self.dim // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """Shape of the MoE layers. `layers[i]` is True if layer i has experts.

    Args:
        topk: Number of experts per token.
        ffn_hidden_size: Hidden channels of one expert.
        norm_topk_prob: Whether the chosen experts' weights sum to 1 (before scaling_factor).
        shared_ffn_hidden_size: Width of the shared experts, which process every token.
        has_shared_gate: Whether a sigmoid of the token multiplies the shared experts' output.
        has_biases: Whether the router and every expert have biases.
        has_expert_bias: Whether there is a bias on the selection of experts, not on their weights.
        num_groups: Number of groups; experts are selected within the best `group_topk` of them.
    """

    layers: tuple[bool, ...]
    num_experts: int
    topk: int
    ffn_hidden_size: int
    norm_topk_prob: bool = True
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    scaling_factor: float = 1.0
    shared_ffn_hidden_size: int | None = None
    has_shared_gate: bool = False
    has_biases: bool = False
    has_expert_bias: bool = False
    num_groups: int | None = None
    group_topk: int | None = None

    @property
    def is_group_limited(self) -> bool:
        """Return whether routing excludes groups. Selecting all groups changes nothing."""
        return self.num_groups is not None and (self.group_topk or self.num_groups) < self.num_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaShape:
    """Multi-latent attention (DeepSeek-V2, section 2.1). Sizes are channels of one head; ranks are of the compressed streams.

    Args:
        qk_head_dim: Channels of query and key without position.
        qk_pos_emb_head_dim: Channels of the rotated part.
        softmax_scale: Factor on attention scores, with YaRN's mscale.
        interleaved: Whether the two channels of a rotation are adjacent.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    softmax_scale: float
    interleaved: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetShape:
    """Linear attention with the gated delta rule (arXiv:2412.06464). `layers[i]` is True if layer i has it instead of attention.

    Args:
        num_key_heads: Number of key heads; each belongs to a group with num_value_heads / num_key_heads value heads.
        conv_kernel_dim: Number of tokens that the convolution reads, the token itself included.
        is_grouped: Whether files store query, key, value and gate in one tensor, group by group; otherwise section by section.
    """

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    is_grouped: bool

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of query, key, value, output gate (z), write strength (b) and decay (a), over all heads."""
        keys, values = self.num_key_heads * self.key_head_dim, self.num_value_heads * self.value_head_dim
        return keys, keys, values, values, self.num_value_heads, self.num_value_heads


CHUNK = 64  # tokens of a segment that a layer with the gated delta rule computes at once


class LayerKind(NamedTuple):
    """Parts by which layers of one model differ: their tensors are the same if these are."""

    moe: bool
    delta_net: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """Vision tower of a vision-language model. Maps image patches to tokens as wide as the text model's. Widths are in channels.

    Args:
        depth: Number of layers.
        patch: Size of one patch: colours, frames, rows and columns.
        merge: Patches per side of a token: merge x merge patches are one token.
        image_token: Placeholder token ID of an image's tokens.
        num_positions: Number of learned position embeddings.
        num_deepstack: Number of the first text layers that each receive features of a tower layer.
    """

    depth: int
    width: int
    ffn_hidden_size: int
    patch: tuple[int, int, int, int]
    merge: int
    image_token: int
    num_positions: int = 0
    num_deepstack: int = 0


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Return the factor on attention when a context is stretched `factor` times (YaRN, arXiv:2309.00071, equation 22).

    Args:
        weight: Weight of the logarithm (`mscale`).
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
