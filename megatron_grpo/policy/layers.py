"""What Megatron-Core's local spec lacks: attention over a packed, context-parallel stream, and an RMSNorm for sequence parallelism.

With Transformer Engine present its own layers are used, with `FusedAttention` of this file in them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from megatron_grpo.parallel.context import all_gather
from megatron_grpo.policy.attention import attention
from megatron_grpo.policy.kernels import rms_norm, rotate
from megatron_grpo.policy.stream import PackedStream


class PackedAttention(MegatronModule):
    """Softmax attention over the stream: causal inside each segment, and of its children on all of a parent (grouped-query).

    query [t, 1, heads, k]; key [t, 1, groups, k]; value [t, 1, groups, v], of this rank's tokens and heads -> [t, 1, heads * v].
    Under context parallelism keys and values are gathered; queries stay where they are. Queries and keys are rotated here, where the
    stream says by how much, and not by Megatron, whose sines and cosines are computed twice a layer.
    """

    def __init__(self, config, *, softmax_scale=None, pg_collection, **unused):
        """softmax_scale: multiplies the scores (default: 1 / sqrt of the query's channels)."""
        super().__init__(config)
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, *, packed_seq_params: PackedStream):
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if rotation := packed_seq_params.rotation:
            q, k = rotate(q, rotation), rotate(k, rotation)
        channels = v.shape[-1]
        if channels < q.shape[-1]:  # latent attention; kernels take one size for all three
            v = F.pad(v, (0, q.shape[-1] - channels))
        if self.cp_group.size() > 1:
            k, v = (all_gather(x, self.cp_group).flatten(0, 1) for x in (k, v))
        out = attention(q, k, v, packed_seq_params, self.softmax_scale)
        return out[..., :channels].flatten(1, 2).unsqueeze(1)


class FusedAttention(PackedAttention):
    """As PackedAttention, by Transformer Engine's kernels (FlashAttention's or cuDNN's, in thd layout) in half precision, where no segment
    has a parent.

    Megatron would rotate queries and keys of a thd stream segment by segment, and ask the device for their lengths in every layer. Here
    they are rotated at once, as on the local layers.
    """

    def __init__(self, config, *, softmax_scale=None, pg_collection, **more):
        """more: Megatron's arguments for Transformer Engine's attention."""
        super().__init__(config, softmax_scale=softmax_scale, pg_collection=pg_collection)
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        self.fused = TEDotProductAttention(config=config, softmax_scale=softmax_scale, pg_collection=pg_collection, **more)

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, *, packed_seq_params: PackedStream):
        if packed_seq_params.has_parents or query.dtype is torch.float32:  # of which Transformer Engine has no kernel in this layout
            return super().forward(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if rotation := packed_seq_params.rotation:
            q, k = rotate(q, rotation), rotate(k, rotation)
        out = self.fused(q, k, v, None, attn_mask_type=attn_mask_type, packed_seq_params=te_packed(packed_seq_params))
        return out.reshape(len(q), 1, -1)


class Norm(torch.nn.Module):
    """RMSNorm over the last dimension. Under sequence parallelism its weight's gradient is summed over TP, which the mark asks for."""

    def __init__(self, config, hidden_size, eps=1e-6, **unused):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


def with_bias(linear: type, bias: bool) -> type:
    """The same parallel linear layer, with a bias or without one whatever the configuration says."""

    class Linear(linear):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **(kwargs | {"bias": bias}))

    return Linear


def te_packed(packed: PackedStream) -> PackedSeqParams:
    """The same stream in the words of Transformer Engine's attention, which knows no parents. Under context parallelism too: it cuts each
    segment into the chunks that `parallel.context` says."""
    cu = packed.cu_seqlens
    longest = packed.max_seqlen
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest)
