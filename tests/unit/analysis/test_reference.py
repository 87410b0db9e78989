"""The NumPy reference against the PyTorch reference: losses and gradients of random batches, and the golden vectors."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo_referee import reference
from megatron_grpo_referee.tracked import Tracked, value_and_gradients
from tests.reference.packing import MAX_COMPLETION_LENGTH, random_batch

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "grpo.json").read_text())


ARRAYS = ("mask", "logp", "entropy", "sampler_logp", "ref_logp", "old_logp")


def loss_and_gradients(batch, cfg):
    """Loss, gradients by log-probs, gradients by entropies."""
    numpy = [{name: getattr(c, name).detach().numpy() for name in ARRAYS if getattr(c, name) is not None} for c in batch]

    def loss(given):
        of = [{name: Tracked(x) for name, x in arrays.items()} for arrays in numpy]
        inputs = zip(given[: len(batch)], given[len(batch) :], strict=True)
        made = [dataclasses.replace(c, **x | {"logp": p, "entropy": h}) for c, x, (p, h) in zip(batch, of, inputs, strict=True)]
        return reference.grpo_loss(made, cfg, MAX_COMPLETION_LENGTH)

    value, gradients = value_and_gradients(loss, [x[name] for name in ("logp", "entropy") for x in numpy])
    return value, gradients[: len(batch)], gradients[len(batch) :]


@pytest.mark.parametrize("number", range(len(GOLDEN["losses"])))
def test_numpy_reference_runs_without_torch(number):
    settings = GOLDEN["losses"][number]["settings"]
    cfg = GrpoConfig(**settings)
    for seed in range(5):
        with_torch = random_batch(1000 * number + seed)
        loss, of_logp, of_entropy = loss_and_gradients(with_torch, cfg)
        reference.grpo_loss(with_torch, cfg, MAX_COMPLETION_LENGTH).backward()
        assert loss == pytest.approx(reference.grpo_loss(with_torch, cfg, MAX_COMPLETION_LENGTH).item(), rel=1e-12, abs=1e-14)
        for name, gradients in (("logp", of_logp), ("entropy", of_entropy)):
            for c, gradient in zip(with_torch, gradients, strict=True):
                np.testing.assert_allclose(gradient, getattr(c, name).grad.numpy(), rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("function", [lambda a, b: a.minimum(b).sum(), lambda a, b: a.clamp(0.0, 1.0).sum() + b.clamp(max=0.0).sum()])
def test_numpy_reference_gradient_at_ties_and_bounds_equals_torch(function):
    for one in (-1.0, 0.0, 1.0):
        arrays = [np.array([one, 0.0]), np.array([0.0, one])]
        x, y = (torch.tensor(array, requires_grad=True) for array in arrays)
        function(x, y).backward()
        _, gradients = value_and_gradients(lambda given: function(*given), arrays)
        np.testing.assert_array_equal(gradients, [x.grad.numpy(), y.grad.numpy()])


def test_numpy_reference_imports_no_torch_and_no_other_module():
    program = (
        "import sys; from megatron_grpo_referee import reference, tracked; "
        "print([n for n in sys.modules if n == 'torch' or n.startswith('megatron_grpo.')])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True).stdout
    assert found == "[]\n"
