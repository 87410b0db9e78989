"""Figures with matplotlib (the extra `plot`): one canvas, one look, one way to write a file. Imported where something is drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.base.files import PAINTER, written_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#2563a8", "#d1622b", "#3a8f5c", "#8a5aa8", "#b8892b", "#5b6770", "#c2407a", "#2aa5a0", "#c9ced3", "#111111")


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
