"""Report of `mismatch` as statistics, text, JSON and an image, and the image of `compare-losses`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.commands.analysis.operations import ASIDE, ComparedRow, Operation, first_difference
from megatron_grpo.commands.analysis.printing import format_columns
from megatron_grpo.run.metrics.plots import BLUE, GREY, RED, write_figure, write_panels
from megatron_grpo.run.metrics.records import JsonlFile

BINS = 40
DRIFT = "sampling/sampling_logp_difference"  # in metrics.jsonl, with /mean and /max
PANELS: dict[str, Callable[[Any], float]] = {
    "cosine with the run's gradient": lambda outcome: outcome["cosine"] or 0.0,
    "gradient norm": lambda outcome: outcome["grad_norm"],
    "clipped share of tokens": lambda outcome: outcome["clip_low"] + outcome["clip_high"],
    "effective sample size": lambda outcome: outcome["ess"],
}


# Findings of `mismatch`, as in the object of `--json`:
#   subject       what is examined
#   step          optimizer step of the weights
#   dtype         dtype of the trainer
#   ranks         number of tensor-parallel ranks
#   source        origin of the rows, in words
#   rows          number of compared rows
#   difference    statistics from `summarize_differences`
#   bound         usual maximum difference of log-probs, in nats
#   worst_tokens  tokens with the largest differences, from `find_worst_tokens`
#   drift         difference of trainer and sampler during the run, from `read_drift`
#   row           index of the row whose operations were compared
#   limit         limit of the relative difference of an operation
#   operations    fields of each compared operation, and whether it is over the limit
#   notes         notes for the user
#   push          problem of the weight sync; empty without one
#   named         names of the operations that are over the limit
#   verdict       what differs by more than rounding; empty if nothing does
Findings = Mapping[str, Any]


def describe_differences(findings: Findings, operations: Sequence[Operation]) -> str:
    """Describe what differs by more than rounding; empty if nothing does.

    Args:
        findings: Findings without the verdict.
        operations: Compared operations; empty if the model is not supported.
    """
    sentences = []
    if (first := first_difference([op for op in operations if op.name not in ASIDE])) is not None:
        shards = f" (shard of rank {', '.join(map(str, first.ranks))})" if len(first.ranks) < findings["ranks"] else ""
        sentences.append(f"{first.describe}: {first.difference:.2g} of its size{shards}{first.cause and f'; {first.cause}'}.")
    sentences += [ASIDE[op.name] for op in operations if op.name in ASIDE and op.is_over]
    if not sentences and findings["push"]:
        sentences.append("No operation differs by more than rounding, but the verification of the weight sync fails.")
    if not sentences and not operations and findings["difference"]["beyond"]:
        sentences.append(f"Tokens differ by more than {findings['bound']:g} nats, and the operations of this model cannot be compared.")
    return " ".join(sentences)


def report_lines(findings: Findings, rows: Sequence[ComparedRow], operations: Sequence[Operation], figure: Path | None) -> list[str]:
    """Format the findings as lines of text.

    Args:
        rows: Compared rows.
        operations: Compared operations; empty if the model is not supported.
        figure: Image that was written; None without one.
    """
    numbers, drift = findings["difference"], findings["drift"]
    ranks = "one rank" if findings["ranks"] == 1 else f"{findings['ranks']} tensor-parallel ranks"
    lines = [
        f"{findings['subject']}, step {findings['step']}, {findings['dtype']}, {ranks}",
        f"{len(rows)} rows, {numbers['tokens']:,} tokens, {findings['source']}",
        "",
        "|trainer - sampler| in nats: "
        + ", ".join(f"{name} {numbers[name]:.2g}" for name in ("mean", "median", "90 %", "99 %", "largest"))
        + f"; beyond {findings['bound']:g}: {numbers['beyond']:.1%}",
        "",
        *format_columns(
            {"row": ">5", "position": ">9", "sampler": ">11.4f", "trainer": ">10.4f", "difference": ">12.2e", "  token": ""},
            ((t["row"], t["place"], t["sampler"], t["trainer"], t["difference"], f"  {t['text']!r}") for t in findings["worst_tokens"]),
        ),
    ]
    if drift:
        means = ", ".join(f"{entry['mean']:.2g} at step {entry['step']}" for entry in (drift[0], drift[-1]))
        largest = "{max:.2g} at step {step}".format(**max(drift, key=lambda entry: entry["max"]))
        lines += ["", f"While the run trained: mean {means}; largest {largest}"]
    if operations:
        row = rows[findings["row"]]
        lines += [
            "",
            f"Row {findings['row']} ({row.opening} prompt tokens, {len(row.tokens) - row.opening} completion tokens), each operation on "
            f"the sampler's inputs; over: more than {findings['limit']:g}",
            *format_columns(
                {"operation": "<24", "of its size": ">12.1e", "largest": ">11.1e", "equal bits": ">12.1%", "": ""},
                ((op.describe, op.difference, op.largest, op.equal, "  <- over" * op.is_over) for op in _shortened(operations)),
            ),
        ]
    verdict = findings["verdict"] or "Nothing differs by more than rounding."
    ending = [findings["push"], verdict, f"Figure: {figure}" if figure else ""]
    return [*lines, "", *findings["notes"], *filter(None, ending)]


def _shortened(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations above the limit, and of all others the layer with the largest difference of each kind."""
    worst: dict[str, Operation] = {}
    for op in operations:
        kind = op.describe.partition(", ")[2] or op.name
        if kind not in worst or op.difference > worst[kind].difference:
            worst[kind] = op
    names = {op.name for op in worst.values()} | {op.name for op in operations if op.is_over}
    return [op for op in operations if op.name in names]


# ---- numbers ---------------------------------------------------------------------------------------------------------------------------


def summarize_differences(rows: Sequence[ComparedRow], bound: float) -> dict[str, float]:
    """Return statistics of |trainer - sampler| in nats over all sampled tokens; `beyond` is the fraction above `bound`, with NaN above."""
    differences = np.abs(np.concatenate([row.differences for row in rows]))
    return {
        "tokens": len(differences),
        "mean": float(differences.mean()),
        "median": float(np.median(differences)),
        "90 %": float(np.quantile(differences, 0.9)),
        "99 %": float(np.quantile(differences, 0.99)),
        "largest": float(differences.max()),
        "beyond": float((~(differences <= bound)).mean()),
    }


def worst_row(rows: Sequence[ComparedRow]) -> int:
    """Return the index of the row that contains the token with the largest difference. NaN counts as the largest."""
    return int(np.argmax([np.nan_to_num(np.abs(row.differences), nan=np.inf).max() for row in rows]))


def find_worst_tokens(rows: Sequence[ComparedRow], tokenizer: Any, max_tokens: int) -> list[dict[str, Any]]:
    """List the sampled tokens with the largest differences; NaN counts as the largest.

    Args:
        tokenizer: Tokenizer that decodes the tokens.
        max_tokens: Maximum number of tokens.

    Returns:
        {"row", "place", "text", "sampler", "trainer", "difference"} of each token. `place` counts the tokens of a row from the start of the
        prompt; log-probs are in nats.
    """
    positions = [(number, int(index)) for number, row in enumerate(rows) for index in np.flatnonzero(row.is_sampled)]
    differences = np.concatenate([row.differences for row in rows])
    tokens = []
    for index in np.argsort(-np.nan_to_num(np.abs(differences), nan=np.inf), kind="stable")[:max_tokens]:
        number, position = positions[index]
        row = rows[number]
        token = {"row": number, "place": position, "text": tokenizer.decode([int(row.tokens[position])])}
        values = {"sampler": row.sampler[position], "trainer": row.trainer[position], "difference": differences[index]}
        tokens.append(token | {name: float(value) for name, value in values.items()})
    return tokens


def read_drift(run: Path | None) -> list[dict[str, Any]]:
    """Return {"step", "mean", "max"} of |trainer - sampler| in nats, as the run logged them. Steps that trained nothing have no entry.

    Args:
        run: Output directory of the run; None without one, which gives no entries.
    """
    return [
        {"step": record["step"]} | {name: float(record[f"{DRIFT}/{name}"]) for name in ("mean", "max")}
        for record in (JsonlFile(run / "metrics.jsonl").all() if run is not None else [])
        if all(isinstance(record.get(f"{DRIFT}/{name}"), (int, float)) for name in ("mean", "max"))
    ]


# ---- images ----------------------------------------------------------------------------------------------------------------------------


def draw(path: Path, findings: Findings, rows: Sequence[ComparedRow], operations: Sequence[Operation]) -> bool:
    """Write the findings of `mismatch` as a PNG.

    Returns:
        False if matplotlib is not installed, and no file was written.
    """
    panels = [partial(_histogram, rows=rows), partial(_tokens, rows=rows)]
    panels += [partial(_operations, operations=operations, limit=findings["limit"])] if operations else []
    panels += [partial(_drift, drift=findings["drift"])] if findings["drift"] else []
    return write_panels(path, panels, columns=2, width=11, height=4 * (len(panels) + 1) // 2, dpi=100)


def draw_variants(outcomes: Sequence[Any], path: Path, step: int) -> str:
    """Write the findings of `compare-losses` as a PNG with bar charts.

    Args:
        step: Optimizer steps before the recorded one.

    Returns:
        A line with the path of the image, or the reason why there is none.
    """

    def fill(axes: Any, title: str, value: Callable[[Any], float]) -> None:
        values = [value(outcome) for outcome in outcomes]
        bars = axes.barh(range(len(outcomes)), values, color=["#5b6770", *["#2563a8"] * (len(outcomes) - 1)])
        axes.bar_label(bars, labels=[f"{bar_value:.3g}" for bar_value in values], padding=3, fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.2)
        axes.grid(visible=False)
        names = [outcome["name"] if axes.get_subplotspec().is_first_col() else "" for outcome in outcomes]
        axes.set_yticks(range(len(outcomes)), names)
        axes.invert_yaxis()
        axes.figure.suptitle(f"Optimizer step {step + 1} under other settings", fontsize=11)

    panels = [partial(fill, title=title, value=value) for title, value in PANELS.items()]
    return write_figure(path, panels, columns=len(PANELS), width=13, height=1.2 + 0.42 * len(outcomes))


def _histogram(axes: Any, rows: Sequence[ComparedRow]) -> None:
    differences = np.abs(np.concatenate([row.differences for row in rows]))
    positive = differences[np.isfinite(differences) & (differences > 0)]
    if len(positive):
        low, high = positive.min(), max(positive.max(), positive.min() * 1.01)
        axes.hist(positive, bins=np.geomspace(low, high * 1.001, BINS), color=BLUE)
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter("")
    num_equal = int((differences == 0).sum())
    axes.set(title=f"{len(differences):,} tokens, {num_equal:,} of them equal", xlabel="|trainer - sampler|, nats", ylabel="tokens")


def _tokens(axes: Any, rows: Sequence[ComparedRow]) -> None:
    sampler = np.concatenate([row.sampler[row.is_sampled] for row in rows])
    trainer = np.concatenate([row.trainer[row.is_sampled] for row in rows])
    low = float(min(np.nanmin(sampler), np.nanmin(trainer)))
    axes.plot([low, 0], [low, 0], color=GREY, linewidth=1.0)
    axes.plot(sampler, trainer, ".", color=BLUE, markersize=4, alpha=0.6)
    axes.set(title="log-prob of each token", xlabel="sampler, nats", ylabel="trainer, nats")


def _operations(axes: Any, operations: Sequence[Operation], limit: float) -> None:
    values = [max(op.difference, 1e-9) for op in operations]
    colours = [RED if op.is_over else BLUE for op in operations]
    axes.scatter(range(len(values)), values, c=colours, s=14)
    axes.axhline(limit, color=GREY, linewidth=1.0, linestyle="--")
    axes.set_yscale("log")
    first = next((index for index, op in enumerate(operations) if op.is_over), None)
    if first is not None:
        side = "right" if first > len(values) / 2 else "left"
        axes.annotate(operations[first].describe, (first, values[first]), xytext=(-6 if side == "right" else 6, 6),
                      textcoords="offset points", ha=side, color=RED)  # fmt: skip
    axes.margins(y=0.12)
    axes.set(title="each operation on the sampler's inputs", xlabel="operation, in order (equal bits: at the bottom)", ylabel="of its size")


def _drift(axes: Any, drift: Sequence[Mapping[str, Any]]) -> None:
    steps, means, largest = ([entry[name] for entry in drift] for name in ("step", "mean", "max"))
    axes.plot(steps, means, "o-", color=BLUE, markersize=3, label="mean")
    axes.plot(steps, largest, "o-", color=RED, markersize=3, label="largest")
    if min(means) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter("")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize="small")
    axes.set(title="while the run trained", xlabel="optimizer step", ylabel="|trainer - sampler|, nats")
