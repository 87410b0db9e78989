"""Requirements of MoE routers on every machine, without patches for a CPU."""

from __future__ import annotations

from tests.ranks import run_ranks


def test_a_router_needs_neither_transformer_engine_nor_the_patches_for_a_cpu():
    """A GPU without Transformer Engine has neither; Megatron-Core 0.16 then reads a name that it never imported."""

    def run(rank, world):
        import torch
        from megatron.core.transformer.moe import moe_utils

        import megatron_grpo.core.policy.model  # as every policy does  # noqa: F401
        from megatron_grpo.core.parallel import cpu

        assert not cpu._enabled
        tokens, weight = torch.rand(5, 1, 8, requires_grad=True), torch.rand(4, 8, requires_grad=True)
        for dtype in (torch.float32, torch.float64):
            logits = moe_utils.router_gating_linear(tokens, weight, None, dtype)
            logits.sum().backward()
            assert torch.allclose(logits.double(), (tokens @ weight.T).double()) and weight.grad is not None
        return True

    assert run_ranks(run, 1) == [True]
