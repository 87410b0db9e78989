"""The gated delta rule of flash-linear-attention on a GPU, against float32. `pytest -s` prints the errors."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests import parity_cases as cases
from tests.gpu.test_steps import BF16, GPUS, ROOT, run_measured
from tests.tiny_models import write_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU here")]
needs_fla = pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")


@needs_fla
def test_delta_rule_kernel_is_near_float32_and_repeats():
    env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.gpu.delta_rule_errors"]
    ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-6000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    print(*found, sep="\n")
    assert [one for one in found if one["lacks"] or one["error"] > 0.02 or not one["repeats"]] == []


@pytest.mark.parametrize("share_prefix", ["false", "true"])
@pytest.mark.parametrize("name", ["1", "TP2 SP", "CP2", "PP2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_of_a_hybrid_are_near_float64(tmp_path, name, dtype, share_prefix):
    """In float32 with plain torch; in bfloat16 with the kernel, if it is installed."""
    sizes = dict(linear_key_head_dim=64, linear_value_head_dim=64, layers=4, vocab=125, std=0.06)
    path = write_tiny(tmp_path / "model", "qwen3_5_text", **sizes)
    batches, run = cases.shared_rollout(path, num_steps=2), dict(max_tokens_per_micro_batch=96, share_prefix=share_prefix)
    right = cases.reference(path, cases.settings(**run), batches)
    runs = {"grpo": run | dict(transformer_impl="local", torch_dtype=dtype)}
    limits = BF16 if dtype == "bfloat16" else dict(loss=1e-6, gradient=1e-5, weight=1e-5)
    for distance in run_measured(path, batches, runs, {"grpo": right}, tmp_path, name).values():
        assert distance.within(**limits), distance
