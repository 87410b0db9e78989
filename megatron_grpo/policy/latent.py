"""Multi-latent attention (DeepSeek-V2, section 2.1) over a packed stream, under every layout."""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention

from megatron_grpo.parallel.tensor import copy_to_ranks
from megatron_grpo.policy.layers import Norm

# Megatron-Core 0.16 believes that it has Transformer Engine wherever its own wrapper of it can be imported, which is everywhere, and then
# asks whether a layer is an instance of None. This holds on a GPU without Transformer Engine too.
multi_latent_attention.HAVE_TE = HAVE_TE


class LatentAttention(multi_latent_attention.MLASelfAttention):
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
