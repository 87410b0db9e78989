"""How far trainer and sampler are apart, token by token: the numbers and their picture; and the picture of `whatif`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.analysis.operations import Operation, Row
from megatron_grpo.base.files import PAINTER, written_whole

BINS = 40
DRIFT = ("sampling/logp_difference/mean", "sampling/logp_difference/max")  # of metrics.jsonl
PANELS = (
    ("cosine with the run's gradient", lambda one: one.cosine or 0.0),
    ("gradient norm", lambda one: one.grad_norm),
    ("clipped share of tokens", lambda one: one.clip_low + one.clip_high),
    ("effective sample size", lambda one: one.ess),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One that was drawn. `place` counts the tokens of its row, the prompt's too; log-probs are in nats."""

    row: int
    place: int
    text: str
    sampler: float
    trainer: float

    @property
    def difference(self) -> float:
        return self.trainer - self.sampler


def quantiles(rows: Sequence[Row], bound: float) -> dict[str, float]:
    """Of |trainer - sampler| in nats over all drawn tokens. NaN counts as beyond the bound."""
    away = np.abs(np.concatenate([row.differences for row in rows]))
    return {
        "tokens": len(away),
        "mean": float(away.mean()),
        "median": float(np.median(away)),
        "90 %": float(np.quantile(away, 0.9)),
        "99 %": float(np.quantile(away, 0.99)),
        "largest": float(away.max()),
        "beyond": float((~(away <= bound)).mean()),
    }


def worst_row(rows: Sequence[Row]) -> int:
    """The row with the token that is furthest off; NaN is."""
    return int(np.argmax([np.nan_to_num(np.abs(row.differences), nan=np.inf).max() for row in rows]))


def worst_tokens(rows: Sequence[Row], tokenizer: Any, most: int) -> list[Token]:
    found = []
    for number, row in enumerate(rows):
        for place in np.flatnonzero(row.drawn):
            found.append((abs(float(row.trainer[place]) - float(row.sampler[place])), number, int(place)))
    found.sort(key=lambda one: (-np.nan_to_num(one[0], nan=np.inf), *one[1:]))
    return [
        Token(
            row=number,
            place=place,
            text=tokenizer.decode([int(rows[number].tokens[place])]),
            sampler=float(rows[number].sampler[place]),
            trainer=float(rows[number].trainer[place]),
        )
        for _, number, place in found[:most]
    ]


def drift_of(run: Path | None) -> list[tuple[int, float, float]]:
    """(step, mean, largest) of |trainer - sampler| that a run has logged while it trained."""
    found = []
    path = None if run is None else run / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path is not None and path.is_file() else ():
        try:
            record = json.loads(line)
            found.append((int(record["step"]), float(record[DRIFT[0]]), float(record[DRIFT[1]])))
        except (ValueError, KeyError, TypeError):
            continue  # a line that is being written, or a step that trained nothing
    return found


def draw(
    path: Path, rows: Sequence[Row], operations: Sequence[Operation], drift: Sequence[tuple[int, float, float]], *, limit: float
) -> bool:
    """Writes a PNG of what `mismatch` found; whether matplotlib is there to draw it."""
    panels = [_histogram, _tokens, *([_operations] if operations else []), *([_drift] if drift else [])]
    with _drawn(path, figsize=(11, 4 * (len(panels) + 1) // 2), dpi=100) as figure:
        for place, panel in enumerate(panels if figure else ()):
            axes = figure.add_subplot((len(panels) + 1) // 2, 2, place + 1)
            panel(axes, rows, operations, drift, limit)
            axes.grid(color="#e4e7ea", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
    return figure is not None


def draw_variants(told: Sequence[Any], path: Path, step: int) -> str:
    """Writes a PNG of what `whatif` found, as bars; returns the line that says where it is, or why there is none."""
    with _drawn(path, figsize=(13, 1.2 + 0.42 * len(told)), dpi=120) as figure:
        if figure is None:
            return "No picture: matplotlib is not installed (pip install megatron-grpo[plot])."
        axes = figure.subplots(1, len(PANELS), sharey=True)
        for axis, (title, value) in zip(axes, PANELS, strict=True):
            values = [value(one) for one in told]
            bars = axis.barh(range(len(told)), values, color=["#5b6770", *["#2563a8"] * (len(told) - 1)])
            axis.bar_label(bars, labels=[f"{one:.3g}" for one in values], padding=3, fontsize=8)
            axis.set_title(title, fontsize=10)
            axis.margins(x=0.2)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_yticks(range(len(told)), [one.name for one in told])
        axes[0].invert_yaxis()
        figure.suptitle(f"Optimizer step {step + 1} under other settings", fontsize=11)
    return f"Picture: {path}"


@contextmanager
def _drawn(path: Path, *, figsize: tuple[float, float], dpi: int) -> Iterator[Any]:
    """A figure, written as a PNG when it is drawn; None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        yield None
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize, dpi=dpi, layout="constrained")
    yield figure
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as stream:
        figure.savefig(stream, format="png", metadata={"Software": PAINTER})


BLUE, RED, GREY = "#2f6f9f", "#c0392b", "#8a949e"


def _histogram(axes: Any, rows: Sequence[Row], *others: Any) -> None:
    away = np.abs(np.concatenate([row.differences for row in rows]))
    there = away[np.isfinite(away) & (away > 0)]
    if len(there):
        low, high = there.min(), max(there.max(), there.min() * 1.01)
        axes.hist(there, bins=np.geomspace(low, high * 1.001, BINS), color=BLUE)
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter("")
    same = int((away == 0).sum())
    axes.set(title=f"{len(away):,} tokens, {same:,} of them equal", xlabel="|trainer - sampler|, nats", ylabel="tokens")


def _tokens(axes: Any, rows: Sequence[Row], *others: Any) -> None:
    sampler = np.concatenate([row.sampler[row.drawn] for row in rows])
    trainer = np.concatenate([row.trainer[row.drawn] for row in rows])
    low = float(min(np.nanmin(sampler), np.nanmin(trainer)))
    axes.plot([low, 0], [low, 0], color=GREY, linewidth=1.0)
    axes.plot(sampler, trainer, ".", color=BLUE, markersize=4, alpha=0.6)
    axes.set(title="log-prob of each token", xlabel="sampler, nats", ylabel="trainer, nats")


def _operations(axes: Any, rows: Any, operations: Sequence[Operation], drift: Any, limit: float) -> None:
    values = [max(one.difference, 1e-9) for one in operations]
    colours = [RED if one.is_over else BLUE for one in operations]
    axes.scatter(range(len(values)), values, c=colours, s=14)
    axes.axhline(limit, color=GREY, linewidth=1.0, linestyle="--")
    axes.set_yscale("log")
    first = next((place for place, one in enumerate(operations) if one.is_over), None)
    if first is not None:
        side = "right" if first > len(values) / 2 else "left"
        axes.annotate(operations[first].in_words, (first, values[first]), xytext=(-6 if side == "right" else 6, 6),
                      textcoords="offset points", ha=side, color=RED)  # fmt: skip
    axes.margins(y=0.12)
    axes.set(title="each operation on the sampler's inputs", xlabel="operation, in order (equal bits: at the bottom)", ylabel="of its size")


def _drift(axes: Any, rows: Any, operations: Any, drift: Sequence[tuple[int, float, float]], limit: Any) -> None:
    steps, means, largest = zip(*drift, strict=True)
    axes.plot(steps, means, "o-", color=BLUE, markersize=3, label="mean")
    axes.plot(steps, largest, "o-", color=RED, markersize=3, label="largest")
    if min(means) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter("")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize="small")
    axes.set(title="while the run trained", xlabel="optimizer step", ylabel="|trainer - sampler|, nats")
