"""Write tests/golden/grpo.json: inputs and outputs of the float64 reference, for testing other implementations.

    python tools/make_golden_vectors.py            # write the file
    python tools/make_golden_vectors.py --check    # exit with 1 if the file is not up to date

The file has one batch of completions, one rollout of rewards, and for each case the settings (others have their defaults) with the loss and
its gradients, or the advantages, in float64.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "referee")]  # as a script, only its own folder is on the path

from megatron_grpo.core.settings import GrpoConfig  # noqa: E402
from megatron_grpo_referee import reference  # noqa: E402

TARGET = ROOT / "tests" / "golden" / "grpo.json"
MAX_COMPLETION_LENGTH = 6

# One completion per line: ratios inside and outside every clip range, an untrained token, a token without a sampler log-prob, a truncated
# completion, one of a zero-std group, and an on-policy one. The default of "group" is 0.
BATCH = [
    {"mask": [1, 1, 1], "logp": [-0.5, -1.2, -0.1], "old_logp": [-0.75, -1.0, -0.1], "sampler_logp": [-0.7, -0.9, -0.15],
     "ref_logp": [-0.4, -1.9, -0.2], "entropy": [1.1, 0.4, 0.2], "advantage": 1.25},
    {"mask": [1, 0, 1, 1], "logp": [-2.0, -0.3, -0.8, -0.9], "old_logp": [-1.2, -0.3, -0.8, -1.7], "sampler_logp": [-1.1, None, -0.9, -1.6],
     "ref_logp": [-2.2, -0.1, -0.8, -0.2], "entropy": [2.3, 0.1, 0.9, 1.5], "advantage": -0.75},
    {"mask": [1, 1], "logp": [-0.25, -3.0], "old_logp": [-0.3, -4.9], "sampler_logp": [-0.2, -4.7],
     "ref_logp": [-0.5, -2.5], "entropy": [0.3, 1.9], "advantage": -1.5},
    {"mask": [1, 1, 1, 1, 1, 1], "logp": [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6], "old_logp": [-0.1, -0.25, -0.28, -0.4, -0.55, -0.5],
     "sampler_logp": [-0.4, -0.2, -0.3, None, -0.5, -0.6], "ref_logp": [-0.2, -0.2, -0.1, -0.9, -0.5, -0.7],
     "entropy": [0.5, 0.6, 0.7, 0.8, 1.0, 1.2], "advantage": 0.5, "is_truncated": True},
    {"mask": [1, 1, 1], "logp": [-1.0, -0.7, -0.2], "old_logp": None, "sampler_logp": [-0.6, -0.5, -0.2],
     "ref_logp": [-1.1, -0.9, -0.1], "entropy": [1.3, 1.0, 0.35], "advantage": -0.25},
    {"mask": [1, 1], "logp": [-0.9, -1.4], "old_logp": [-0.8, -1.4], "sampler_logp": [-0.8, -1.3],
     "ref_logp": [-1.0, -1.0], "entropy": [0.95, 1.6], "advantage": 0.0, "is_zero_std": True, "group": 1},
]  # fmt: skip

# [groups][completions][reward functions]; None where a function does not apply.
REWARDS = [
    [[1.0, 0.2], [0.0, 0.5], [0.0, None], [1.0, 0.9]],
    [[0.1, 0.3], [0.1, 0.3], [0.1, 0.3], [0.1, 0.3]],
    [[None, None], [2.0, 0.1], [0.5, 0.1], [None, 0.7]],
]
REWARD_WEIGHTS = [1.0, 0.5]

IMPORTANCE = "rollout_importance_sampling"
LOSS_CASES = [
    *({"loss_type": loss_type, "importance_sampling_level": level}
      for loss_type in ("grpo", "bnpo", "dapo", "dr_grpo", "sequence_sum", "cispo", "sapo")
      for level in ("token", "sequence", "sequence_token")),
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.01},
    {"loss_type": "real"}, {"loss_type": "real", "real_tau": 1.5},
    {"loss_type": "vespo"},
    {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 0.25},
    {"loss_type": "vespo", IMPORTANCE + "_mode": "token_truncate", IMPORTANCE + "_threshold": 1.2},
    {"loss_type": "fipo"}, {"loss_type": "fipo", "fipo_decay_rate": 1.0, "fipo_clip_high_only": False, "delta": 4.0},
    {"loss_type": "fipo", "fipo_clip_range": None, "fipo_safety_threshold": 2.0},
    {"epsilon_high": 0.28}, {"delta": 4.0}, {"loss_type": "cispo", "epsilon_high": 1.5},
    {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
    {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    *({"beta": 0.1, "kl_estimator": estimator} for estimator in ("k1", "k2", "k3")),
    *({"beta": 0.1, "kl_estimator": estimator, "use_bias_correction_kl": False} for estimator in ("k2", "k3")),
    {"beta": 0.1, "importance_sampling_level": "sequence"}, {"beta": 0.1, "importance_sampling_level": "sequence_token"},
    {"entropy_coef": 0.05}, {"top_entropy_quantile": 0.3}, {"top_entropy_quantile": 0.3, "entropy_coef": 0.05, "loss_type": "dapo"},
    *({IMPORTANCE + "_mode": mode, IMPORTANCE + "_threshold": 1.2}
      for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")),
    *({IMPORTANCE + "_mode": mode, IMPORTANCE + "_threshold": 1.05, "rollout_is_geometric": True}
      for mode in ("sequence_truncate", "sequence_mask")),
    {IMPORTANCE + "_mode": "token_mask", IMPORTANCE + "_threshold": 1.2, IMPORTANCE + "_min": 0.9},
    {"off_policy_sequence_mask_delta": 0.1},
    *({"loss_type": loss_type, "overlong_filter": True} for loss_type in ("grpo", "dapo")),
    *({"loss_type": loss_type, "exclude_zero_std_groups": True} for loss_type in ("grpo", "dapo", "dr_grpo")),
]  # fmt: skip
ADVANTAGE_CASES = [
    *({"advantage_estimator": "grpo", "scale_rewards": scale} for scale in ("group", "batch", "none")),
    *({"advantage_estimator": estimator} for estimator in ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")),
]


def make_completions() -> list[reference.ReferenceCompletion]:
    """Return BATCH as completions of the reference; logp and entropy require gradients."""

    def tensor(values):
        return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float64)

    found = []
    for row in BATCH:
        tensors = {name: tensor(row[name]) for name in ("mask", "logp", "entropy", "sampler_logp", "ref_logp")}
        tensors["logp"].requires_grad_()
        tensors["entropy"].requires_grad_()
        old = None if row["old_logp"] is None else tensor(row["old_logp"])
        flags = {name: row.get(name, False) for name in ("is_truncated", "is_zero_std")} | {"group": row.get("group", 0)}
        found.append(reference.ReferenceCompletion(**tensors, old_logp=old, advantage=row["advantage"], **flags))
    return found


def make_loss_case(settings: dict) -> dict:
    """Return the settings, loss and gradients of one case."""
    batch = make_completions()
    loss = reference.grpo_loss(batch, GrpoConfig(**settings), MAX_COMPLETION_LENGTH)
    loss.backward()
    case = {"settings": settings, "loss": loss.item(), "grad_logp": [c.logp.grad.tolist() for c in batch]}
    if settings.get("entropy_coef"):
        case["grad_entropy"] = [c.entropy.grad.tolist() for c in batch]
    return case


def make_advantage_case(settings: dict) -> dict:
    """Return the settings and advantages of one case."""
    return {"settings": settings, "advantages": reference.advantages(REWARDS, REWARD_WEIGHTS, GrpoConfig(**settings))}


def make_vectors() -> dict:
    """Return the content of the file."""
    return {
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "batch": BATCH,
        "losses": [make_loss_case(settings) for settings in LOSS_CASES],
        "rewards": REWARDS,
        "reward_weights": REWARD_WEIGHTS,
        "advantages": [make_advantage_case(settings) for settings in ADVANTAGE_CASES],
    }


def format_vectors(found: dict) -> str:
    """Return the JSON text of the file, with one case or completion per line."""
    parts = []
    for name, value in found.items():
        rows = value if isinstance(value, list) and name != "reward_weights" else None
        text = json.dumps(value) if rows is None else "[\n    " + ",\n    ".join(json.dumps(row) for row in rows) + "\n  ]"
        parts.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def is_close(one, other) -> bool:
    """Return whether two values are equal up to the rounding of `exp` on other machines."""
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(is_close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(is_close, one, other))
    if isinstance(one, float) and isinstance(other, (int, float)):
        return abs(one - other) <= 1e-12 * max(1.0, abs(one))
    return one == other


def main(arguments: list[str]) -> int:
    """Write or check the file and return the exit code."""
    if arguments == ["--check"]:
        same = is_close(make_vectors(), json.loads(TARGET.read_text()))
        print(f"{TARGET.name} is {'up to date' if same else 'NOT up to date'}")
        return 0 if same else 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(format_vectors(make_vectors()))
    print(f"wrote {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
