"""What Transformer Engine's attention is handed, read by an attention that needs no GPU: cumulative lengths, and RoPE by Megatron-Core."""

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
    cfg = cases.settings(micro_batch_size=2, share_prompts="false", **layout.settings)

    def train(rank, world):
        import torch

        from megatron_grpo.policy import layers, model, stream
        from megatron_grpo.types import Segment

        class ReadsCumulativeLengths(layers.PackedAttention):
            """query [t, heads, k], as Megatron-Core hands it to a "thd" attention."""

            def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
                assert packed_seq_params.qkv_format == "thd"
                cu = packed_seq_params.cu_seqlens_q.tolist()
                segments = [Segment(start=a, end=b, length=b - a) for a, b in zip(cu, cu[1:], strict=False)]
                packed = stream.packed_stream(segments, self.cp_group.size(), self.cp_group.rank(), torch.from_numpy)
                out = super().forward(query[:, None], key[:, None], value[:, None], None, packed_seq_params=packed)
                return out.squeeze(1)

        model.PackedAttention = ReadsCumulativeLengths

        def as_for_transformer_engine(policy):
            for chunk in policy.chunks:
                chunk.use_te = True

        return cases.train(rank, world, path, cfg, batches, as_for_transformer_engine)

    right = cases.reference(path, cfg, batches)
    for found in run_ranks(train, layout.world_size):
        distance = cases.distance(found, right)
        assert distance.within(), distance
