"""Reads dumps of TRL: the table of completions (`--log_completions`), and the arrays of the hook in docs/referee_trl.md.

Sources: huggingface/trl 1.16.0, trl/trainer/grpo_trainer.py, `log` (the table) and `_compute_loss` (names of the arrays).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.analysis.referee.dump import Dump, DumpedMicroBatch, DumpedRow, files_of_step, require_version, rows_of
from megatron_grpo.base.errors import config_error

VERSION = "trl 1.16."
NAMES = {
    "mask": "mask", "length": "length", "advantage": "advantages", "logp": "logps", "old": "old_per_token_logps",
    "ref": "ref_per_token_logps", "sampler": "sampling_per_token_logps", "entropy": "entropies",
    "correction": "importance_sampling_ratio", "gradient": "gradient", "rewards": "rewards", "group": "group", "position": "row",
    "is_truncated": "truncated",
}  # fmt: skip
COLUMNS = ("step", "prompt", "completion", "advantage")
LACKS = "The table has rewards and advantages only. For log-probs, loss and gradient use the hook of docs/referee_trl.md."


def read(path: Path, step: int | None, s: Any) -> Dump:
    """Read a dump.

    Args:
        path: A table completions_*.parquet or the directory of several; a file of the hook, or its directory.
        step: Step to read; None for the last.
        s: Settings.
    """
    tables = [path] if path.suffix == ".parquet" else sorted(path.glob("completions_*.parquet"))
    return _of_table(tables, step, s) if tables else _of_hook(path, step)


def _of_table(paths: list[Path], step: int | None, s: Any) -> Dump:
    import pyarrow.parquet

    path = next((one for one in paths if step is not None and one.stem.endswith(f"{step:05d}")), paths[-1])
    table = pyarrow.parquet.read_table(path).to_pydict()
    if missing := [name for name in COLUMNS if name not in table]:
        raise config_error("referee", f"referee: {path} has no column {', '.join(missing)}. This version reads the tables of {VERSION}x.")
    functions = [name for name in table if name not in COLUMNS and all(isinstance(v, (int, float, type(None))) for v in table[name])]
    nothing = np.zeros(0)
    rows = [
        DumpedRow(mask=nothing, group=str(i // s.num_generations), advantage=table["advantage"][i],
                  rewards=[None if v is None or v != v else float(v) for v in (table[name][i] for name in functions)])
        for i in range(len(table["step"]))
    ]  # fmt: skip
    return Dump(source=f"{VERSION}x table {path.name}", rows=rows, step=table["step"][0] if rows else None, lacks=[LACKS])


def _of_hook(path: Path, step: int | None) -> Dump:
    rows: list[DumpedRow] = []
    micro_batches: list[DumpedMicroBatch] = []
    files = files_of_step(path, step)
    for arrays in files:
        require_version(path, str(arrays["system"]), VERSION)
        mask = arrays["completion_mask"] * arrays.get("tool_mask", 1)
        width = mask.shape[1]
        truncated = arrays["truncated"] > 0
        arrays["mask"] = mask
        arrays["length"] = np.where(truncated, width, arrays["completion_mask"].sum(axis=1))
        made = rows_of(arrays, NAMES, micro_batch=len(micro_batches))
        prompts, completions = arrays["prompt_ids"].astype(int), arrays["completion_ids"].astype(int)
        for row, prompt, is_there, ids in zip(made, prompts, arrays["prompt_mask"] > 0, completions, strict=True):
            rows.append(replace(row, tokens=np.concatenate([prompt[is_there], ids[: row.length]])))
        ranks, accumulation, per_generation = (int(arrays[name]) for name in ("ranks", "accumulation", "steps_per_generation"))
        counted = float(arrays["num_items_in_batch"]) / ranks / per_generation
        kl = float(arrays["kl"]) if "kl" in arrays else None
        loss = float(arrays["loss"]) * accumulation
        micro_batches.append(DumpedMicroBatch(loss=loss, tokens=counted, width=width, kl=kl, scale=accumulation))
    first = files[0]
    accumulation = int(first["accumulation"])
    is_whole = int(first["steps_per_generation"]) == accumulation and len(files) == accumulation * int(first["ranks"])
    return Dump(
        source=str(first["system"]), rows=rows, micro_batches=micro_batches, ranks=int(first["ranks"]), step=int(first["step"]),
        dtype=str(first["dtype"]), num_tokens=float(first["num_items_in_batch"]) if is_whole else None, is_fresh=bool(first["fresh"]),
    )  # fmt: skip
