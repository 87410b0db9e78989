"""The timetable as a picture: the same rows, ranks and colours as in the terminal. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_grpo.batching.timetable import MicroStep
from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.planning.figure import LABELS, MOST_RANKS, Gap, cell, colour, prompts_of, shown_ranks, shown_rows, widest_cell

if TYPE_CHECKING:
    from megatron_grpo.planning.command import Plan

STALE = "#ffe8a3"


def draw_png(made: Plan, path: str) -> None:
    """Writes the picture; its format follows the file's suffix. Raises ConfigError without matplotlib, or for a suffix it does not know."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError([Problem(flags=("png",), message="png needs matplotlib: pip install 'megatron-grpo[plot]'.")]) from None
    sizes, count = made.checked.sizes, made.checked.config.plan.plan_rollouts
    rows, ranks = shown_rows(sizes, count), shown_ranks(sizes.dp_size, MOST_RANKS)
    box = 0.42 + 0.085 * widest_cell(sizes, rows, ranks)  # inches
    height, width = 0.3 * len(rows) + 1.9, box * len(ranks) + 5.6
    figure = Figure(figsize=(width, height), dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-2.5 / box, len(ranks) + 3.1 / box)
    axes.set_ylim(len(rows) + 0.9 / 0.3, -1.0 / 0.3)
    axes.axis("off")
    _heads(axes, ranks, sizes.dp_size, box)
    for y, row in enumerate(rows):
        if isinstance(row, Gap):
            axes.text(
                len(ranks) / 2, y + 0.5, f"… {len(row.micro_steps)} more micro-steps …", ha="center", va="center", color="0.45", fontsize=8
            )
        else:
            _row(axes, made, y, row, ranks, box)
    _brackets(axes, made, rows, len(ranks), box)
    counts = sizes.generation_batch_size, sizes.global_batch_size, sizes.num_generations
    title = "{} completions a rollout, {} an optimizer step, {} a prompt".format(*counts)
    axes.text(len(ranks) / 2, -0.78 / 0.3, title, ha="center", va="center", fontsize=10, fontweight="bold")
    axes.text(
        -2.4 / box,
        len(rows) + 0.35 / 0.3,
        "cells: prompts, one colour each; grey · is on-policy\nyellow: trained by a "
        "later version than "
        "the one that sampled it (+ optimizer steps),\nand where its old log-probs come from",
        va="center",
        fontsize=7.5,
        color="0.3",
    )
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigError([Problem(flags=("png",), message=f"png: {path} cannot be written: {error}.")]) from error


def _heads(axes: Any, ranks: Sequence[int | None], dp_size: int, box: float) -> None:
    y = -0.3
    axes.text(-2.35 / box, y, "optimizer step", fontsize=8, va="bottom", color="0.3")
    axes.text(-0.15 / box, y, "micro-step", fontsize=8, va="bottom", ha="right", color="0.3")
    for x, rank in enumerate(ranks):
        axes.text(x + 0.5, y, "…" if rank is None else rank, ha="center", va="bottom", fontsize=8)
    axes.text(len(ranks) / 2, y - 0.85, f"DP rank (of {dp_size})", ha="center", va="bottom", fontsize=8, color="0.3")
    axes.text(len(ranks) + 0.15 / box, y, "stale", fontsize=8, va="bottom", color="0.3")
    axes.text(len(ranks) + 0.6 / box, y, "old log-probs", fontsize=8, va="bottom", color="0.3")


def _row(axes: Any, made: Plan, y: int, row: MicroStep, ranks: Sequence[int | None], box: float) -> None:
    from matplotlib.patches import Rectangle

    sizes = made.checked.sizes
    if row.staleness:
        axes.add_patch(Rectangle((-0.75 / box, y), len(ranks) + 2.35 / box, 1, facecolor=STALE, edgecolor="none"))
    axes.text(-0.15 / box, y + 0.5, row.micro_step, ha="right", va="center", fontsize=8)
    for x, rank in enumerate(ranks):
        if rank is None:
            axes.text(x + 0.5, y + 0.5, "…", ha="center", va="center", fontsize=8)
            continue
        prompts = prompts_of(sizes, row, rank)
        axes.add_patch(Rectangle((x + 0.05, y + 0.1), 0.9, 0.8, facecolor=colour(prompts[0]), edgecolor="none"))
        axes.text(x + 0.5, y + 0.5, cell(prompts), ha="center", va="center", fontsize=8, color="white", fontweight="bold")
    axes.text(
        len(ranks) + 0.15 / box,
        y + 0.5,
        f"+{row.staleness}" if row.staleness else "·",
        va="center",
        fontsize=8,
        color="#8a5a00" if row.staleness else "0.6",
        fontweight="bold",
    )
    axes.text(
        len(ranks) + 0.6 / box, y + 0.5, LABELS[row.old_logprobs], va="center", fontsize=8, color="#8a5a00" if row.staleness else "0.6"
    )


def _brackets(axes: Any, made: Plan, rows: Sequence[MicroStep | Gap], num_ranks: int, box: float) -> None:
    """Optimizer steps on the left, rollouts on the right, over the rows that are shown."""
    sizes = made.checked.sizes
    a, length = sizes.gradient_accumulation_steps, sizes.micro_steps_per_rollout * sizes.num_iterations

    def numbers(row: MicroStep | Gap) -> range:
        return row.micro_steps if isinstance(row, Gap) else range(row.micro_step, row.micro_step + 1)

    for size, x, word, side in ((a, -1.0 / box, "step", "right"), (length, num_ranks + 1.75 / box, "rollout", "left")):
        spans: dict[int, list[int]] = {}
        for y, row in enumerate(rows):
            for index in {numbers(row)[0] // size, numbers(row)[-1] // size}:
                spans.setdefault(index, [y, y + 1])[1] = y + 1
        tick = (0.08 if side == "right" else -0.08) / box
        for index, (top, bottom) in spans.items():
            axes.plot([x + tick, x, x, x + tick], [top + 0.12, top + 0.12, bottom - 0.12, bottom - 0.12], color="0.4", linewidth=1)
            text = f"{word} {index}"
            if word == "rollout":
                text += f"\nby v{index * length // a}" if bottom - top > 1 else f" by v{index * length // a}"
            axes.text(x - tick, (top + bottom) / 2, text, ha=side, va="center", fontsize=8)
