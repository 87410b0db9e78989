"""Notes of `plan` on the packages of this machine if the run is meant for a GPU."""

from __future__ import annotations

import json

import pytest

from megatron_grpo.cli import main
from megatron_grpo.commands.planning import warnings
from tests.unit.weights.tiny import make_model_config


def list_warnings(capsys, tmp_path, architecture: str, *argv: str) -> str:
    (tmp_path / "model.json").write_text(json.dumps(make_model_config(architecture) | {"max_position_embeddings": 1024}))
    batch = ["--global_batch_size", "8", "--num_generations", "4", "--micro_batch_size", "2", "--max_completion_length", "16"]
    assert main(["plan", "--json", "--model", str(tmp_path / "model.json"), *batch, *argv]) == 0
    return " ".join(json.loads(capsys.readouterr().out)["warnings"])


@pytest.mark.parametrize("architecture, argv, is_said", [
    ("qwen3_5", ["--gpu_memory_gb", "80"], True), ("qwen3_5", [], False), ("qwen3", ["--gpu_memory_gb", "80"], False),
])  # fmt: skip
def test_plan_notes_missing_kernel_of_hybrid_model_on_gpu(capsys, tmp_path, architecture, argv, is_said):
    assert ("about 1,300 kernels per micro-batch" in list_warnings(capsys, tmp_path, architecture, *argv)) == is_said


def test_plan_notes_adam_implementation_on_gpu_machine(capsys, tmp_path, monkeypatch):
    assert "takes the optimizer's steps" not in list_warnings(capsys, tmp_path, "qwen3")
    monkeypatch.setattr(warnings, "GPU_DRIVER", tmp_path)
    assert "torch's AdamW (no Transformer Engine, no Apex) takes the optimizer's steps" in list_warnings(capsys, tmp_path, "qwen3")
