"""Reads dumps of verl: the samples of `trainer.rollout_data_dir`, and the arrays of the hook in docs/referee_verl.md.

Sources: volcengine/verl 0.8.0.dev (b178a3c), verl/trainer/ppo/ray_trainer.py (`_dump_generations`), verl/workers/actor/dp_actor.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_grpo.analysis.referee.dump import Dump, DumpedMicroBatch, DumpedRow, dump_of, files_of_step
from megatron_grpo.base.errors import config_error

VERSION = "verl 0.8."
NAMES = {
    "mask": "response_mask", "advantage": "advantages", "logp": "log_prob", "old": "old_log_prob", "ref": "ref_log_prob",
    "sampler": "rollout_log_probs", "correction": "rollout_is_weights", "gradient": "gradient", "rewards": "rewards", "group": "uid",
}  # fmt: skip
LACKS = (
    "rollout_data_dir has texts and scores only, and no advantages to compare with. For advantages, loss and gradient use the hook of "
    "docs/referee_verl.md."
)


def read(path: Path, step: int | None, s: Any) -> Dump:
    """Read a dump.

    Args:
        path: A file of rollout_data_dir (.jsonl), a file of the hook, or its directory.
        step: Step to read; None for the last.
        s: Settings. `max_completion_length` becomes the padded length, which verl divides by.
    """
    if path.suffix == ".jsonl":
        return _of_samples(path)

    def micro_batch(arrays: dict[str, Any]) -> DumpedMicroBatch | None:
        if "loss" not in arrays:
            arrays |= {"rewards": arrays["token_level_scores"].sum(axis=1), "old_log_prob": arrays["old_log_probs"]}
            return None
        number, width = arrays["response_mask"].shape
        # seq-mean-token-sum-norm does not divide by the number of rows
        scale = 1 / number if s.loss_type == "dr_grpo" else 1.0
        s.max_completion_length = width
        return DumpedMicroBatch(loss=float(arrays["loss"]) * scale, width=width, scale=scale)

    lacks = ["The loss is verl's pg_loss, without KL term and entropy bonus."] if s.beta or s.entropy_coef else []
    files = files_of_step(path, step, VERSION)
    return dump_of(files, NAMES, micro_batch, epsilon=1e-6, counts_empty_rows=False, has_kl=False, lacks=lacks)


def _of_samples(path: Path) -> Dump:
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows = [DumpedRow(group=row["input"], rewards=[float(row["score"])]) for row in found]
        return Dump(source=f"{VERSION}x samples {path.name}", rows=rows, step=found[0]["step"], epsilon=1e-6, lacks=[LACKS])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise config_error("referee", f"referee: {path} is no file of verl's rollout_data_dir ({type(error).__name__}: {error}).") from None
