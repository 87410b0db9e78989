"""An AdamW that counts steps like the fused ones of Transformer Engine and Apex, for use in Megatron-Core."""

from __future__ import annotations

import torch
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the step count in its parameter groups. A new group has none, and a group without parameters never has one."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0):
        assert adam_w_mode
        super().__init__(params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in filter(lambda group: group["params"], self.param_groups):
            group["step"] = group.get("step", 0) + 1
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                beta1, beta2 = group["betas"]
                adamw(
                    [parameter], [parameter.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [torch.tensor(group["step"] - 1.0)],
                    amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
                    eps=group["eps"],
                )  # fmt: skip


def take() -> None:
    """Make Megatron-Core use `FusedAdam` as it uses Transformer Engine's or Apex's. Only for a rank of a test."""
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer

    optimizers.USING_PYTORCH_OPTIMIZER, optimizers.Adam = False, FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE, distrib_optimizer.Adam = True, FusedAdam
