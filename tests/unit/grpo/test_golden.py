"""The published golden vectors, against the reference and against the package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_grpo.core.grpo.advantages import advantages
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo.run.config.rules import grpo as validation
from megatron_grpo.run.config.settings import Config
from megatron_grpo_referee.reference import ReferenceCompletion
from tests.reference.packing import package_loss

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "grpo.json").read_text())


def make_completions() -> list[ReferenceCompletion]:
    def tensor(values):
        return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float64)

    return [
        ReferenceCompletion(
            mask=tensor(row["mask"]),
            logp=tensor(row["logp"]),
            entropy=tensor(row["entropy"]),
            sampler_logp=tensor(row["sampler_logp"]),
            ref_logp=tensor(row["ref_logp"]),
            old_logp=None if row["old_logp"] is None else tensor(row["old_logp"]),
            advantage=row["advantage"],
            is_truncated=row.get("is_truncated", False),
            is_zero_std=row.get("is_zero_std", False),
            group=row.get("group", 0),
        )
        for row in GOLDEN["batch"]
    ]


@pytest.mark.parametrize("case", GOLDEN["losses"], ids=lambda case: "-".join(map(str, case["settings"].values())))
def test_golden_loss_and_gradients_are_reproduced(case, monkeypatch):
    monkeypatch.setattr("tests.reference.packing.MAX_COMPLETION_LENGTH", GOLDEN["max_completion_length"])
    cfg = GrpoConfig(**case["settings"])
    assert validation.problems(Config(grpo=cfg)) == []
    loss, grad_logp, grad_entropy, _ = package_loss(cfg, make_completions(), [[5, 0, 3], [2, 4, 1]])
    assert loss == pytest.approx(case["loss"], rel=1e-11)
    np.testing.assert_allclose(np.concatenate(grad_logp), np.concatenate(case["grad_logp"]), rtol=1e-10, atol=1e-14)
    if "grad_entropy" in case:
        np.testing.assert_allclose(np.concatenate(grad_entropy), np.concatenate(case["grad_entropy"]), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("case", GOLDEN["advantages"], ids=lambda case: "-".join(map(str, case["settings"].values())))
def test_golden_advantages_are_reproduced(case):
    found = advantages(GOLDEN["rewards"], GrpoConfig(**case["settings"]), GOLDEN["reward_weights"])
    np.testing.assert_allclose(found.advantages, case["advantages"], rtol=1e-10, atol=1e-12)


def test_golden_file_equals_output_of_its_program():
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "make_golden_vectors.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def make_key(case):
    return round(case["loss"], 12), str(np.round(np.concatenate(case["grad_logp"]), 10).tolist()), str(case.get("grad_entropy"))


def normalize_settings(settings: dict) -> dict:
    """`bnpo` is `dapo`; and GSPO-token has GSPO's gradient where a sequence has one advantage and no per-token factor (its paper, 4.3)."""
    renamed = dict(settings)
    if renamed.get("loss_type") == "bnpo":
        renamed["loss_type"] = "dapo"
    if renamed.get("importance_sampling_level") == "sequence_token" and "beta" not in renamed:
        renamed["importance_sampling_level"] = "sequence"
    return renamed


def test_golden_cases_with_equal_gradients_are_equal_by_definition():
    """A case that equals another shows nothing about the setting it names."""
    for i, one in enumerate(GOLDEN["losses"]):
        for other in GOLDEN["losses"][:i]:
            is_same = normalize_settings(one["settings"]) == normalize_settings(other["settings"])
            assert (make_key(one) == make_key(other)) == is_same, (one["settings"], other["settings"])
