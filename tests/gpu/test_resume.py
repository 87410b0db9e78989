"""Resume on a GPU with the Adam that Megatron-Core selects: Transformer Engine's, Apex's or torch's. `pytest -s` prints which."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from tests import parity_cases as cases
from tests.gpu.test_steps import GPUS, ROOT
from tests.tiny_models import write_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU here")]


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "plain optimizer", "half on the host"])
def test_resumed_step_equals_uninterrupted_step(tmp_path, kind):
    path = write_tiny(tmp_path / "model", **cases.MODELS["dense"])
    settings = {
        "float32": dict(torch_dtype="float32"),
        "plain optimizer": dict(use_distributed_optimizer=False),
        "half on the host": dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5),
    }.get(kind, {})
    settings = dict(torch_dtype="bfloat16", transformer_impl="local") | settings
    batches, job, out = cases.stored_rollout(path, num_steps=3, vocab=125), tmp_path / "job.pkl", tmp_path / "out.pkl"
    job.write_bytes(pickle.dumps({"path": path, "settings": settings, "batches": batches, "folder": tmp_path / "saved"}))
    env = {key: value for key, value in os.environ.items() if key not in ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")}
    command = [sys.executable, "-m", "tests.gpu.one_resume", str(job), str(out)]
    ran = subprocess.run(command, env=env | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    found = pickle.loads(out.read_bytes())
    print(f"\n{kind}: {found}")
    assert (found["counted"], found["then"]) == (2, 3)
    assert found["apart"] <= (1e-6 if kind == "float32" else 4e-3), "one rounding of bfloat16 near 1"
