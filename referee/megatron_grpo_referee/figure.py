"""Figure of the findings of `referee`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.run.metrics.plots import BLUE, GREY, RED, write_figure
from megatron_grpo_referee.dump import Dump
from megatron_grpo_referee.findings import Finding, first_different


def draw(dump: Dump, found: Sequence[Finding], path: Path) -> str:
    """Draw a bar for each quantity: its largest difference relative to the rounding limit.

    Returns:
        A line with the path of the image, or the reason why there is none.
    """

    def fill(axes: Any) -> None:
        sizes = [min(max(one.difference, 1e-3), 1e9) for one in found]
        bars = axes.barh(range(len(found)), sizes, color=[RED if one.is_different else BLUE for one in found])
        axes.bar_label(bars, labels=[f"{one.theirs:.4g} / {one.ours:.4g}" for one in found], padding=4, fontsize=8)
        axes.set(xscale="log", xlabel="largest difference, in units of what rounding explains (beside the bars: theirs / ours)")
        axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1.0)
        axes.set_yticks(range(len(found)), [one.quantity for one in found])
        axes.invert_yaxis()
        axes.margins(x=0.25)
        first = first_different(found)
        verdict = "nothing differs by more than rounding" if first is None else f"first: {first.quantity}, {first.cause}"
        axes.set_title(f"{dump.source}: {verdict}", fontsize=10)

    return write_figure(path, [fill], width=10, height=1.6 + 0.45 * len(found))
