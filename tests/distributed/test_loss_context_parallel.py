"""The loss, its gradients and its metrics on two context-parallel ranks, against one rank."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from megatron_grpo.core.grpo.loss import OBJECTIVES, GrpoLoss
from megatron_grpo.core.grpo.metrics import finish
from megatron_grpo.core.grpo.objectives import RATIOS, ClassificationTerms
from megatron_grpo.core.settings import GrpoConfig
from tests.ranks import run_ranks
from tests.reference.packing import MAX_COMPLETION_LENGTH, compute_labels, pack, random_batch, token_weight_fn

MODES = dict(zip(OBJECTIVES, ["none", "sequence_truncate", "sequence_mask", "token_mask"] * 3)) | {"vespo": "token_mask", "real": "none"}
CASES = [
    GrpoConfig(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=0.2,
        entropy_coef=0.01,
        rollout_importance_sampling_mode=MODES[loss_type],
        rollout_is_geometric=MODES[loss_type] == "sequence_mask",
        off_policy_sequence_mask_delta=None if loss_type == "real" else 0.05,
    )
    for loss_type in OBJECTIVES
    for level in RATIOS
]


def compute_losses(select_positions, sum_over_context):
    """Return loss, gradients at the C positions (0 for those of another rank) and logs of each case."""
    results = []
    for seed, cfg in enumerate(CASES):
        completions = random_batch(seed)
        loss = GrpoLoss.from_config(cfg, max_completion_length=MAX_COMPLETION_LENGTH, temperature=1.0)
        weights = token_weight_fn(loss, completions)
        packed = pack(completions, weights, range(len(completions)), torch.float64, compute_labels(loss, completions, weights))
        positions = select_positions(len(packed.places))
        cut = {f.name: getattr(packed.inputs, f.name) for f in dataclasses.fields(packed.inputs)}
        cut = {name: value[positions] if isinstance(value, torch.Tensor) else value for name, value in cut.items()}
        cut["labels"] = packed.inputs.labels and ClassificationTerms(*(field[positions] for field in packed.inputs.labels))
        value, logs = loss(
            type(packed.inputs)(**cut),
            logprobs=packed.logprobs[positions],
            entropy=packed.entropy[positions],
            ref_logprobs=packed.ref_logprobs[positions],
            sum_over_context=sum_over_context,
        )
        value.backward()
        results.append((value.item(), packed.logprobs.grad, packed.entropy.grad, logs))
    return results


def test_loss_gradients_and_metrics_on_two_context_parallel_ranks_equal_one_rank():
    def compute_on_rank(rank, world_size):
        import torch.distributed as dist

        from megatron_grpo.core.parallel.autograd import sum_over_ranks

        def select_positions(num_positions):
            index = torch.arange(num_positions)
            return index[(index // 2) % world_size == rank]

        return compute_losses(select_positions, lambda x: sum_over_ranks(x, dist.group.WORLD))

    by_rank = run_ranks(compute_on_rank, 2)
    whole = compute_losses(torch.arange, lambda x: x)
    for cfg, one, *parts in zip(CASES, whole, *by_rank, strict=True):
        assert sum(part[0] for part in parts) == pytest.approx(one[0], rel=1e-12, abs=1e-14), cfg
        for kind in (1, 2):
            torch.testing.assert_close(sum(part[kind] for part in parts), one[kind], rtol=1e-10, atol=1e-14)
        sums = {name: sum(part[3].sums[name].item() for part in parts) for name in one[3].sums}
        maxima = {name: max(part[3].maxima[name].item() for part in parts) for name in one[3].maxima}
        found, wanted = finish(sums, maxima), finish(one[3].sums, one[3].maxima)
        assert found.keys() == wanted.keys()
        np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-10, atol=1e-12)
