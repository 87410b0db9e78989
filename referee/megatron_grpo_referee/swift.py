"""Reader of Megatron-SWIFT's dumps: completions.jsonl (`--log_completions true`), and the arrays of the hook in docs/referee_swift.md.

Sources: modelscope/ms-swift 4.6.0, swift/megatron/trainers/grpo_trainer.py and rollout_mixin.py, swift/rl_core/data.py and advantage.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo_referee import reference
from megatron_grpo_referee.dump import Dump, DumpedMicroBatch, files_of_step, make_dump, reading, refusal, rows_of_table

NO_REWARDS = "The hook has no rewards. completions.jsonl has the advantages: run the command on it too."
LACKS = "completions.jsonl has rewards and advantages only. For log-probs, loss and gradient use the hook of docs/referee_swift.md."


def read(path: Path, step: int | None, s: Any) -> Dump:
    """Read a dump.

    Args:
        step: Step to read; None for the last.
    """
    if path.suffix == ".jsonl":
        return _read_completions(path, step, s)

    files = files_of_step(path, step, "swift")
    if s.loss_type == "real":
        raise refusal("loss_type (real) needs groups, which the hook does not have.")
    if s.top_entropy_quantile < 1 and "entropies" not in files[0]:
        raise refusal(f"top_entropy_quantile ({s.top_entropy_quantile:g}) needs entropies, which the dump lacks.")
    s.kl_estimator = {"k3": "low_var_kl"}.get(s.kl_estimator, s.kl_estimator)
    s.loss_type = {"bnpo": "dapo"}.get(s.loss_type, s.loss_type)  # both divide by the tokens of the optimizer step

    def micro_batch(arrays: dict[str, Any]) -> DumpedMicroBatch:
        if s.rollout_importance_sampling_mode == "sequence_mask" and "rollout_per_token_logps" in arrays:
            arrays["correction"] = _masked_by_sequence(arrays, s)
            del arrays["rollout_per_token_logps"]  # the factors are computed here, so they are not compared
        # of the optimizer step; loss_func multiplies by the number of micro-batches
        counted = float(arrays["num_items_in_batch"]) / len(files) if "num_items_in_batch" in arrays else None
        return DumpedMicroBatch(loss=float(arrays["loss"]), tokens=counted, width=arrays["completion_mask"].shape[1])

    return make_dump(files, "swift", micro_batch, lacks=[NO_REWARDS], kl=_kl)


def _kl(c: reference.ReferenceCompletion, r: Any, s: Any) -> Any:
    """Return the KL estimate, corrected and masked like the rest of the loss."""
    return reference.kl(c, r, s) * reference.rollout_importance(c, s) * reference.off_policy_kept(c, s)


def _masked_by_sequence(arrays: dict[str, np.ndarray], s: Any) -> np.ndarray:
    """Return the factors of sequence_mask: token ratios, or 0 in sequences whose geometric mean exceeds the threshold."""
    mask = arrays["completion_mask"]
    log_ratio = np.nan_to_num(arrays["old_per_token_logps"] - arrays["rollout_per_token_logps"]).clip(-20, 20)
    means = (log_ratio * mask).sum(axis=1) / mask.sum(axis=1).clip(1)
    return np.exp(log_ratio) * (np.exp(means) <= s.rollout_importance_sampling_threshold)[:, None]


def _read_completions(path: Path, step: int | None, s: Any) -> Dump:
    with reading(path, "is no completions.jsonl of swift 4.6.0, or lacks the step"):
        tables = {table["gen_step"][0]: table for table in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
        number = max(tables) if step is None else step
        rows = rows_of_table(tables[number], "swift", s)
    # where no function applies, the reward is 0
    rows = [row if any(r is not None for r in row.rewards or ()) else replace(row, rewards=[0.0] * len(row.rewards or ())) for row in rows]
    epsilon = 1e-8 if s.scale_rewards == "gdpo" else 1e-4
    return Dump(source=f"swift 4.6.0 {path.name}", rows=rows, step=number, epsilon=epsilon, lacks=[LACKS])
