"""The packed format of Transformer Engine, read by an attention on CPU: cumulative lengths, and rotated queries and keys."""

from __future__ import annotations

import pytest

from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny


@pytest.mark.parametrize("name", ["1", "CP2", "TP2 SP CP2"])
def test_steps_from_cumulative_lengths_equal_float64(tmp_path, name):
    path = write_tiny(tmp_path / "model", **cases.MODELS["dense"])
    batches = cases.stored_rollout(path, vocab=125)
    layout = cases.LAYOUTS[name]
    cfg = cases.settings(micro_batch_size=2, share_prefix="false", **layout.settings)

    def train(rank, world):
        import megatron.core.extensions.transformer_engine as extensions
        import torch

        from megatron_grpo.core.policy import layers, model, model_config, packed_batch
        from megatron_grpo.core.types import Segment

        local, calls = layers.PackedAttention, []

        class OfTransformerEngine(torch.nn.Module):
            """Attention on query [t, heads, k] of Megatron-Core's "thd" format -> [t, heads * k]. It uses only the cumulative lengths."""

            def __init__(self, **as_megatron_does):
                super().__init__()
                self.local = local(**as_megatron_does)

            def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None):
                assert packed_seq_params.qkv_format == "thd"
                cu = packed_seq_params.cu_seqlens_q.tolist()
                segments = [Segment(start=a, end=b, length=b - a) for a, b in zip(cu, cu[1:], strict=False)]
                assert packed_seq_params.max_seqlen_q == max(segment.length for segment in segments)
                group = self.local.cp_group
                packed = packed_batch.packed_stream(segments, group.size(), group.rank(), torch.from_numpy)
                calls.append(len(segments))
                return self.local(query[:, None], key[:, None], value[:, None], None, packed_seq_params=packed).squeeze(1)

        class Fused(layers.FusedAttention):
            DTYPES = (torch.float32,)  # or float64 would say nothing of it

        # Ranks are processes of their own: nothing of this outlives them.
        extensions.TEDotProductAttention = OfTransformerEngine
        model.PackedAttention = model_config.PackedAttention = Fused
        return cases.train(rank, world, path, cfg, batches), calls

    right = cases.reference(path, cfg, batches)
    for found, calls in run_ranks(train, layout.world_size):
        assert len(calls) == 4 * 4 and max(calls) > 1  # layers and micro-batches, of several segments
        distance = cases.distance(found, right)
        assert distance.within(), distance
