"""The figure of the terminal as a picture: the same lines, in the same colours. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.base.files import PAINTER
from megatron_grpo.metrics.draw import can_draw, new_figure
from megatron_grpo.planning.figure import draw, legend

if TYPE_CHECKING:
    from megatron_grpo.planning.command import Plan

COLUMNS = 160  # of the terminal that is drawn
POINTS = 9  # size of a letter; one of DejaVu Sans Mono is 0.602 of it wide
PAPER, INK, FAINT = "#14181d", "#e6e6e6", "#8a929b"


def draw_png(made: Plan, path: str) -> None:
    """Writes the picture; its format follows the file's suffix. Raises ConfigError without matplotlib, or for a suffix it does not know."""
    if not can_draw():
        raise ConfigError([Problem(flags=("png",), message="png needs matplotlib: pip install 'megatron-grpo[plot]'.")])
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    sizes, terminal = made.checked.sizes, Console(width=COLUMNS)
    lines = [*draw(made.timetable, made.checked.config.plan.plan_rollouts, width=COLUMNS), Text(), *map(Text, legend(sizes))]
    columns = max(line.cell_len for line in lines)
    width, height = (columns + 2) * POINTS * 0.602 / 72, (len(lines) + 2) * POINTS * 1.5 / 72
    figure = new_figure(width, height, dpi=130, layout=None, facecolor=PAPER)
    for row, line in enumerate(lines, 1):
        column = 1
        for segment in line.render(terminal):
            style = segment.style or Style()
            ink = style.color.get_truecolor().hex if style.color else FAINT if style.dim else INK
            at = column / (columns + 2), 1 - (row + 0.5) / (len(lines) + 2)
            figure.text(*at, segment.text, family="monospace", size=POINTS, weight="bold" if style.bold else None, color=ink, va="center")
            column += segment.cell_length
    try:
        figure.savefig(path, metadata={"Creator" if path.endswith((".svg", ".pdf", ".ps", ".eps")) else "Software": PAINTER})
    except ValueError as error:
        raise ConfigError([Problem(flags=("png",), message=f"png: {path} cannot be written: {error}.")]) from error
