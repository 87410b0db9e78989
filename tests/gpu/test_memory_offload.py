"""Offload on a GPU: memory by the driver before, during and after, and training that stays equal bit for bit.

`pytest -s` prints the measurements.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests import parity_cases as cases
from tests.gpu.test_steps import GPUS, ROOT
from tests.lora_cases import write_random_adapter
from tests.offload_cases import LOW
from tests.tiny_models import write_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU here")]
# Attention on a GPU may sum in another order at each call; the local layers of a model this small do not.
STILL_HELD = 1 << 20  # bytes: step counters, rotary frequencies, what cuBLAS keeps besides its workspace


@pytest.mark.parametrize(
    "kind", ["bfloat16", "float32", "reference", "experts", "plain optimizer", "adapters", "optimizer on the host", "few bits"]
)
def test_offload_frees_gpu_memory_and_keeps_training_exact(tmp_path, kind):
    model = "MoE" if kind == "experts" else "dense"
    path = write_tiny(tmp_path / "model", **cases.MODELS[model] | {"hidden": 512, "ffn": 2048})
    settings = {
        "float32": dict(torch_dtype="float32"),
        "reference": dict(beta=0.1),
        "plain optimizer": dict(use_distributed_optimizer=False),
        "adapters": dict(tuner_type="lora", beta=0.1),
        "optimizer on the host": dict(optimizer_cpu_offload=True),
        "few bits": LOW,
    }.get(kind, {})
    if kind == "adapters":
        settings["adapters"] = str(write_random_adapter(path, tmp_path / "adapter"))
    batches = cases.stored_rollout(path, num_steps=3, vocab=125)
    job, out = tmp_path / "job.pkl", tmp_path / "out.pkl"
    settings = cases.MODEL_SETTINGS.get(model, {}) | dict(torch_dtype="bfloat16", transformer_impl="local") | settings
    job.write_bytes(pickle.dumps({"path": path, "settings": settings, "batches": batches}))
    env = {key: value for key, value in os.environ.items() if key not in ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")}
    env |= {"PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, "-m", "tests.gpu.one_offload", str(job), str(out)]
    ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    found = pickle.loads(out.read_bytes())
    print(f"\n{found['device']}, {kind}: {found['measured']}")
    assert found["pinned"] and all(found["pinned"])
    for one in found["measured"][1:]:  # moments are made by the first step
        workspace = 64 << 20  # of cuBLAS, which torch counts as its own
        assert one["away"] <= STILL_HELD + workspace
        assert one["before"] - one["away"] >= one["given"] - STILL_HELD, "what is given away is the driver's again"
        assert one["push"] > one["away"] and one["back"] == pytest.approx(one["before"], abs=STILL_HELD)
        assert one["reserved"] - one["away"] < 128 << 20, "torch keeps it from the sampler's allocator"
    without, away = found["trails"]["without"], found["trails"]["away"]
    for (loss, norm, scores), (loss_away, norm_away, scores_away) in zip(without[:-1], away[:-1], strict=True):
        assert (loss, norm) == (loss_away, norm_away)
        assert all(np.array_equal(one, other) for one, other in zip(scores, scores_away, strict=True))
    assert all(torch.equal(tensor, away[-1][name]) for name, tensor in without[-1].items())
