"""Reads dumps of Megatron-SWIFT: completions.jsonl (`--log_completions true`), and the arrays of the hook in docs/referee_swift.md.

Sources: modelscope/ms-swift 4.6.0, swift/megatron/trainers/grpo_trainer.py and rollout_mixin.py, swift/rl_core/data.py and advantage.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.analysis.referee import reference
from megatron_grpo.analysis.referee.dump import Dump, DumpedMicroBatch, DumpedRow, dump_of, files_of_step, refusal

VERSION = "swift 4.6.0"
# names that decide numbers and are called otherwise here
DECIDES = re.compile("label_smoothing|rpo_alpha|reference_free|calculate_per_token_loss|teacher_|rlsd|sdar|.*rollout_importance")
NAMES = {
    "mask": "completion_mask", "advantage": "advantages", "logp": "logps", "old": "old_per_token_logps", "ref": "ref_per_token_logps",
    "sampler": "rollout_per_token_logps", "entropy": "entropies", "correction": "correction", "gradient": "gradient",
    "is_truncated": "truncated_mask",
}  # fmt: skip
COLUMNS = ("gen_step", "prompt", "completion", "advantages")
NO_REWARDS = "The hook has no rewards. completions.jsonl has the advantages: run the command on it too."
LACKS = "completions.jsonl has rewards and advantages only. For log-probs, loss and gradient use the hook of docs/referee_swift.md."


def read(path: Path, step: int | None, s: Any) -> Dump:
    """Read a dump.

    Args:
        path: completions.jsonl, a file of the hook, or its directory.
        step: Step to read; None for the last.
        s: Settings.
    """
    if path.suffix == ".jsonl":
        return _of_completions(path, step, s)

    files = files_of_step(path, step, (VERSION,))
    if s.loss_type == "real":
        raise refusal("loss_type (real) needs groups, which the hook does not have.")
    if s.top_entropy_quantile < 1 and "entropies" not in files[0]:
        raise refusal(f"top_entropy_quantile ({s.top_entropy_quantile:g}) needs entropies, which the dump lacks.")
    s.kl_estimator = {"k3": "low_var_kl"}.get(s.kl_estimator, s.kl_estimator)
    s.loss_type = {"bnpo": "dapo"}.get(s.loss_type, s.loss_type)  # both divide by the tokens of the optimizer step

    def micro_batch(arrays: dict[str, Any]) -> DumpedMicroBatch:
        if s.rollout_importance_sampling_mode == "sequence_mask" and "rollout_per_token_logps" in arrays:
            arrays["correction"] = _masked_by_sequence(arrays, s)
            del arrays["rollout_per_token_logps"]  # the factors are the rule's and not theirs, so that they are not compared
        # of the optimizer step; loss_func multiplies by the number of micro-batches
        counted = float(arrays["num_items_in_batch"]) / len(files) if "num_items_in_batch" in arrays else None
        return DumpedMicroBatch(loss=float(arrays["loss"]), tokens=counted, width=arrays["completion_mask"].shape[1])

    return dump_of(files, NAMES, micro_batch, lacks=[NO_REWARDS], kl=_kl)


def _kl(c: reference.ReferenceCompletion, r: Any, s: Any) -> Any:
    """Return the KL estimate, which Megatron-SWIFT corrects and masks with the rest of the loss."""
    return reference.kl(c, r, s) * reference.rollout_importance(c, s) * reference.off_policy_kept(c, s)


def _masked_by_sequence(arrays: dict[str, np.ndarray], s: Any) -> np.ndarray:
    """Return the correction of sequence_mask: ratios of tokens, 0 in sequences whose geometric mean is above the threshold."""
    mask = arrays["completion_mask"]
    log_ratio = np.nan_to_num(arrays["old_per_token_logps"] - arrays["rollout_per_token_logps"]).clip(-20, 20)
    means = (log_ratio * mask).sum(axis=1) / mask.sum(axis=1).clip(1)
    return np.exp(log_ratio) * (np.exp(means) <= s.rollout_importance_sampling_threshold)[:, None]


def _of_completions(path: Path, step: int | None, s: Any) -> Dump:
    try:
        tables = {table["gen_step"][0]: table for table in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
        number = max(tables) if step is None else step
        table = tables[number]
        functions = [name for name in table if name not in COLUMNS][: s.num_reward_funcs or None]
        rows = [
            DumpedRow(group=str(i // s.num_generations), rewards=_of_functions(rewards), advantage=advantage)
            for i, (advantage, *rewards) in enumerate(zip(table["advantages"], *(table[name] for name in functions), strict=True))
        ]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        message = f"{path} is no completions.jsonl of {VERSION}, or lacks the step ({type(error).__name__}: {error})."
        raise refusal(message) from None
    return Dump(source=f"{VERSION} {path.name}", rows=rows, step=number, epsilon=1e-8 if s.scale_rewards == "gdpo" else 1e-4, lacks=[LACKS])


def _of_functions(rewards: Sequence[float | None]) -> list[float | None]:
    """Return the rewards of a row, None where a function does not apply; a row that none applies to has 0 in Megatron-SWIFT."""
    found = [None if one is None or one != one else float(one) for one in rewards]
    return found if any(one is not None for one in found) else [0.0] * len(found)
