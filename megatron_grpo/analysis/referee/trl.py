"""Reads dumps of TRL: the table of completions (`--log_completions`), and the arrays of the hook in docs/referee_trl.md.

Sources: huggingface/trl 1.16.0, trl/trainer/grpo_trainer.py, `log` (the table) and `_compute_loss` (names of the arrays).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.analysis.referee.dump import Dump, DumpedMicroBatch, DumpedRow, dump_of, files_of_step
from megatron_grpo.base.errors import config_error

VERSION = "trl 1.16."
NAMES = {
    "mask": "mask", "length": "length", "advantage": "advantages", "logp": "logps", "old": "old_per_token_logps",
    "ref": "ref_per_token_logps", "sampler": "sampling_per_token_logps", "entropy": "entropies",
    "correction": "importance_sampling_ratio", "gradient": "gradient", "rewards": "rewards", "group": "group", "position": "row",
    "is_truncated": "truncated", "tokens": "tokens",
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
    rows = [
        DumpedRow(group=str(i // s.num_generations), advantage=table["advantage"][i],
                  rewards=[None if v is None or v != v else float(v) for v in (table[name][i] for name in functions)])
        for i in range(len(table["step"]))
    ]  # fmt: skip
    return Dump(source=f"{VERSION}x table {path.name}", rows=rows, step=table["step"][0] if rows else None, lacks=[LACKS])


def _of_hook(path: Path, step: int | None) -> Dump:
    files = files_of_step(path, step, VERSION)
    first = files[0]
    accumulation = int(first["accumulation"])
    is_whole = int(first["steps_per_generation"]) == accumulation and len(files) == accumulation * int(first["ranks"])
    num_tokens = float(first["num_items_in_batch"]) if is_whole else None
    return dump_of(files, NAMES, _micro_batch, num_tokens=num_tokens, is_fresh=bool(first["fresh"]))


def _micro_batch(arrays: dict[str, Any]) -> DumpedMicroBatch:
    """Return the micro-batch of a file; add masks without the tools' tokens, lengths, and prompts with their completions."""
    width, prompts = arrays["completion_mask"].shape[1], arrays["prompt_mask"] > 0
    arrays["mask"] = arrays["completion_mask"] * arrays.get("tool_mask", 1)
    arrays["length"] = np.where(arrays["truncated"] > 0, width, arrays["completion_mask"].sum(axis=1)).astype(int)
    arrays["tokens"] = np.empty(len(prompts), dtype=object)
    for i, (prompt, is_there, ids) in enumerate(zip(arrays["prompt_ids"], prompts, arrays["completion_ids"], strict=True)):
        arrays["tokens"][i] = np.concatenate([prompt[is_there], ids[: arrays["length"][i]]])
    counted = float(arrays["num_items_in_batch"]) / int(arrays["ranks"]) / int(arrays["steps_per_generation"])
    kl, scale = float(arrays["kl"]) if "kl" in arrays else None, int(arrays["accumulation"])
    return DumpedMicroBatch(loss=float(arrays["loss"]) * scale, tokens=counted, width=width, kl=kl, scale=scale)
