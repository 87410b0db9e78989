"""Reader of this package's files: a step dump, the recorded rows of a checkpoint, or a table of completions. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.core.base.files import read_object
from megatron_grpo.core.types import Sample
from megatron_grpo.run.checkpoint.manifest import MANIFEST
from megatron_grpo.run.checkpoint.samples import read_samples
from megatron_grpo_referee.dump import Dump, DumpedMicroBatch, DumpedRow, load_arrays, read_rewards, reading, refusal

FORMAT = 1
LACKS = {
    "rows": "Recorded rows have no log-probs of the training forward. For loss and gradient, replay a step dump (--debug_dump_steps).",
    "table": "A table of completions has rewards and advantages only. For the loss, use a step dump (--debug_dump_steps).",
    "rewards": "No table of completions of this run has these rows: advantages are not recomputed. Keep --log_completions_steps 1.",
}


def read(path: Path, step: int | None, s: Any) -> Dump:
    """Read a dump.

    Args:
        step: Unused, because the path determines the step.
    """
    if path.suffix == ".parquet":
        rows = [DumpedRow(group=str(row["prompt_number"]), rewards=_rewards(row), advantage=row["advantage"]) for row in _table(path)]
        return Dump(source=f"native table {path.name}", rows=rows, lacks=[LACKS["table"]])
    if (path / "step_dump.json").is_file():
        return _read_step_dump(path)
    recorded = path if path.name == "trained.npz" else path / "trained.npz"
    if recorded.is_file():
        return _read_recorded(recorded)
    raise refusal(f"{path} is no step dump (step_dump.json), no recorded rows (trained.npz, --record_rows true), no table (.parquet).")


def _read_step_dump(path: Path) -> Dump:
    facts = read_object(path / "step_dump.json")
    if facts.get("format") != FORMAT:
        raise refusal(f"{path} has format {facts.get('format')}. This version reads format {FORMAT}.")
    by_key = {sample.key: sample for file in sorted((path / "rows").glob("*.npz")) for sample in _samples(file)}
    forward = {name: values for file in sorted((path / "forward").glob("*.npz")) for name, values in load_arrays(file).items()}
    loss = facts.get("metrics", {}).get("loss")
    micro_batch = DumpedMicroBatch(loss=None if loss is None else float(loss), kl=facts.get("metrics", {}).get("kl"))
    return _dump(
        [by_key[key] for key in sorted(by_key)], path.parent.parent, facts["settings"], [], forward, facts["version"],
        source=facts["written_by"], is_native=True, micro_batches=[micro_batch], step=facts["step"],
        num_tokens=facts.get("num_loss_tokens"),
    )  # fmt: skip


def _read_recorded(path: Path) -> Dump:
    settings = read_object(path.parent / MANIFEST).get("settings", {})
    return _dump(_samples(path), path.parent.parent.parent, settings, [LACKS["rows"]], source=f"native rows of {path.parent.name}")


def _samples(path: Path) -> list[Sample]:
    with reading(path):
        return read_samples(path)


def _dump(samples: list[Sample], run: Path, settings: dict[str, Any], lacks: list[str], forward: Mapping[str, np.ndarray] | None = None,
          version: int | None = None, **facts: Any) -> Dump:  # fmt: skip
    tables = _tables(run)
    rows = [_row(sample, tables.get((sample.rollout, sample.prompt_number), {}), forward or {}, version) for sample in samples]
    if not rows or rows[0].rewards is None:
        lacks.append(LACKS["rewards"])
    return Dump(rows=rows, settings=settings, lacks=lacks, **facts)


def _row(sample: Sample, group: dict[int, Any], forward: Mapping[str, np.ndarray], version: int | None) -> DumpedRow:
    row = group.get(sample.row % (max(group) + 1)) if group else None
    first = int(np.argmax(sample.mask))

    def read_forward(kind: str) -> np.ndarray | None:
        values, full = forward.get(f"{kind}/{sample.rollout}/{sample.row}"), np.zeros(len(sample.mask))
        if values is not None:
            full[sample.mask] = values
        return None if values is None else full[first:]

    logp = read_forward("logprobs")
    old = None if sample.on_policy_version == version else getattr(sample, "old_logprobs", None)
    if old is not None:  # where a sampler gave none, the current log-prob counts
        old = old[first:].astype(np.float64)
        old = old if logp is None else np.where(np.isnan(old), logp, old)
    return DumpedRow(
        mask=sample.mask[first:].astype(np.float64), length=len(sample.mask) - first, group=f"{sample.rollout}/{sample.prompt_number}",
        rewards=None if row is None else _rewards(row), advantage=sample.advantage, logp=logp, ref=read_forward("references"),
        old=old, sampler=sample.sampler_logprobs[first:].astype(np.float64), is_truncated=sample.is_truncated,
        is_zero_std=sample.is_zero_std, tokens=sample.token_ids,
    )  # fmt: skip


def _tables(run: Path) -> dict[tuple[int, int], dict[int, dict[str, Any]]]:
    """Return the rows of a run's tables of completions: (rollout, prompt number) -> generation -> row."""
    found: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
    for path in sorted((run / "completions").glob("step_*.parquet")):
        for row in _table(path):
            found.setdefault((row["rollout"], row["prompt_number"]), {})[row["generation"]] = row
    return found


def _table(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    names = pyarrow.parquet.read_schema(path).names
    wanted = ("rollout", "prompt_number", "generation", "advantage")
    if missing := [name for name in wanted if name not in names]:
        raise refusal(f"{path} has no column {', '.join(missing)}: it is no table of completions of this package.")
    return pyarrow.parquet.read_table(path, columns=[n for n in names if n in wanted or n.startswith("rewards/")]).to_pylist()


def _rewards(row: dict[str, Any]) -> list[float | None]:
    return read_rewards(value for name, value in row.items() if name.startswith("rewards/"))
