"""Diagnosis of a replayed step: a verdict, a table and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from megatron_grpo.commands.analysis.printing import format_columns
from megatron_grpo.commands.analysis.step_dump import StepDump
from megatron_grpo.core.types import RowKey
from megatron_grpo.run.metrics.summary import USUAL

SHOWN = 8  # maximum rows and tensors that are listed
ROW_COLUMNS = {"rollout": ">8", "row": ">6", "prompt": ">8", "tokens": ">8", "norm alone": ">13.5g", "share": ">8.0%",
               "vs run": ">10.2g", "vs sampler": ">12.3g", "  not finite": ""}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedRow:
    """A row computed alone.

    Args:
        key: (rollout, row).
        norm: Norm of the row's contribution to the gradient.
        what: Values of the row that are not finite, in words; empty if all are finite.
        num_tokens: Trained tokens.
        forward: Maximum difference between the row's log-probs in the replay and in the run; None if the run recorded none.
        gap: Maximum difference between trainer and sampler log-probs, in nats.
        token: Index of the trained token with that difference.
        prompt_number: Number of the prompt.
    """

    key: RowKey
    norm: float
    what: str
    num_tokens: int
    forward: float | None
    gap: float
    token: int
    prompt_number: int


def diagnose(
    step_dump: StepDump, layout: Any, metrics: Mapping[str, float], weights: dict[str, Any], first: str | None, rows: Sequence[IsolatedRow],
    copies: list[dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Diagnose a replayed step.

    Args:
        weights: Comparison of the weights with those of the run.
        first: First module with an output that is not finite; None if there is none.
        rows: Rows of the step, each computed alone.
        copies: Loss and gradient norm with each differing copy of a weight.

    Returns:
        Why the step was recorded (`why`); what is wrong, in sentences (`verdict`); loss and gradient norm of the replay (`numbers`) and the
        metrics of the run (`was`); `weights`, `rows` and `copies`; the layout of the replay, in words (`ranks`); and the missing parts of
        the step dump (`lacks`).
    """
    recorded = {name: float(value) for name, value in step_dump.facts.get("metrics", {}).items()}
    numbers = {name: float(metrics[name]) for name in ("loss", "grad_norm")}
    verdict = [*_weights(weights), *_differing_elements(step_dump)]
    if not weights["not_finite"]:
        verdict += _rows_not_finite(rows, first)
    if not verdict:
        verdict = _finite_in_replay(step_dump, recorded, weights, rows)
    sizes = f"{layout.world_size} ranks (TP {layout.tp}, PP {layout.pp}, CP {layout.cp}, EP {layout.ep})"
    return {
        "why": step_dump.facts["why"], "verdict": verdict, "numbers": numbers, "was": recorded, "weights": weights, "rows": rows,
        "copies": copies, "ranks": "1 rank" if layout.world_size == 1 else sizes, "lacks": step_dump.lacks(),
    }  # fmt: skip


def report_lines(findings: Mapping[str, Any]) -> list[str]:
    """Format what `diagnose` found as lines of text."""
    weights = "not compared: none were recorded"
    if findings["weights"]["recorded"]:
        weights = "{same} of {tensors} tensors are those of the run, bit for bit".format(**findings["weights"])
    losses = [(name, findings["numbers"][name], findings["was"].get(name, math.nan)) for name in ("loss", "grad_norm")]
    total = math.fsum(row.norm for row in findings["rows"] if math.isfinite(row.norm))
    worst = sorted(findings["rows"], key=lambda row: (not row.what, math.isfinite(row.norm), -row.norm if math.isfinite(row.norm) else 0.0))
    rows = []
    for row in worst[:SHOWN]:
        share = row.norm / total if total and math.isfinite(row.norm) else None
        rows.append((*row.key, row.prompt_number, row.num_tokens, row.norm, share, row.forward, row.gap, f"  {row.what}"))
    return [
        f"kept because {findings['why']}",
        f"replayed on {findings['ranks']}",
        f"weights: {weights}",
        *(f"not in the step dump: {missing}" for missing in findings["lacks"]),
        "",
        *format_columns({"": "<14", "here": ">14.6g", "in the run": ">14.6g"}, losses),
        "",
        *format_columns(ROW_COLUMNS, rows),
        *([f"    and {len(worst) - SHOWN} more rows (--json true lists all)"] if len(worst) > SHOWN else []),
        *("with rank {rank}'s copy of {name}: loss {loss:.6g}, grad_norm {grad_norm:.6g}".format(**copy) for copy in findings["copies"]),
        "",
        *findings["verdict"],
    ]


def _weights(weights: Mapping[str, Any]) -> list[str]:
    bad = [f"FAULT: the weight {name} is not finite ({description})." for name, description in weights["not_finite"].items()]
    return [*bad[:SHOWN], *([f"and {len(bad) - SHOWN} more weights."] if len(bad) > SHOWN else [])]


def _rows_not_finite(rows: Sequence[IsolatedRow], first: str | None) -> list[str]:
    lines = []
    row_causes = [row for row in rows if row.what and "the policy's log-probs" not in row.what]
    backward_only = [row for row in rows if row not in row_causes and (row.what or not math.isfinite(row.norm))]
    for row in row_causes[:SHOWN]:
        lines.append(f"FAULT: {_name(row)}: its {row.what} are not finite. Without it the rest of the step is "
                     + ("finite." if len(row_causes) == 1 and not backward_only else "examined row by row above."))  # fmt: skip
    for row in backward_only[:SHOWN]:
        location = f"; the first output that is not finite is that of {first}" if first else "; its forward is finite, its backward is not"
        lines.append(f"FAULT: {_name(row)}: its values are finite and its gradient is not{location}.")
    return lines


def _finite_in_replay(
    step_dump: StepDump, recorded: Mapping[str, float], weights: Mapping[str, Any], rows: Sequence[IsolatedRow]
) -> list[str]:
    lines = []
    if not math.isfinite(recorded.get("grad_norm", 0.0)):
        lines.append("All values are finite here but were not in the run, with the same rows and weights: the cause is "
                     "in the ranks of the run. Check the machine, its kernels and its dtype.")  # fmt: skip
    max_difference = max((row.forward for row in rows if row.forward is not None), default=None)
    usual = USUAL[step_dump.facts["settings"].get("torch_dtype", "float32")]  # differences between two layouts or machines are smaller
    if weights["recorded"] and weights["same"] < weights["tensors"]:
        lines.append(f"{weights['tensors'] - weights['same']} tensors differ from those of the run, so its values may not be reproduced.")
    elif max_difference is not None and max_difference > usual:
        lines.append(f"The forward pass of the run is not reproduced with these weights: log-probs differ by up to {max_difference:.3g} "
                     "nats. Check the trainer: its kernels, its dtype, its ranks.")  # fmt: skip
    if step_dump.facts["kind"] == "logp_gap":
        worst = max(rows, key=lambda row: row.gap)
        is_reproduced = max_difference is not None and max_difference <= usual
        forward = "the run's forward pass is reproduced, so" if is_reproduced else "if the forward pass is reproduced,"
        lines.append(f"The largest difference from the sampler is {worst.gap:.3g} nats, at trained token {worst.token} of {_name(worst)}: "
                     f"{forward} check the sampler: stale weights, a cache, another setting (megatron-grpo mismatch).")  # fmt: skip
    if step_dump.facts["kind"] == "spike" and rows:
        worst = max(rows, key=lambda row: row.norm)
        total = math.fsum(row.norm for row in rows)
        lines.append(f"The largest gradient is that of {_name(worst)}: norm {worst.norm:.4g} alone, {worst.norm / total:.0%} of "
                     f"the sum over {len(rows)} rows.")  # fmt: skip
    if step_dump.facts["mismatches"] and not step_dump.replicas():
        first = step_dump.facts["mismatches"][0]
        lines.append(f"Replicas of {first['name']} ({first['kind']}) differed, and their values were not recorded.")
    return lines or ["The step is reproduced, and nothing in it is wrong: the cause is outside the step."]


def _differing_elements(step_dump: StepDump) -> list[str]:
    """Describe the elements at which copies of a tensor on several ranks differ."""
    copies: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for rank, name, values in step_dump.replicas():
        copies.setdefault(name, []).append((rank, values))
    lines = []
    for name, ranks in list(copies.items())[:SHOWN]:
        for (first, a), (second, b) in pairwise(ranks):
            if a.dtype is b.dtype and a.shape == b.shape and (difference := _difference(a, b)):
                lines.append(f"FAULT: {name} differs between ranks {first} and {second}: {difference}.")
    return lines


def _difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """Describe the values whose bits differ; empty if there are none."""
    x, y = (values.reshape(-1, 1).view(torch.uint8).numpy() for values in (a, b))  # the bytes of each value
    differing = np.flatnonzero((x != y).any(axis=1)).tolist()
    if not differing:
        return ""
    first = differing[0]
    coordinates = list(map(int, np.unravel_index(first, a.shape)))
    bits = np.unpackbits(x[first] ^ y[first], bitorder="little")
    bits_text = f"bit {int(bits.argmax())} of {len(bits)}" if bits.sum() == 1 else f"{bits.sum()} of {len(bits)} bits"
    values = f"{a.flatten()[first].item():g} and {b.flatten()[first].item():g}, which differ in {bits_text}"
    return f"{len(differing)} of {a.numel()} values, the first at {coordinates}: {values}"


def _name(row: IsolatedRow) -> str:
    return f"row {row.key[1]} of rollout {row.key[0]} (prompt {row.prompt_number})"
