"""Reads the files of a run of this package: a step dump, the recorded rows of a checkpoint, or a table of completions. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.analysis.referee.dump import Dump, DumpedMicroBatch, DumpedRow, load_arrays, refusal
from megatron_grpo.checkpoint.manifest import MANIFEST
from megatron_grpo.checkpoint.samples import UnknownSamplesError, read_samples
from megatron_grpo.config.table import in_current_names
from megatron_grpo.types import Sample

FORMAT = 1
DECIDES = re.compile("$.")  # settings of this package are known by their names
LACKS = {
    "rows": "Recorded rows have no log-probs of the training forward. For loss and gradient, replay a step dump (--debug_dump_steps).",
    "table": "A table of completions has rewards and advantages only. For the loss, use a step dump (--debug_dump_steps).",
    "rewards": "No table of completions of this run has these rows: advantages are not recomputed. Keep --log_completions_steps 1.",
}


def read(path: Path, step: int | None, s: Any) -> Dump:
    """Read a dump.

    Args:
        path: A step dump, a checkpoint with recorded rows, or a table of completions (.parquet).
        step: Not used: the path names the step.
        s: Settings.
    """
    if path.suffix == ".parquet":
        rows = [DumpedRow(group=str(row["prompt_number"]), rewards=_rewards(row), advantage=row["advantage"]) for row in _table(path)]
        return Dump(source=f"native table {path.name}", rows=rows, lacks=[LACKS["table"]])
    if (path / "step_dump.json").is_file():
        return _of_step_dump(path)
    recorded = path if path.name == "trained.npz" else path / "trained.npz"
    if recorded.is_file():
        return _of_recorded(recorded)
    raise refusal(f"{path} is no step dump (step_dump.json), no recorded rows (trained.npz, --record_rows true), no table (.parquet).")


def _samples(path: Path) -> list[Sample]:
    try:
        return read_samples(path)
    except (OSError, ValueError, EOFError, UnknownSamplesError) as error:
        raise refusal(f"{path} cannot be read ({error}).") from None


Tables = dict[tuple[int, int, int], dict[str, Any]]  # (rollout, prompt number, generation) -> row of a table of completions


def _of_step_dump(path: Path) -> Dump:
    facts = json.loads((path / "step_dump.json").read_text(encoding="utf-8"))
    if facts.get("format") != FORMAT:
        raise refusal(f"{path} has format {facts.get('format')}. This version reads format {FORMAT}.")
    by_key = {sample.key: sample for file in sorted((path / "rows").glob("*.npz")) for sample in _samples(file)}
    forward = {name: values for file in sorted((path / "forward").glob("*.npz")) for name, values in load_arrays(file).items()}
    rows = _rows([by_key[key] for key in sorted(by_key)], forward, facts["version"], _tables(path.parent.parent))
    loss = facts.get("metrics", {}).get("loss")
    micro_batch = DumpedMicroBatch(loss=None if loss is None else float(loss), kl=facts.get("metrics", {}).get("kl"))
    return Dump(
        source=facts["written_by"], is_native=True, rows=rows, micro_batches=[micro_batch], step=facts["step"],
        settings=in_current_names(facts["settings"]),
        num_tokens=facts.get("num_loss_tokens"), lacks=[] if rows and rows[0].rewards is not None else [LACKS["rewards"]],
    )  # fmt: skip


def _of_recorded(path: Path) -> Dump:
    run = path.parent.parent.parent
    manifest = path.parent / MANIFEST
    facts = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    rows = _rows(_samples(path), {}, None, _tables(run))
    lacks = [LACKS["rows"], *([] if rows and rows[0].rewards is not None else [LACKS["rewards"]])]
    return Dump(source=f"native rows of {path.parent.name}", rows=rows, settings=in_current_names(facts.get("settings", {})), lacks=lacks)


def _rows(samples: list[Sample], forward: dict[str, np.ndarray], version: int | None, tables: Tables) -> list[DumpedRow]:
    sizes: dict[tuple[int, int], int] = {}
    for rollout, prompt, generation in tables:
        sizes[rollout, prompt] = max(sizes.get((rollout, prompt), 0), generation + 1)
    rows = []
    for sample in samples:
        key, first = (sample.rollout, sample.prompt_number), int(np.argmax(sample.mask))
        row = tables.get((*key, sample.row % sizes[key])) if key in sizes else None
        name = f"{sample.rollout}/{sample.row}"
        logp, ref = (_scattered(sample, forward.get(f"{kind}/{name}"), first) for kind in ("logprobs", "references"))
        old = None if sample.on_policy_version == version else getattr(sample, "old_logprobs", None)
        if old is not None:  # where a sampler gave none, the current log-prob counts
            old = old[first:].astype(np.float64)
            old = old if logp is None else np.where(np.isnan(old), logp, old)
        rows.append(DumpedRow(
            mask=sample.mask[first:].astype(np.float64), length=len(sample.mask) - first, group=f"{sample.rollout}/{sample.prompt_number}",
            rewards=None if row is None else _rewards(row), advantage=sample.advantage, logp=logp, ref=ref,
            old=old, sampler=sample.sampler_logprobs[first:].astype(np.float64), is_truncated=sample.is_truncated,
            is_zero_std=sample.is_zero_std, tokens=sample.token_ids,
        ))  # fmt: skip
    return rows


def _scattered(sample: Sample, values: np.ndarray | None, first: int) -> np.ndarray | None:
    if values is None:
        return None
    full = np.zeros(len(sample.mask))
    full[sample.mask] = values
    return full[first:]


def _tables(run: Path) -> Tables:
    return {
        (row["rollout"], row["prompt_number"], row["generation"]): row
        for path in sorted((run / "completions").glob("step_*.parquet"))
        for row in _table(path)
    }


def _table(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    names = pyarrow.parquet.read_schema(path).names
    wanted = ("rollout", "prompt_number", "generation", "advantage")
    if missing := [name for name in wanted if name not in names]:
        raise refusal(f"{path} has no column {', '.join(missing)}: it is no table of completions of this package.")
    return pyarrow.parquet.read_table(path, columns=[n for n in names if n in wanted or n.startswith("rewards/")]).to_pylist()


def _rewards(row: dict[str, Any]) -> list[float | None]:
    return [value for name, value in row.items() if name.startswith("rewards/")]
