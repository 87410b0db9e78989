"""Figures with matplotlib (the extra `plot`), imported where something is drawn: one look for all of them, and `plots/*.png`, the few
curves that say whether a run is healthy, from what metrics.jsonl holds.
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

from megatron_grpo.base.files import PAINTER, written_whole
from megatron_grpo.metrics.records import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)
COLOURS = ("#2563a8", "#d1622b", "#3a8f5c", "#8a5aa8", "#b8892b", "#5b6770", "#c2407a", "#2aa5a0", "#c9ced3", "#111111")
History = Mapping[str, Sequence[tuple[int, float]]]  # metric name -> (step, value), ascending


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float, height: float, *, dpi: int = 120, layout: Any = "constrained", **settings: Any) -> Figure:
    """An empty figure of so many inches, on a canvas that needs no display."""
    # The object interface: pyplot keeps figures alive and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout=layout, **settings)
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Any) -> None:
    """A pale grid behind the curves, and no frame on top and on the right."""
    axes.grid(color="#e4e7ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def write_png(figure: Any, path: Path) -> Path:
    """Writes the whole file or none, in a directory that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as stream:
        figure.canvas.print_png(stream, metadata={"Software": PAINTER})  # savefig would draw it twice, to lay it out first
    return path


# ---- the plots of a run ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture. `curves` maps metric -> label; `stacked` ones are drawn as areas on top of each other. Without data it is not drawn."""

    file: str
    title: str
    unit: str
    curves: Mapping[str, str]
    stacked: bool = False
    held_out: bool = False  # with the means of several rewards, and the scores of evaluations, a dotted curve for each set


# Every block of the run's clock. They sum to `time/step`.
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
    """Draws every plot that has data; returns the files. Without matplotlib: nothing, and one warning for the whole run."""
    global _warned
    if not can_draw():
        if not _warned:
            logger.warning("plots/ is not drawn: matplotlib is not installed (pip install 'megatron-grpo[plot]')")
        _warned = True
        return []
    return [_draw(output_dir / "plots" / f"{plot.file}.png", [plot], history, width=7.0) for plot in PLOTS if _curves(plot, history)]


def plotted(record: Mapping[str, Any]) -> list[str]:
    """The numbers of an optimizer step that pictures show."""
    return [name for name in record if name in _PLOTTED or re.fullmatch("rewards/.+/mean", name)]


def remember(history: dict[str, list[tuple[int, float]]], record: Mapping[str, Any]) -> None:
    """Adds what pictures show of an optimizer step."""
    for name in plotted(record):
        value = plain(record[name])
        if value is not None:
            history.setdefault(name, []).append((record["step"], value))


def is_held_out(name: str) -> bool:
    """Whether a curve is that of evaluations of one set (`config.evaluation.curve_of`)."""
    return name == "eval" or name.startswith("eval/")


def _curves(plot: Plot, history: History) -> list[tuple[str, str, Sequence[tuple[int, float]]]]:
    """(name, label, points) of the curves that there are data for."""
    held_out = {name: f"held out{name.removeprefix('eval').replace('/', ': ')}" for name in history if plot.held_out and is_held_out(name)}
    means = {name: name[8:-5] for name in history if plot.held_out and name.startswith("rewards/")}
    curves = {**plot.curves, **(means if len(means) > 1 else {}), **held_out}
    return [(name, label, history[name]) for name, label in curves.items() if history.get(name)]


def draw_together(path: Path, files: Sequence[str], history: History) -> bool:
    """Several plots side by side in one picture, those that have data; whether there was anything to draw, and matplotlib to draw it."""
    drawn = [plot for plot in PLOTS if plot.file in files and _curves(plot, history)]
    if not drawn or not can_draw():
        return False
    _draw(path, drawn, history, width=5.0)
    return True


def _draw(path: Path, plots: Sequence[Plot], history: History, *, width: float) -> Path:
    figure = new_figure(width * len(plots), 4.0)
    for place, plot in enumerate(plots, 1):
        _fill(figure.add_subplot(1, len(plots), place), plot, history)
    return write_png(figure, path)


def _fill(axes, plot: Plot, history: History) -> None:
    curves = _curves(plot, history)
    if plot.stacked:
        _stack(axes, curves)
    else:
        for (name, label, points), colour in zip(curves, cycle(COLOURS)):
            _line(axes, points, label, colour, dotted=is_held_out(name))
    axes.set(title=plot.title, xlabel="optimizer step", ylabel=plot.unit)
    tidy(axes)
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
    else:  # noisy and long: what was measured in pale, its moving mean over it
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1.0)
        axes.plot(steps, _moving_mean(values, window=max(5, len(values) // 20)), color=colour, linewidth=1.8, label=label)


def _stack(axes, curves: Sequence[tuple[str, str, Sequence[tuple[int, float]]]]) -> None:
    """Areas for the parts, a line for `time/step`, the whole. A part that did not happen in a step took no time."""
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
    """Over the last `window` values; over fewer at the beginning."""
    means, total = [], 0.0
    for place, value in enumerate(values):
        total += value - (values[place - window] if place >= window else 0.0)
        means.append(total / min(place + 1, window))
    return means
