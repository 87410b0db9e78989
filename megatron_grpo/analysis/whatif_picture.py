"""The variants of `whatif` as bars: cosine, gradient norm, clipped share, effective sample size."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.base.files import PAINTER, written_whole

PANELS = (
    ("cosine with the run's gradient", lambda one: one.cosine or 0.0),
    ("gradient norm", lambda one: one.grad_norm),
    ("clipped share of tokens", lambda one: one.clip_low + one.clip_high),
    ("effective sample size", lambda one: one.ess),
)


def draw(told: Sequence[Any], path: Path, step: int) -> str:
    """Writes the picture; returns the line that says where it is, or why there is none."""
    if importlib.util.find_spec("matplotlib") is None:
        return "No picture: matplotlib is not installed (pip install megatron-grpo[plot])."
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 1.2 + 0.42 * len(told)), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharey=True)
    names = [one.name for one in told]
    for axis, (title, value) in zip(axes, PANELS, strict=True):
        values = [value(one) for one in told]
        bars = axis.barh(range(len(told)), values, color=["#5b6770", *["#2563a8"] * (len(told) - 1)])
        axis.bar_label(bars, labels=[f"{one:.3g}" for one in values], padding=3, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(told)), names)
    axes[0].invert_yaxis()
    figure.suptitle(f"Optimizer step {step + 1} under other settings", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as partial:
        figure.savefig(partial, format="png", dpi=120, metadata={"Software": PAINTER})
    return f"Picture: {path}"
