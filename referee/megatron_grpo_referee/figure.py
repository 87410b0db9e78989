"""Figure of the findings of `referee`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_grpo.run.metrics.plots import apply_style, can_draw, new_figure, write_png
from megatron_grpo_referee.dump import Dump
from megatron_grpo_referee.findings import Finding, first_different


def draw(dump: Dump, found: Sequence[Finding], path: Path) -> str:
    """Write a bar for each quantity: its largest difference, in units of what rounding explains.

    Args:
        dump: The dump.
        found: Findings in order.
        path: File to write.

    Returns:
        A line with the path of the image, or the reason why there is none.
    """
    if not can_draw():
        return "No figure: matplotlib is not installed (pip install megatron-grpo[plot])."
    figure = new_figure(10, 1.6 + 0.45 * len(found))
    axes = figure.add_subplot()
    sizes = [min(max(one.difference, 1e-3), 1e9) for one in found]
    bars = axes.barh(range(len(found)), sizes, color=["#c0392b" if one.is_different else "#2f6f9f" for one in found])
    axes.bar_label(bars, labels=[f"{one.theirs:.4g} / {one.ours:.4g}" for one in found], padding=4, fontsize=8)
    axes.set(xscale="log", xlabel="largest difference, in units of what rounding explains (beside the bars: theirs / ours)")
    axes.axvline(1.0, color="#8a949e", linestyle="--", linewidth=1.0)
    axes.set_yticks(range(len(found)), [one.quantity for one in found])
    axes.invert_yaxis()
    axes.margins(x=0.25)
    apply_style(axes)
    first = first_different(found)
    verdict = "nothing differs by more than rounding" if first is None else f"first: {first.quantity}, {first.cause}"
    axes.set_title(f"{dump.source}: {verdict}", fontsize=10)
    return f"Figure: {write_png(figure, path)}"
