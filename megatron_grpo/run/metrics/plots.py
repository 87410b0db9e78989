"""Figures with matplotlib (the extra `plot`), in one style, and the plots of a run (`plots/*.png`), drawn from metrics.jsonl.

matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.base.files import PAINTER, atomic_write
from megatron_grpo.run.metrics.records import to_python_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)
COLOURS = ("#2563a8", "#d1622b", "#3a8f5c", "#8a5aa8", "#b8892b", "#5b6770", "#c2407a", "#2aa5a0", "#c9ced3", "#111111")
History = Mapping[str, Sequence[tuple[int, float]]]  # metric name -> (step, value), ascending


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float, height: float, *, dpi: int = 120, layout: Any = "constrained", **settings: Any) -> Figure:
    """Return an empty figure on a canvas that needs no display.

    Args:
        width: Inches.
        height: Inches.
        dpi: Pixels per inch.
        layout: Layout engine of matplotlib.
        settings: Further arguments of `Figure`.
    """
    # The object interface, because pyplot keeps figures alive and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout=layout, **settings)
    FigureCanvasAgg(figure)
    return figure


def apply_style(axes: Any) -> None:
    """Apply the common style: a pale grid behind the curves, and no frame at the top and right.

    Args:
        axes: matplotlib's axes.
    """
    axes.grid(color="#e4e7ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def write_png(figure: Any, path: Path) -> Path:
    """Write a figure completely or not at all, and return its path. The directory is created if needed.

    Args:
        figure: matplotlib's figure.
        path: File to write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        figure.canvas.print_png(stream, metadata={"Software": PAINTER})  # savefig would draw twice, the first time for the layout
    return path


# ---- the plots of a run ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot of a run.

    `curves` maps metric -> label; with `stacked` they are drawn as areas on top of each other. A plot without data is not drawn.

    Args:
        held_out: Whether it adds the means of several rewards, and one dotted curve of scores per evaluation set.
    """

    file: str
    title: str
    unit: str
    curves: Mapping[str, str]
    stacked: bool = False
    held_out: bool = False


# All phases of the run's timers. They sum to `time/step`.
PARTS_OF_A_STEP = ("rollout", "reward", "old_logprobs", "ref_logprobs", "teacher", "train", "weight_sync", "eval", "checkpoint", "other")

PLOTS = (
    Plot("reward", "Reward", "reward", {"reward": "training (weighted sum, mean of a rollout)"}, held_out=True),
    Plot("length", "Length of completions", "tokens", {"completions/mean_length": "mean", "completions/max_length": "longest"}),
    Plot("kl", "KL divergence", "nats per token", {"kl": "policy from reference", "sampling/kl_k3": "sampler from trainer"}),
    Plot("entropy", "Entropy of the policy", "nats per token", {"entropy": "entropy"}),
    Plot("step_time", "Time of an optimizer step", "seconds",
         {f"time/{name}": name.replace("_", " ") for name in PARTS_OF_A_STEP} | {"time/step": "whole step"}, stacked=True),
)  # fmt: skip
_PLOTTED = frozenset(name for plot in PLOTS for name in plot.curves)
_warned = False


def refresh(output_dir: Path, history: History) -> list[Path]:
    """Draw every plot that has data.

    Without matplotlib nothing is drawn, and a warning is logged once per run.

    Args:
        output_dir: Directory of the run.
        history: Points of each metric.

    Returns:
        The files written.
    """
    global _warned
    if not can_draw():
        if not _warned:
            logger.warning("plots/ is not drawn: matplotlib is not installed (pip install 'megatron-grpo[plot]')")
        _warned = True
        return []
    return [_draw(output_dir / "plots" / f"{plot.file}.png", [plot], history, width=7.0) for plot in PLOTS if _curves(plot, history)]


def plotted_metrics(record: Mapping[str, Any]) -> list[str]:
    """Return the names of an optimizer step's metrics that plots show.

    Args:
        record: Line of metrics.jsonl.
    """
    return [name for name in record if name in _PLOTTED or re.fullmatch("rewards/.+/mean", name)]


def remember(history: dict[str, list[tuple[int, float]]], record: Mapping[str, Any]) -> None:
    """Add the plotted metrics of an optimizer step to `history`.

    Args:
        history: (step, value) pairs by metric; changed in place.
        record: Line of metrics.jsonl.
    """
    for name in plotted_metrics(record):
        value = to_python_number(record[name])
        if value is not None:
            history.setdefault(name, []).append((record["step"], value))


def is_held_out(name: str) -> bool:
    """Return whether a curve is that of an evaluation set (`config.evaluation.curve_of`).

    Args:
        name: Name of the curve.
    """
    return name == "eval" or name.startswith("eval/")


def _curves(plot: Plot, history: History) -> list[tuple[str, str, Sequence[tuple[int, float]]]]:
    """Return (name, label, points) of the curves that have data."""
    held_out = {name: f"held out{name.removeprefix('eval').replace('/', ': ')}" for name in history if plot.held_out and is_held_out(name)}
    reward_means = {name: name[8:-5] for name in history if plot.held_out and name.startswith("rewards/")}
    curves = {**plot.curves, **(reward_means if len(reward_means) > 1 else {}), **held_out}
    return [(name, label, history[name]) for name, label in curves.items() if history.get(name)]


def draw_together(path: Path, files: Sequence[str], history: History) -> bool:
    """Draw several plots side by side in one image, omitting those without data.

    Args:
        path: Image file.
        files: `Plot.file` of the plots.
        history: Points of each metric.

    Returns:
        Whether the image was drawn: there must be data and matplotlib.
    """
    plots = [plot for plot in PLOTS if plot.file in files and _curves(plot, history)]
    if not plots or not can_draw():
        return False
    _draw(path, plots, history, width=5.0)
    return True


def _draw(path: Path, plots: Sequence[Plot], history: History, *, width: float) -> Path:
    figure = new_figure(width * len(plots), 4.0)
    for number, plot in enumerate(plots, 1):
        _fill(figure.add_subplot(1, len(plots), number), plot, history)
    return write_png(figure, path)


def _fill(axes, plot: Plot, history: History) -> None:
    curves = _curves(plot, history)
    if plot.stacked:
        _stack(axes, curves)
    else:
        for (name, label, points), colour in zip(curves, cycle(COLOURS)):
            _line(axes, points, label, colour, dotted=is_held_out(name))
    axes.set(title=plot.title, xlabel="optimizer step", ylabel=plot.unit)
    apply_style(axes)
    if plot.stacked:
        axes.figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    elif len(plot.curves) > 1 or plot.held_out:
        axes.legend(frameon=False, fontsize="small")


def _line(axes, points: Sequence[tuple[int, float]], label: str, colour: str, *, dotted: bool) -> None:
    steps, values = zip(*points, strict=True)
    if dotted:
        axes.plot(steps, values, "o--", color=colour, markersize=4, linewidth=1.2, label=label)
    elif len(values) < 20:
        axes.plot(steps, values, "o-", color=colour, markersize=3, linewidth=1.8, label=label)
    else:  # noisy and long: raw values in pale, their moving mean on top
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1.0)
        axes.plot(steps, _moving_mean(values, window=max(5, len(values) // 20)), color=colour, linewidth=1.8, label=label)


def _stack(axes, curves: Sequence[tuple[str, str, Sequence[tuple[int, float]]]]) -> None:
    """Draw areas for the phases and a line for `time/step`. A phase that is absent from a step took no time."""
    steps = sorted({step for _, _, points in curves for step, _ in points})
    parts = [(label, dict(points)) for name, label, points in curves if name != "time/step"]
    if parts:
        heights = [[values.get(step, 0.0) for step in steps] for _, values in parts]
        axes.stackplot(steps, heights, labels=[label for label, _ in parts], colors=COLOURS, alpha=0.8, linewidth=0)
    for name, label, points in curves:
        if name == "time/step":
            axes.plot(*zip(*points, strict=True), color=COLOURS[-1], linewidth=1.0, label=label)
    axes.set_ylim(bottom=0)


def _moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean over the last `window` values, or over fewer at the beginning."""
    means, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        means.append(total / min(index + 1, window))
    return means
