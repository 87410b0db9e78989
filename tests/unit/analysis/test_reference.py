"""The reference on numpy alone is the reference on torch: losses and gradients of random batches, and the golden vectors."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_grpo.analysis.referee import reference
from megatron_grpo.analysis.referee.tracked import Tracked
from megatron_grpo.config.config import GrpoConfig
from tests.reference.packing import MAX_COMPLETION_LENGTH, random_batch

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "grpo.json").read_text())


def tracked(c: reference.ReferenceCompletion) -> reference.ReferenceCompletion:
    arrays = {name: getattr(c, name) for name in ("mask", "logp", "entropy", "sampler_logp", "ref_logp", "old_logp")}
    return dataclasses.replace(c, **{name: None if a is None else Tracked(a.detach().numpy()) for name, a in arrays.items()})


@pytest.mark.parametrize("number", range(len(GOLDEN["losses"])))
def test_the_reference_needs_no_torch(number):
    settings = GOLDEN["losses"][number]["settings"]
    cfg = GrpoConfig(**settings)
    for seed in range(5):
        with_torch = random_batch(1000 * number + seed)
        without = [tracked(c) for c in with_torch]
        losses = [reference.grpo_loss(batch, cfg, MAX_COMPLETION_LENGTH) for batch in (with_torch, without)]
        for loss in losses:
            loss.backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-12, abs=1e-14)
        for one, other in zip(with_torch, without, strict=True):
            for name in ("logp", "entropy"):
                np.testing.assert_allclose(getattr(other, name).grad, getattr(one, name).grad.numpy(), rtol=1e-11, atol=1e-15)


def test_a_tie_of_minimum_halves_the_gradient_as_torch_does():
    for one in (-1.0, 0.0, 1.0):
        a, b = Tracked([one, 0.0]), Tracked([0.0, one])
        x, y = (torch.tensor(t.value, requires_grad=True) for t in (a, b))
        a.minimum(b).sum().backward()
        x.minimum(y).sum().backward()
        np.testing.assert_array_equal([a.grad, b.grad], [x.grad.numpy(), y.grad.numpy()])


def test_it_imports_neither_torch_nor_another_part_of_the_package():
    program = (
        "import sys; from megatron_grpo.analysis.referee import reference, tracked; "
        "print([n for n in sys.modules if n == 'torch' or n.startswith('megatron_grpo.')])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "torch'" not in found and "grpo.loss" not in found and "config" not in found
