"""Step counts of each kind of optimizer after a checkpoint is loaded into a new one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron_grpo.core.policy.adamw import AdamW
from megatron_grpo.core.policy.sharded_state import _count_steps, steps_counted
from tests.fused_adam import FusedAdam


def make_rounding_adam(parameters):
    groups = [{"params": parameters, "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}]
    return AdamW(groups, main_params_dtype="fp32", exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32")


def make_torch_adam(parameters):
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:  # loading makes its states
        optimizer.state[parameter] = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(0.0)}
    return optimizer


@pytest.mark.parametrize("kind", [FusedAdam, make_torch_adam, make_rounding_adam])
@pytest.mark.parametrize("earlier", [None, 3], ids=["new", "with another count in its groups"])
def test_optimizer_step_count_is_restored_from_checkpoint(kind, earlier):
    parameter = torch.nn.Parameter(torch.ones(2))
    inner = kind([parameter])
    if earlier is not None:  # Megatron-Core leaves one there when it loads
        inner.param_groups[0]["step"] = earlier
    whole = SimpleNamespace(optimizer=inner)
    _count_steps(whole, 7)
    assert steps_counted(whole) == 7
    parameter.grad = parameter.decoupled_grad = torch.ones(2)
    inner.step()
    assert steps_counted(whole) == 8


def test_hybrid_optimizer_parts_restore_separate_step_counts(monkeypatch):
    """Before each step it gives its parts what its groups hold: a count in them would start each step anew."""
    monkeypatch.setattr(HybridDeviceOptimizer, "__init__", lambda self, params: torch.optim.Optimizer.__init__(self, params, {"lr": 1e-3}))
    parameter = torch.nn.Parameter(torch.ones(2))
    hybrid, part = HybridDeviceOptimizer([parameter]), FusedAdam([parameter])
    hybrid.cpu_optimizers, hybrid.gpu_optimizer, hybrid.param_to_inner_param = [], part, {parameter: parameter}
    hybrid.param_groups[0]["step"] = 3
    whole = SimpleNamespace(optimizer=hybrid)
    _count_steps(whole, 7)
    for count in (8, 9):
        hybrid._sync_hdo_param_groups_to_sub_optimizers()
        parameter.grad = torch.ones(2)
        part.step()
        assert steps_counted(whole) == count
