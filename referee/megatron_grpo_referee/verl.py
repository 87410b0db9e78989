"""Reader of verl's dumps: the samples of `trainer.rollout_data_dir`, and the arrays of the hook in docs/referee_verl.md.

Sources: verl 0.8.0 and 0.9.1, verl/workers/utils/losses.py (`ppo_loss`), verl/trainer/ppo/core_algos.py, verl/workers/engine_workers.py and
verl/trainer/ppo/ray_trainer.py (`_dump_generations`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_grpo.core.base.files import parse_json
from megatron_grpo_referee.dump import Dump, DumpedMicroBatch, DumpedRow, files_of_step, make_dump, reading, refusal

MEANS = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum": "sequence_sum", "seq-mean-token-sum-norm": "dr_grpo"}
LACKS = (
    "rollout_data_dir has texts and scores only, and no advantages to compare with. For advantages, loss and gradient use the hook of "
    "docs/referee_verl.md."
)
BONUS = "The loss is not compared (gradients are): verl averages the entropy bonus by loss_agg_mode."


def read(path: Path, step: int | None, s: Any) -> Dump:
    """Read a dump.

    Args:
        step: Step to read; None for the last.
    """
    if path.suffix == ".jsonl":
        return _read_samples(path)
    files = files_of_step(path, step, "verl")
    mean = next((str(arrays["mean"]) for arrays in files if "mean" in arrays), "token-mean")
    is_gspo, is_of_rows = s.importance_sampling_level == "sequence_token", s.loss_type == "sapo" or str(files[0]["system"]) < "verl 0.9."
    if (is_gspo or s.loss_type == "sapo") and is_of_rows and s.beta and not s.kl_in_reward and mean != "seq-mean-token-mean":
        raise refusal(f"loss_agg_mode ({mean}) averages the KL term, but not gspo and sapo. Supported: seq-mean-token-mean.")
    s.kl_estimator = {"k3": "low_var_kl"}.get(s.kl_estimator, s.kl_estimator)
    if is_gspo and not is_of_rows:
        s.loss_type = MEANS[mean]

    for arrays in files:
        scores = arrays.get("token_level_scores", arrays.get("rm_scores"))
        if "loss" not in arrays and scores is not None:
            arrays["rewards"] = scores.sum(axis=1)

    def micro_batch(arrays: dict[str, Any]) -> DumpedMicroBatch:
        number, width = arrays["response_mask"].shape
        rows, ranks, tokens = (float(arrays[name]) for name in ("rows", "ranks", "tokens"))
        share = number / rows  # ppo_loss sums over the optimizer step, and FSDP divides by the number of ranks
        scale = (float(arrays["horizon"]) or width) / s.max_completion_length if s.loss_type == "dr_grpo" else 1.0
        loss = None if s.entropy_coef else float(arrays["loss"]) * scale / share / ranks
        return DumpedMicroBatch(loss=loss, tokens=tokens * share, width=width, scale=scale / share / ranks)

    return make_dump(files, "verl", micro_batch, epsilon=1e-6, lacks=[BONUS] * bool(s.entropy_coef))


def _read_samples(path: Path) -> Dump:
    with reading(path, "is no file of verl's rollout_data_dir"):
        found = [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows = [DumpedRow(group=row["input"], rewards=[float(row["score"])]) for row in found]
        return Dump(source=f"verl samples {path.name}", rows=rows, step=found[0]["step"], epsilon=1e-6, lacks=[LACKS])
