"""Reads dumps of Megatron-SWIFT: completions.jsonl (`--log_completions true`), and the arrays of the hook in docs/referee_swift.md.

Sources: modelscope/ms-swift 4.6.0.dev0 (3602360), swift/megatron/trainers/grpo_trainer.py and rollout_mixin.py, swift/rl_core/data.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.analysis.referee.dump import Dump, DumpedMicroBatch, DumpedRow, dump_of, files_of_step
from megatron_grpo.base.errors import config_error

VERSION = "swift 4.6."
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

    def micro_batch(arrays: dict[str, Any]) -> DumpedMicroBatch:
        if s.rollout_importance_sampling_mode == "sequence_mask" and "rollout_per_token_logps" in arrays:
            arrays["correction"] = _masked_by_sequence(arrays, s)
            del arrays["rollout_per_token_logps"]  # the factors are the rule's and not theirs, so that they are not compared
        counted = float(arrays["num_items_in_batch"]) / int(arrays["ranks"]) if "num_items_in_batch" in arrays else None
        return DumpedMicroBatch(loss=float(arrays["loss"]), tokens=counted, width=arrays["completion_mask"].shape[1])

    return dump_of(files_of_step(path, step, VERSION), NAMES, micro_batch, lacks=[NO_REWARDS])


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
        functions = [name for name in table if name not in COLUMNS]
        rows = [
            DumpedRow(group=str(i // s.num_generations), rewards=list(rewards), advantage=advantage)
            for i, (advantage, *rewards) in enumerate(zip(table["advantages"], *(table[name] for name in functions), strict=True))
        ]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        message = f"{path} is no completions.jsonl of {VERSION}x, or lacks the step ({type(error).__name__}: {error})."
        raise config_error("referee", f"referee: {message}") from None
    return Dump(source=f"{VERSION}x {path.name}", rows=rows, step=number, lacks=[LACKS])
