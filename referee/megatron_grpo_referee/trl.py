"""Reader of TRL's dumps: the table of completions (`--log_completions`), and the arrays of the hook in docs/referee_trl.md.

Sources: huggingface/trl 1.16.0, trl/trainer/grpo_trainer.py, `log` (the table) and `_compute_loss` (names of the arrays).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo_referee.dump import SYSTEMS, Dump, DumpedMicroBatch, files_of_step, make_dump, refusal, rows_of_table

LACKS = "The table has rewards and advantages only. For log-probs, loss and gradient use the hook of docs/referee_trl.md."
PARTS = (
    "Advantages are not recomputed: this optimizer step has a part of a rollout (steps_per_generation is larger than "
    "gradient_accumulation_steps). Run the command on the table of completions too (log_completions=True)."
)
BONUS = "The loss is not compared (gradients are): it has a load-balancing loss, or an entropy bonus of the tokens of top_entropy_quantile."


def read(path: Path, step: int | None, s: Any) -> Dump:
    """Read a dump.

    Args:
        path: A table completions_*.parquet or the directory of several; a file of the hook, or its directory.
        step: Step to read; None for the last.
    """
    tables = [path] if path.suffix == ".parquet" else sorted(path.glob("completions_*.parquet"))
    return _read_table(tables, step, s) if tables else _read_hook(path, step, s)


def _read_table(paths: list[Path], step: int | None, s: Any) -> Dump:
    import pyarrow.parquet

    step_paths = [one for one in paths if step is None or one.stem.endswith(f"{step:05d}")]
    if not step_paths:
        raise refusal(f"no table of step {step}. There are: {', '.join(one.name for one in paths)}.")
    path = step_paths[-1]
    table = pyarrow.parquet.read_table(path).to_pydict()
    if missing := [name for name in SYSTEMS["trl"]["columns"] if name not in table]:
        raise refusal(f"{path} has no column {', '.join(missing)}. This version reads the tables of trl 1.16.x.")
    rows = rows_of_table(table, "trl", s)
    return Dump(source=f"trl 1.16.x table {path.name}", rows=rows, step=table["step"][0] if rows else None, lacks=[LACKS])


def _read_hook(path: Path, step: int | None, s: Any) -> Dump:
    files = files_of_step(path, step, "trl")
    first = files[0]
    accumulation, per_generation, ranks = (int(first[name]) for name in ("accumulation", "steps_per_generation", "ranks"))
    needed = accumulation * ranks
    if path.is_dir() and len(files) != needed:
        raise refusal(f"{path} has {len(files)} files of this step instead of {needed}: use an empty directory for each run.")
    passes = [int(arrays["micro_step"]) // per_generation for arrays in files]  # over the rollout
    whole = next((one for one in passes if passes.count(one) == per_generation * ranks), None)
    for arrays, number in zip(files, passes, strict=True):
        arrays["group"] = np.array([f"{number}/{row // s.num_generations}" for row in arrays["row"].astype(int)])
        if number != whole:  # advantages are those of a whole rollout
            del arrays["rewards"]
    is_unknown = bool(first["has_aux_loss"]) or (s.entropy_coef != 0 and s.top_entropy_quantile < 1)
    lacks = [PARTS] * (whole is None) + [BONUS] * is_unknown
    if s.top_entropy_quantile < 1 and ranks > 1:
        raise refusal(f"top_entropy_quantile ({s.top_entropy_quantile:g}) is over {ranks} ranks in TRL. Supported: one rank.")

    def micro_batch(arrays: dict[str, Any]) -> DumpedMicroBatch:
        """Return the micro-batch of a file; add masks without tool tokens, lengths, and prompts with completions."""
        width, prompts = arrays["completion_mask"].shape[1], arrays["prompt_mask"] > 0
        arrays["mask"] = arrays["completion_mask"] * arrays.get("tool_mask", 1)
        arrays["length"] = np.where(arrays["truncated"] > 0, width, arrays["completion_mask"].sum(axis=1)).astype(int)
        arrays["tokens"] = np.empty(len(prompts), dtype=object)
        for i, (prompt, is_there, ids) in enumerate(zip(arrays["prompt_ids"], prompts, arrays["completion_ids"], strict=True)):
            arrays["tokens"][i] = np.concatenate([prompt[is_there], ids[: arrays["length"][i]]])
        counted = float(arrays["num_items_in_batch"]) / ranks / per_generation
        kl, loss = float(arrays["kl"]) if "kl" in arrays else None, None if is_unknown else float(arrays["loss"]) * accumulation
        return DumpedMicroBatch(loss=loss, tokens=counted, width=width, kl=kl, scale=accumulation)

    num_tokens = float(first["num_items_in_batch"]) if whole is not None and accumulation == per_generation else None
    return make_dump(files, "trl", micro_batch, num_tokens=num_tokens, is_fresh=bool(first["fresh"]), lacks=lacks)
