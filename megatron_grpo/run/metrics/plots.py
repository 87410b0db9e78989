"""Figures with matplotlib (the extra `plot`) in one style, and the plots of a run (`plots/*.png`).

Imported only where something is drawn; matplotlib only when it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.files import PAINTER, atomic_write
from megatron_grpo.run.metrics.records import History, can_draw

COLOURS = ("#2563a8", "#d1622b", "#3a8f5c", "#8a5aa8", "#b8892b", "#5b6770", "#c2407a", "#2aa5a0", "#c9ced3", "#111111")
BLUE, RED, GREY = "#2f6f9f", "#c0392b", "#8a949e"  # of findings: usual, above a limit, and the limit
Curve = tuple[str, str, Sequence[tuple[int, float]]]  # name, label, (step, value) ascending


def write_panels(
    path: Path, panels: Sequence[Callable[[Any], object]], *, width: float, height: float, columns: int = 1, dpi: int = 120
) -> bool:
    """Write a PNG of panels in the common style: a pale grid behind the curves, and no frame at the top and right.

    It is written completely or not at all. The directory is created if needed.

    Args:
        panels: Functions that fill matplotlib's axes, in rows of `columns`.
        dpi: Pixels per inch.

    Returns:
        Whether it was written: matplotlib must be installed.
    """
    if not can_draw():
        return False
    # The object interface, because pyplot keeps figures alive and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for number, fill in enumerate(panels, 1):
        axes = figure.add_subplot(-(-len(panels) // columns), columns, number)
        axes.grid(color="#e4e7ea", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        fill(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        canvas.print_png(stream, metadata={"Software": PAINTER})  # savefig would draw twice, the first time for the layout
    return True


def write_figure(path: Path, panels: Sequence[Callable[[Any], object]], **settings: Any) -> str:
    """Write a PNG as `write_panels` does, and return a line with its path, or the reason why there is none.

    Args:
        settings: Further arguments of `write_panels`.
    """
    is_drawn = write_panels(path, panels, **settings)
    return f"Figure: {path}" if is_drawn else "No figure: matplotlib is not installed (pip install megatron-grpo[plot])."


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


def refresh(output_dir: Path, history: History) -> list[Path]:
    """Draw every plot that has data.

    Args:
        history: Points of each metric.

    Returns:
        The files written.
    """
    files = [(output_dir / "plots" / f"{plot.file}.png", plot.file) for plot in PLOTS]
    return [path for path, file in files if draw_together(path, [file], history, width=7.0)]


def draw_together(path: Path, files: Sequence[str], history: History, *, width: float = 5.0) -> bool:
    """Draw several plots side by side in one image, omitting those without data.

    Args:
        files: `Plot.file` of the plots.
        history: Points of each metric.

    Returns:
        Whether the image was drawn: there must be data and matplotlib.
    """
    plots = [(plot, _curves(plot, history)) for plot in PLOTS if plot.file in files]
    panels = [partial(_fill, plot=plot, curves=curves) for plot, curves in plots if curves]
    return bool(panels) and write_panels(path, panels, width=width * len(panels), height=4.0, columns=len(panels))


def _is_held_out(name: str) -> bool:
    """Return whether a curve is that of an evaluation set (`config.evaluation.name_curve`)."""
    return name == "eval" or name.startswith("eval/")


def _curves(plot: Plot, history: History) -> list[Curve]:
    """Return the curves that have data."""
    held_out = {name: f"held out{name.removeprefix('eval').replace('/', ': ')}" for name in history if plot.held_out and _is_held_out(name)}
    reward_means = {name: name[8:-5] for name in history if plot.held_out and name.startswith("rewards/")}
    curves = {**plot.curves, **(reward_means if len(reward_means) > 1 else {}), **held_out}
    return [(name, label, history[name]) for name, label in curves.items() if history.get(name)]


def _fill(axes: Any, plot: Plot, curves: Sequence[Curve]) -> None:
    axes.set(title=plot.title, xlabel="optimizer step", ylabel=plot.unit)
    if plot.stacked:
        _stack(axes, curves)
        axes.figure.legend(loc="outside right upper", frameon=False, fontsize="small")
        return
    for curve, colour in zip(curves, cycle(COLOURS)):
        _line(axes, curve, colour)
    if len(plot.curves) > 1 or plot.held_out:
        axes.legend(frameon=False, fontsize="small")


def _line(axes: Any, curve: Curve, colour: str) -> None:
    name, label, points = curve
    steps, values = zip(*points, strict=True)
    if _is_held_out(name):
        axes.plot(steps, values, "o--", color=colour, markersize=4, linewidth=1.2, label=label)
    elif len(values) < 20:
        axes.plot(steps, values, "o-", color=colour, markersize=3, linewidth=1.8, label=label)
    else:  # noisy and long: raw values in pale, their moving mean on top
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1.0)
        axes.plot(steps, _moving_mean(values, window=max(5, len(values) // 20)), color=colour, linewidth=1.8, label=label)


def _stack(axes: Any, curves: Sequence[Curve]) -> None:
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
