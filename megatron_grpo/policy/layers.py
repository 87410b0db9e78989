"""What Megatron-Core's local spec lacks: attention over a packed, context-parallel stream, multi-latent attention over it (DeepSeek-V2,
section 2.1), and an RMSNorm for sequence parallelism.

With Transformer Engine present its own layers are used, with `FusedAttention` of this file in them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from megatron_grpo.parallel.autograd import all_gather, copy_to_ranks, sum_over_ranks
from megatron_grpo.policy.attention import attention
from megatron_grpo.policy.kernels import Norm, rotate
from megatron_grpo.policy.packed_batch import PackedBatch
from megatron_grpo.weights.shape import ModelShape


class PackedAttention(MegatronModule):
    """Softmax attention over the stream: causal inside each segment, and of its children on all of a parent (grouped-query).

    query [t, 1, heads, k]; key [t, 1, groups, k]; value [t, 1, groups, v], of this rank's tokens and heads -> [t, 1, heads * v].
    Under context parallelism keys and values are gathered; queries stay where they are. Queries and keys are rotated here, where the
    stream says by how much, and not by Megatron, whose sines and cosines are computed twice a layer.
    """

    def __init__(self, config, *, layer_number=1, softmax_scale=None, pg_collection, **unused):
        """softmax_scale: multiplies the scores (default: 1 / sqrt of the query's channels)."""
        super().__init__(config)
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale
        self.layer_number = layer_number
        self.window: int | None = None
        self.sinks: torch.Tensor | None = None
        self.rope = 0

    def read(self, shape: ModelShape) -> None:
        """Learns what its own layer of a model with grouped-query attention sees, and how it turns."""
        layer = self.layer_number - 1
        self.window, self.softmax_scale = shape.window(layer), shape.softmax_scale_of(layer)
        self.rope = int(shape.rope_of(layer) is not shape.rope)

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, *, packed_seq_params: PackedBatch):
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if rotations := packed_seq_params.rotations:
            q, k = (rotate(x, rotations[self.rope]) for x in (q, k))
        channels, scale = v.shape[-1], self.softmax_scale
        if channels != q.shape[-1]:  # latent attention; kernels take one size for all three
            scale, widest = scale or q.shape[-1] ** -0.5, max(channels, q.shape[-1])
            q, k, v = (F.pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x for x in (q, k, v))
        if self.cp_group.size() > 1:
            k, v = (all_gather(x, self.cp_group).flatten(0, 1) for x in (k, v))
        out = attention(q, k, v, packed_seq_params.within(self.window), scale, self.sinks)
        return out[..., :channels].flatten(1, 2).unsqueeze(1)


class FusedAttention(PackedAttention):
    """As PackedAttention, by Transformer Engine's kernels (FlashAttention's or cuDNN's, in thd layout) in half precision, where no segment
    has a parent.

    Megatron would rotate queries and keys of a thd stream segment by segment, and ask the device for their lengths in every layer. Here
    they are rotated at once, as on the local layers.
    """

    DTYPES = (torch.bfloat16, torch.float16)  # Transformer Engine has no kernel in this layout for others, nor for parents

    def __init__(self, config, *, layer_number=1, softmax_scale=None, pg_collection, **more):
        """more: Megatron's arguments for Transformer Engine's attention."""
        super().__init__(config, layer_number=layer_number, softmax_scale=softmax_scale, pg_collection=pg_collection)
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        self.fused = TEDotProductAttention(
            config=config, layer_number=layer_number, softmax_scale=softmax_scale, pg_collection=pg_collection, **more
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
    """With a score of each head beside those of the keys, whose value is 0 (gpt-oss)."""

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        heads = config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
        self.sinks = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device()))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return _cut_in_one_dimension(self, "sinks", prefix, sharded_offsets, metadata)


class WholeNorm(MegatronModule):
    """RMSNorm over all heads together, of which this rank has some (OLMo 2): the mean of the squares is over tensor parallelism."""

    def __init__(self, config, hidden_size, eps, *, heads: int):
        """hidden_size: channels of a head. heads: of all ranks."""
        super().__init__(config)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.channels, self.eps = heads * hidden_size, eps
        here = self.channels // self.tp_group.size()
        self.weight = torch.nn.Parameter(torch.ones(here, dtype=config.params_dtype, device=torch.cuda.current_device()))

    def forward(self, x):
        """x [t, 1, heads of this rank, channels]."""
        whole = x.flatten(-2).float()
        mean = sum_over_ranks(whole.square().sum(dim=-1, keepdim=True), self.tp_group) / self.channels
        return (whole * (mean + self.eps).rsqrt() * self.weight).to(x.dtype).view_as(x)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return _cut_in_one_dimension(self, "weight", prefix, sharded_offsets, metadata)


def _cut_in_one_dimension(module, name: str, prefix, offsets, metadata):
    """The module's one tensor, of which every tensor-parallel rank has a run, as a checkpoint describes it."""
    groups = dict(
        tp_group=parallel_state.get_tensor_model_parallel_group(), dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
    )
    tensors = module.state_dict(prefix="", keep_vars=True)
    return make_sharded_tensors_for_checkpoint(tensors, prefix, {name: 0}, offsets, **groups)


class AddNormed(MegatronModule):
    """In place of Megatron's sum of a layer's part and the residual: the part is normed first."""

    def __init__(self, config, norm: type):
        super().__init__(config)
        self.norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training, fused):
        """A function of ((part, bias or None), residual, dropout), as Megatron's is."""

        def add(part_with_bias, residual, dropout):
            part, bias = part_with_bias
            return residual + self.norm(part if bias is None else part + bias)

        return add


def with_bias(linear: type, bias: bool) -> type:
    """The same parallel linear layer, with a bias or without one whatever the configuration says."""

    class Linear(linear):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **(kwargs | {"bias": bias}))

    return Linear


def of_biased_experts(linear: type) -> type:
    """The second linear layer of experts with biases.

    Megatron's MLP adds the bias to what it gives, in place, which autograd allows in no view. And Megatron marks the bias as one whose
    gradient tensor-parallel ranks share under sequence parallelism: these have other experts, or other tokens for the same ones, and the
    gradients of experts are summed elsewhere.
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
    """The same stream in the words of Transformer Engine's attention, which knows no parents. Under context parallelism too: it cuts each
    segment into the chunks that `parallel.layout` says."""
    cu = packed.cu_seqlens
    longest = packed.max_seqlen
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest)


# Megatron-Core 0.16 believes that it has Transformer Engine wherever its own wrapper of it can be imported, which is everywhere, and then
# asks whether a layer is an instance of None. This holds on a GPU without Transformer Engine too.
multi_latent_attention.HAVE_TE = HAVE_TE


class PackedMLAttention(multi_latent_attention.MLASelfAttention):
    """Megatron's module with a forward of its own: parameters, sharding and checkpoints stay Megatron's. Local spec only.

    Megatron's forward counts positions from the start of the tensor, where ours are given as angles, token by token. And it leaves the
    gradient of the rotated key, which all heads share, at the share of this tensor-parallel rank's heads.

    rope_scale: multiplies cos and sin. interleaved: the checkpoint has the two channels of a rotation side by side.
    """

    def __init__(self, *args, rope_scale: float, interleaved: bool, **kwargs):
        super().__init__(*args, **kwargs)
        self.rope_scale, self.interleaved = rope_scale, interleaved

    def _resolve_qk_norm_config(self, submodules):
        """The layers that the specification names. Megatron-Core 0.19, which asks here, has no norm of keys alone on the local spec."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def forward(self, hidden_states, attention_mask, *, rotary_pos_emb, packed_seq_params, **unused):
        """hidden_states [t or t/tp, 1, H], rotary_pos_emb (angles) [t, 1, 1, rotated channels] -> ([t or t/tp, 1, H], None)."""
        query, key, value = self._project(hidden_states, rotary_pos_emb)
        if self.checkpoint_core_attention and self.training:
            out = self._checkpointed_attention_forward(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        else:
            out = self.core_attention(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        return self.linear_proj(out)

    def _project(self, hidden, angles):
        """-> query, key [t, 1, heads, qk_head_dim + rotated], value [t, 1, heads, v_head_dim], of this rank's heads."""
        c, heads = self.config, self.num_attention_heads_per_partition
        if c.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self._cut_sequence(self._down(self.linear_q_down_proj, hidden))))
        latent, shared_key = self._down(self.linear_kv_down_proj, hidden).split([c.kv_lora_rank, c.qk_pos_emb_head_dim], dim=-1)
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(self._cut_sequence(latent)))
        key, value = key_value.unflatten(-1, (heads, -1)).split([c.qk_head_dim, c.v_head_dim], dim=-1)
        query, turning_query = query.unflatten(-1, (heads, -1)).split([c.qk_head_dim, c.qk_pos_emb_head_dim], dim=-1)
        # Each rank's heads use the shared key, so its gradient is the sum over ranks.
        shared_key = copy_to_ranks(shared_key, self.tp_group).unsqueeze(2)
        turned_key = self._turn(shared_key, angles).expand(-1, -1, heads, -1)
        return torch.cat([query, self._turn(turning_query, angles)], dim=-1), torch.cat([key, turned_key], dim=-1), value

    def _down(self, linear, hidden):
        """The whole stream, in all compressed channels: each rank computes some of them."""
        out, _ = linear(hidden)
        return gather_from_tensor_model_parallel_region(out, group=self.tp_group)

    def _cut_sequence(self, x):
        """Under sequence parallelism norms work on a rank's own tokens; the linear layer after them gathers all again."""
        return scatter_to_sequence_parallel_region(x, group=self.tp_group) if self.config.sequence_parallel else x

    def _turn(self, x, angles):
        """x [t, 1, heads, channels], rotated."""
        cos, sin = ((f(angles) * self.rope_scale).to(x.dtype) for f in (torch.cos, torch.sin))
        if self.interleaved:
            x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin


class LatentNorm(Norm):
    """The norm of a compressed stream. Its epsilon is 1e-6 whatever the model's: DeepSeek's own code, and so transformers', has it so."""

    def __init__(self, config, hidden_size, **unused):
        super().__init__(config, hidden_size, eps=1e-6)
