"""Reader of slime's dumps: the file of `--save-debug-train-data`, and the arrays of the hook in docs/referee_slime.md.

Sources: THUDM/slime 0.3.1 (624b824), slime/observability/train_data_utils.py (`_build_dump_payload`, format 2) and
slime/backends/megatron_utils/loss.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo_referee.dump import SYSTEMS, Dump, DumpedMicroBatch, files_of_step, make_dump, make_rows, reading, refusal

FORMAT = 2  # of --save-debug-train-data, slime 0.3
NO_REWARDS = "The hook has no rewards. --save-debug-train-data has the advantages: run the command on it too."
LACKS = "The file has neither loss nor gradient. For these use the hook of docs/referee_slime.md."


def read(path: Path, step: int | None, s: Any) -> Dump:
    """Read a dump.

    Args:
        step: Step to read; None for the last.
    """
    if path.suffix == ".pt":
        return _read_train_data(path, s)
    files = files_of_step(path, step, "slime")
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

    return make_dump(files, "slime", micro_batch, epsilon=1e-6, lacks=[NO_REWARDS])


def _read_train_data(path: Path, s: Any) -> Dump:
    import torch

    with reading(path):
        found = torch.load(path, map_location="cpu", weights_only=True)
    version = found.get("format_version") if isinstance(found, dict) else None
    if version != FORMAT:
        raise refusal(f"{path} has format_version {version}. This version reads {FORMAT} of slime 0.3.x.")
    rows = []
    for i, sample in enumerate(found["samples"]):
        place = int(sample.get("rollout_position", i))
        names = [name for name in SYSTEMS["slime"]["arrays"].values() if sample.get(name) is not None]
        arrays = {name: np.asarray(sample[name], np.float64) for name in names} | {"lengths": [int(sample["response_lengths"])]}
        rows += make_rows(arrays, "slime", position=place, group=str(place // s.num_generations), tokens=np.asarray(sample["tokens"]),
                        rewards=[float(found["raw_reward"][place])], is_truncated=bool(sample.get("truncated")))  # fmt: skip
    return Dump(source=f"slime 0.3.x {path.name}", rows=rows, step=found["rollout_id"], epsilon=1e-6, lacks=[LACKS])
