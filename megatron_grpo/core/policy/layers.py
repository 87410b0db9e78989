"""Layers that Megatron-Core's local spec lacks.

These are attention over a packed, context-parallel stream; multi-latent attention over it (DeepSeek-V2, arXiv:2405.04434, section 2.1); and
an RMSNorm over all heads. With Transformer Engine its layers are used, with `FusedAttention` of this module as their attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from megatron_grpo.core.parallel.autograd import all_gather, copy_to_ranks, sum_over_ranks
from megatron_grpo.core.policy.attention import attention
from megatron_grpo.core.policy.kernels import Norm, rotate
from megatron_grpo.core.policy.packed_batch import PackedBatch
from megatron_grpo.core.weights.shape import ModelShape


class PackedAttention(MegatronModule):
    """Softmax attention (grouped-query) over the packed stream: causal inside each segment, and full from children to their parent.

    query [t, 1, heads, k], key [t, 1, groups, k], value [t, 1, groups, v] of this rank's tokens and heads -> [t, 1, heads * v].

    Under context parallelism keys and values are gathered; queries stay on their rank. Queries and keys are rotated here if the stream has
    rotations, and not by Megatron, which computes sines and cosines twice a layer.

    Args:
        softmax_scale: Multiplies the scores; None for 1 / sqrt of the query's channels.
    """

    def __init__(self, config, *, layer_number=1, softmax_scale=None, pg_collection, **unused):
        super().__init__(config)
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale
        self.layer_number = layer_number
        self.window: int | None = None
        self.sinks: torch.Tensor | None = None
        self.rope = 0

    def read(self, shape: ModelShape) -> None:
        """Set the layer's window, softmax scale and rope, for a model with grouped-query attention."""
        layer = self.layer_number - 1
        self.window, self.softmax_scale = shape.window(layer), shape.find_softmax_scale(layer)
        self.rope = int(shape.find_rope(layer) is not shape.rope)

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, *, packed_seq_params: PackedBatch):
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if rotations := packed_seq_params.rotations:
            q, k = (rotate(x, rotations[self.rope]) for x in (q, k))
        channels, scale = v.shape[-1], self.softmax_scale
        if channels != q.shape[-1]:  # latent attention; kernels need one size for all three
            scale, widest = scale or q.shape[-1] ** -0.5, max(channels, q.shape[-1])
            q, k, v = (F.pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x for x in (q, k, v))
        if self.cp_group.size() > 1:
            k, v = (all_gather(x, self.cp_group).flatten(0, 1) for x in (k, v))
        out = attention(q, k, v, packed_seq_params.within(self.window), scale, self.sinks)
        return out[..., :channels].flatten(1, 2).unsqueeze(1)


class FusedAttention(PackedAttention):
    """`PackedAttention` with Transformer Engine's kernels (FlashAttention's or cuDNN's, in thd layout).

    They are used in half precision and if no segment has a parent; otherwise it computes as `PackedAttention`.

    Megatron would rotate queries and keys of a thd stream segment by segment and ask the device for the segments' lengths in every layer.
    Here they are rotated at once, as on the local layers.

    Args:
        softmax_scale: Multiplies the scores; None for 1 / sqrt of the query's channels.
    """

    DTYPES = (torch.bfloat16, torch.float16)  # in this layout Transformer Engine has kernels for these dtypes only, and none for parents

    def __init__(self, config, *, layer_number=1, softmax_scale=None, pg_collection, **kwargs):
        super().__init__(config, layer_number=layer_number, softmax_scale=softmax_scale, pg_collection=pg_collection)
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        self.fused = TEDotProductAttention(
            config=config, layer_number=layer_number, softmax_scale=softmax_scale, pg_collection=pg_collection, **kwargs
        )

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, *, packed_seq_params: PackedBatch):
        if packed_seq_params.has_parents or query.dtype not in self.DTYPES:
            return super().forward(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if rotations := packed_seq_params.rotations:
            q, k = (rotate(x, rotations[self.rope]) for x in (q, k))
        out = self.fused(q, k, v, None, attn_mask_type=attn_mask_type, packed_seq_params=te_packed(packed_seq_params))
        return out.reshape(len(q), 1, -1)


class SinkAttention(PackedAttention):
    """`PackedAttention` with a sink: each head has one more score beside those of the keys, whose value is 0 (gpt-oss).

    Args:
        kwargs: Further arguments of `PackedAttention`.
    """

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        heads = config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
        self.sinks = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device()))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return _cut_in_one_dimension(self, "sinks", prefix, sharded_offsets, metadata)


class GatedAttention(SelfAttention):
    """Megatron's attention with an output gate, also with more tensor-parallel ranks than key heads.

    Megatron-Core 0.16 then takes this rank's queries out of their group, but leaves all gates of the group.
    """

    def get_query_key_value_tensors(self, *args, **kwargs):
        query, key, value, gate = super().get_query_key_value_tensors(*args, **kwargs)
        parts = gate.shape[2] // query.shape[2]
        return query, key, value, gate.chunk(parts, dim=2)[parallel_state.get_tensor_model_parallel_rank() % parts]


class FullWidthNorm(MegatronModule):
    """RMSNorm over the channels of all heads together (OLMo 2), of which this rank has a part.

    The mean of squares is taken over tensor parallelism.

    Args:
        heads: Heads of all ranks.
    """

    def __init__(self, config, hidden_size, eps, *, heads: int):
        super().__init__(config)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.channels, self.eps = heads * hidden_size, eps
        local_channels = self.channels // self.tp_group.size()
        self.weight = torch.nn.Parameter(torch.ones(local_channels, dtype=config.params_dtype, device=torch.cuda.current_device()))

    def forward(self, x):
        """Normalise x [t, 1, heads of this rank, channels].

        Args:
            x: [t, 1, heads of this rank, channels].
        """
        flat = x.flatten(-2).float()
        mean = sum_over_ranks(flat.square().sum(dim=-1, keepdim=True), self.tp_group) / self.channels
        return (flat * (mean + self.eps).rsqrt() * self.weight).to(x.dtype).view_as(x)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return _cut_in_one_dimension(self, "weight", prefix, sharded_offsets, metadata)


def _cut_in_one_dimension(module, name: str, prefix, offsets, metadata):
    """Describe the module's only tensor, which tensor parallelism cuts in dimension 0, for a checkpoint."""
    groups = dict(
        tp_group=parallel_state.get_tensor_model_parallel_group(), dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
    )
    tensors = module.state_dict(prefix="", keep_vars=True)
    return make_sharded_tensors_for_checkpoint(tensors, prefix, {name: 0}, offsets, **groups)


class PostNormResidual(MegatronModule):
    """Replacement for Megatron's addition of a sublayer's output to the residual, which normalises the output first."""

    def __init__(self, config, norm: type):
        super().__init__(config)
        self.norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training, fused):
        """Return a function of ((output, bias or None), residual, dropout), as Megatron's does.

        Args:
            training: Not used; Megatron's interface has it.
            fused: Not used; Megatron's interface has it.
        """

        def add(part_with_bias, residual, dropout):
            part, bias = part_with_bias
            return residual + self.norm(part if bias is None else part + bias)

        return add


def with_bias(linear: type, bias: bool) -> type:
    """Return the parallel linear layer class with or without a bias, whatever the configuration says.

    Args:
        bias: Whether it has a bias.
    """

    class Linear(linear):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **(kwargs | {"bias": bias}))

    return Linear


def make_biased_experts(linear: type) -> type:
    """Return the class for the second linear layer of experts with biases.

    Megatron's MLP adds the bias to the layer's output in place, which autograd allows for no view, so the output is cloned. And Megatron
    marks the bias as one whose gradient tensor-parallel ranks share under sequence parallelism. The ranks have different experts, or
    different tokens for the same experts, and gradients of experts are summed elsewhere, so the attribute is reset.

    Args:
        linear: The class of the layer without these changes.
    """

    class Linear(linear):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.bias.sequence_parallel = False

        def forward(self, *args, **kwargs):
            out, bias = super().forward(*args, **kwargs)
            return out.clone(), bias

    return Linear


def te_packed(packed: PackedBatch) -> PackedSeqParams:
    """Return the stream as Transformer Engine's attention takes it, which does not support parents.

    Under context parallelism too: Transformer Engine cuts each segment into the chunks that `parallel.layout` defines.
    """
    cu = packed.cu_seqlens
    longest = packed.max_seqlen
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest)


# Megatron-Core 0.16 assumes Transformer Engine wherever its own wrapper can be imported, which is everywhere, and then checks whether a
# layer is an instance of None. This is so on a GPU without Transformer Engine too.
multi_latent_attention.HAVE_TE = HAVE_TE


class PackedMLAttention(multi_latent_attention.MLASelfAttention):
    """Megatron's multi-latent attention with another forward: parameters, sharding and checkpoints stay Megatron's. Local spec only.

    Megatron's forward counts positions from the start of the tensor; here each token has its angles. And Megatron's forward leaves the
    gradient of the rotated key, which all heads share, at the part of this tensor-parallel rank's heads.

    Args:
        interleaved: The checkpoint has the two channels of a rotation next to each other.
    """

    def __init__(self, *args, rope_scale: float, interleaved: bool, **kwargs):
        super().__init__(*args, **kwargs)
        self.rope_scale, self.interleaved = rope_scale, interleaved

    def _resolve_qk_norm_config(self, submodules):
        """Return the layers that the specification names.

        Megatron-Core 0.19 calls this; its own version has no norm of keys alone on the local spec.
        """
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def forward(self, hidden_states, attention_mask, *, rotary_pos_emb, packed_seq_params, **unused):
        """Compute attention.

        Args:
            hidden_states: [t, 1, H], or [t/tp, 1, H] under sequence parallelism.
            attention_mask: Not used by the attention here.
            rotary_pos_emb: Angles in radians, [t, 1, 1, rotated channels].

        Returns:
            The output in the shape of `hidden_states`, and None.
        """
        query, key, value = self._project(hidden_states, rotary_pos_emb)
        if self.checkpoint_core_attention and self.training:
            out = self._checkpointed_attention_forward(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        else:
            out = self.core_attention(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        return self.linear_proj(out)

    def _project(self, hidden, angles):
        """Return query and key [t, 1, heads, qk_head_dim + rotated] and value [t, 1, heads, v_head_dim] of this rank's heads."""
        c, heads = self.config, self.num_attention_heads_per_partition
        if c.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self._cut_sequence(self._down(self.linear_q_down_proj, hidden))))
        latent, shared_key = self._down(self.linear_kv_down_proj, hidden).split([c.kv_lora_rank, c.qk_pos_emb_head_dim], dim=-1)
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(self._cut_sequence(latent)))
        key, value = key_value.unflatten(-1, (heads, -1)).split([c.qk_head_dim, c.v_head_dim], dim=-1)
        query, turning_query = query.unflatten(-1, (heads, -1)).split([c.qk_head_dim, c.qk_pos_emb_head_dim], dim=-1)
        # The heads of all ranks use the shared key, so its gradient is the sum over ranks.
        shared_key = copy_to_ranks(shared_key, self.tp_group).unsqueeze(2)
        turned_key = self._turn(shared_key, angles).expand(-1, -1, heads, -1)
        return torch.cat([query, self._turn(turning_query, angles)], dim=-1), torch.cat([key, turned_key], dim=-1), value

    def _down(self, linear, hidden):
        """Return the compressed channels of the whole stream, of which each rank computes a part."""
        out, _ = linear(hidden)
        return gather_from_tensor_model_parallel_region(out, group=self.tp_group)

    def _cut_sequence(self, x):
        """Return this rank's tokens under sequence parallelism: norms work on these; the next linear layer gathers all tokens again."""
        return scatter_to_sequence_parallel_region(x, group=self.tp_group) if self.config.sequence_parallel else x

    def _turn(self, x, angles):
        """Rotate x [t, 1, heads, channels]."""
        cos, sin = ((f(angles) * self.rope_scale).to(x.dtype) for f in (torch.cos, torch.sin))
        if self.interleaved:
            x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin


class LatentNorm(Norm):
    """RMSNorm of a compressed stream. Its epsilon is always 1e-6, as in DeepSeek's code and in transformers."""

    def __init__(self, config, hidden_size, **unused):
        super().__init__(config, hidden_size, eps=1e-6)
