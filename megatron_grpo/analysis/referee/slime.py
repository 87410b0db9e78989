"""Reads dumps of slime: the file of `--save-debug-train-data`, and the arrays of the hook in docs/referee_slime.md.

Sources: THUDM/slime 0.3.1 (624b824), slime/observability/train_data_utils.py (`_build_dump_payload`, format 2) and
slime/backends/megatron_utils/loss.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.analysis.referee.dump import Dump, DumpedMicroBatch, DumpedRow, dump_of, files_of_step, refusal

VERSION, FORMAT = "slime 0.3.", 2
DECIDES = re.compile(  # names that decide numbers and are called otherwise here
    "eps_clip|advantage_|.*kl_|normalize_adv|disable_rewards|.*tis|.*opsm|use_opd|opd_|reward_key|"
    "custom_(advantage|tis|pg_loss|reward_post|convert)|rollout_(data_postprocess|sample_filter)|calculate_|use_rollout_logprobs"
)
NAMES = {
    "mask": "loss_masks", "advantage": "advantages", "logp": "logps", "old": "log_probs", "ref": "ref_log_probs",
    "sampler": "rollout_log_probs", "entropy": "entropy", "gradient": "gradient", "correction": "correction",
}  # fmt: skip
NO_REWARDS = "The hook has no rewards. --save-debug-train-data has the advantages: run the command on it too."
LACKS = "The file has neither loss nor gradient. For these use the hook of docs/referee_slime.md."


def read(path: Path, step: int | None, s: Any) -> Dump:
    """Read a dump.

    Args:
        path: A file of --save-debug-train-data (.pt), a file of the hook, or its directory.
        step: Step to read; None for the last.
        s: Settings.
    """
    if path.suffix == ".pt":
        return _of_train_data(path, s)
    files = files_of_step(path, step, (VERSION,))
    s.kl_estimator = str(files[0]["kl_loss_type"]) if s.beta else s.kl_estimator  # low_var_kl is bounded, k3 is not
    for arrays in files:
        if s.old_logprobs == "rollout":
            arrays["log_probs"] = arrays["rollout_log_probs"]
        elif s.off_policy_sequence_mask_delta is not None and "rollout_log_probs" in arrays:  # of old log-probs, and not of the sampler's
            ratio = np.exp((arrays["log_probs"] - arrays.pop("rollout_log_probs")).clip(-20, 20))
            if s.rollout_importance_sampling_mode != "none":
                arrays["correction"] = ratio.clip(s.rollout_importance_sampling_min, s.rollout_importance_sampling_threshold)
    number, tokens = sum(len(arrays["lengths"]) for arrays in files), sum(float(arrays["loss_masks"].sum()) for arrays in files)

    def micro_batch(arrays: dict[str, Any]) -> DumpedMicroBatch:
        mine = len(arrays["lengths"])
        counted = tokens * mine / number  # slime sums: over tokens, or over means of samples
        scale = 1 / counted if s.loss_type in ("dapo", "cispo") else 1 / mine
        loss = None if s.entropy_coef else float(arrays["loss"]) * scale  # its bonus is a mean of samples' means
        return DumpedMicroBatch(loss=loss, tokens=counted, width=int(arrays["lengths"].max()), scale=scale)

    return dump_of(files, NAMES, micro_batch, epsilon=1e-6, lacks=[NO_REWARDS])


def _of_train_data(path: Path, s: Any) -> Dump:
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - torch.load raises various exceptions for a foreign file
        raise refusal(f"{path} cannot be read ({type(error).__name__}: {error}).") from None
    if not isinstance(found, dict) or found.get("format_version") != FORMAT:
        version = found.get("format_version") if isinstance(found, dict) else None
        raise refusal(f"{path} has format_version {version}. This version reads {FORMAT} of {VERSION}x.")
    rows = []
    for i, sample in enumerate(found["samples"]):
        place, length = int(sample.get("rollout_position", i)), int(sample["response_lengths"])
        arrays: dict[str, Any] = {
            name: np.asarray(sample[key], dtype=np.float64) for name, key in NAMES.items() if sample.get(key) is not None
        }
        advantages = arrays.pop("advantage")[arrays["mask"] > 0]
        rows.append(DumpedRow(
            **arrays, length=length, group=str(place // s.num_generations), position=place,
            rewards=[float(found["raw_reward"][place])], advantage=float(advantages[0]) if len(advantages) else None,
            is_truncated=bool(sample.get("truncated", False)), tokens=np.asarray(sample["tokens"]),
        ))  # fmt: skip
    return Dump(source=f"{VERSION}x {path.name}", rows=rows, step=found["rollout_id"], epsilon=1e-6, lacks=[LACKS])
