"""The training schedule as a figure in the terminal.

Rows are micro-steps, columns are data-parallel ranks, cells are prompt numbers. What does not fit is abridged and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.core.base.files import PAINTER
from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.batching.schedule import MicroStep, TrainingSchedule
from megatron_grpo.run.metrics.records import can_draw

if TYPE_CHECKING:
    from rich.text import Text

PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99", "#99aa44", "#bb88dd")
MOST_ROWS, MOST_RANKS = 48, 16
COLUMNS = 160  # width of the terminal that an image shows
POINTS, DPI, WIDTH = 9, 130, 10  # font size of DejaVu Sans Mono in points, dots per inch, and width of a letter in dots
PAPER, INK, FAINT = "#14181d", "#e6e6e6", "#8a929b"
HEAD, TAIL = 3, 1  # micro-steps shown at the ends of a long stretch of one optimizer step and one pass over a rollout


def shown_rows(schedule: TrainingSchedule, num_rollouts: int, *, max_rows: int = MOST_ROWS) -> list[MicroStep | range]:
    """Select the micro-steps to show.

    Long stretches show only their ends, and the figure has about `max_rows` rows. Ranges in the result are micro-steps that are not shown.

    Args:
        max_rows: Approximate maximum number of rows.
    """
    sizes = schedule.sizes
    total = num_rollouts * sizes.micro_steps_per_rollout * sizes.num_iterations
    if total <= max_rows:
        return [schedule.micro_step(s) for s in range(total)]
    rows: list[MicroStep | range] = []
    for stretch in _stretches(schedule, total):
        if len(rows) >= max_rows:
            return [*rows, range(stretch.start, total)]
        head = HEAD if len(stretch) > HEAD + TAIL + 1 else len(stretch)
        rows += map(schedule.micro_step, stretch[:head])
        if hidden := stretch[head:-TAIL]:
            rows += [hidden, *map(schedule.micro_step, stretch[-TAIL:])]
    return rows


def _stretches(schedule: TrainingSchedule, total: int) -> Iterator[range]:
    """Yield ranges of micro-steps that belong to one optimizer step and one pass over one rollout."""
    w, begin = schedule.sizes.micro_steps_per_rollout, 0
    while begin < total:
        end = min(total, schedule.find_first_micro_step(schedule.find_step(begin) + 1), (begin // w + 1) * w)
        yield range(begin, end)
        begin = end


def shown_ranks(dp_size: int, max_ranks: int) -> list[int | None]:
    """Return the DP ranks that have a column; None stands for the omitted ones.

    Args:
        max_ranks: Maximum number of columns.
    """
    if dp_size <= max_ranks:
        return list(range(dp_size))
    return [*range(max(1, max_ranks - 2)), None, dp_size - 1]


def list_prompts(sizes: BatchSizes, row: MicroStep, rank: int) -> range:
    """Return the prompts that a DP rank trains in a micro-step, numbered over the whole run."""
    first = row.rows[0] + rank * sizes.micro_batch_size
    last, base = first + sizes.micro_batch_size - 1, row.rollout * sizes.num_rollout_prompts
    return range(base + first // sizes.num_generations, base + last // sizes.num_generations + 1)


def cell(prompts: range) -> str:
    """Format prompt numbers as `7`, `7 8` or `7-12`.

    Args:
        prompts: Range of prompt numbers; not empty.
    """
    if len(prompts) <= 2:
        return " ".join(map(str, prompts))
    return f"{prompts[0]}-{prompts[-1]}"


def draw(schedule: TrainingSchedule, num_rollouts: int, *, width: int = 80) -> list[Text]:
    """Draw the figure as styled lines, none wider than `width` columns."""
    from rich.text import Text

    sizes, rows = schedule.sizes, shown_rows(schedule, num_rollouts)
    steps = [row for row in rows if isinstance(row, MicroStep)]
    possible = [rank for rank in shown_ranks(sizes.dp_size, MOST_RANKS) if rank is not None]
    cells = [str(possible[-1]), *(cell(list_prompts(sizes, row, rank)) for row in steps for rank in possible)]
    widest = max(2, *map(len, cells)) + 1
    left = max(len(f"step {steps[-1].optimizer_step}"), 7) + 3
    note = ", end of epoch 00" * any(schedule.ends_epoch(row) is not None for row in steps)
    right = 9 + 13 + max(len(f"rollout {num_rollouts - 1}"), 14) + 2 + len(note)
    ranks = shown_ranks(sizes.dp_size, max(1, (width - left - 7 - right) // widest))
    heads = "".join(("…" if rank is None else str(rank)).rjust(widest) for rank in ranks)
    lines = [
        Text(f"{'optimizer':<{left}}{'micro-':>6} {'DP rank':>{min(7, len(heads))}}".ljust(left + 7 + len(heads)) + "  old", style="bold"),
        Text(f"{'step':<{left}}{'step':>6} {heads}  stale log-probs     rollout", style="bold"),
    ]
    for index, row in enumerate(rows):
        if isinstance(row, range):
            hidden = f"  … {len(row):,} more, to {row[-1]}"[: len(heads) + 20]
            lines.append(Text(f"{'│':<{left}}{'⋮':>6} {hidden:<{len(heads) + 21}}│", style="dim"))
        else:
            lines.append(_line(schedule, index, row, ranks, widest, left))
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    return lines


def _line(schedule: TrainingSchedule, index: int, row: MicroStep, ranks: Sequence[int | None], widest: int, left: int) -> Text:
    from rich.text import Text

    sizes, step = schedule.sizes, row.optimizer_step
    begins, ends = row.micro_step == schedule.find_first_micro_step(step), row.micro_step + 1 == schedule.find_first_micro_step(step + 1)
    label = f"step {step}" if begins or index == 0 else ""
    text = Text.assemble((f"{draw_bracket(begins, ends)} {label}".ljust(left), "bold" if label else ""), f"{row.micro_step:>6} ")
    for rank in ranks:
        if rank is None:
            text.append("…".rjust(widest), style="dim")
        else:
            prompts = list_prompts(sizes, row, rank)
            text.append(cell(prompts).rjust(widest), style=PALETTE[prompts[0] % len(PALETTE)])
    mark = f"+{row.staleness}" if row.staleness else "·"
    text.append(f"  {mark:>4}  {row.old_logprobs:<13}", style="bold yellow" if row.staleness else "dim")
    length = sizes.micro_steps_per_rollout * sizes.num_iterations
    position = row.micro_step % length
    first, last = position == 0, position == length - 1
    has_several_versions = sizes.partial_rollouts and row.on_policy_version > row.sampled_by_version
    newest = f" to v{row.on_policy_version}" if has_several_versions else ""
    notes = [f"rollout {row.rollout} by v{row.sampled_by_version}{newest}"] if first else []
    if not first and row.slice_index == 0:
        notes.append(f"pass {row.pass_index + 1}")
    if (epoch := schedule.ends_epoch(row)) is not None:
        notes.append(f"end of epoch {epoch}")
    text.append(f"{draw_bracket(first, last, right=True)} {', '.join(notes)}".rstrip(), style="bold" if first else "")
    if row.staleness:
        text.stylize("on #3a2f00")
    return text


def draw_bracket(first: bool, last: bool, *, right: bool = False) -> str:
    """Return the piece of a bracket in one row.

    Args:
        first: Whether the bracket begins in this row.
        last: Whether the bracket ends in this row.
        right: Whether the bracket is on the right side of what it encloses.
    """
    return ("│┐┘]" if right else "│┌└[")[first + 2 * last]


def legend(sizes: BatchSizes) -> list[str]:
    """Explain the marks of the figure, in lines of text."""
    per_cell = f"{sizes.micro_batch_size} completion{'s' * (sizes.micro_batch_size > 1)}"
    return [
        f"cells     prompts of the {per_cell} that a rank trains ({sizes.num_generations} make a group)",
        "stale     optimizer steps between sampling and training; · is on-policy",
        "old log-probs: on_policy - from this step's forward pass; recompute - from an",
        "  extra pass with the weights when the rollout arrives; cached - from the",
        "  slice's first training forward; rollout - vLLM's own (old_logprobs rollout)",
    ]


def draw_png(schedule: TrainingSchedule, num_rollouts: int, path: str) -> None:
    """Write the figure as an image with the lines and colours of the terminal. The file's suffix determines the format.

    Raises:
        ConfigError: If matplotlib is not installed, or does not know the suffix.
    """
    if not can_draw():
        raise ConfigError([Problem(flags=("png",), message="png needs matplotlib: pip install 'megatron-grpo[plot]'.")])
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    terminal = Console(width=COLUMNS)
    lines = [*draw(schedule, num_rollouts, width=COLUMNS), Text(), *map(Text, legend(schedule.sizes))]
    columns = max(line.cell_len for line in lines)
    width, height = (columns + 2) * WIDTH / DPI, (len(lines) + 2) * POINTS * 1.5 / 72
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    for row, line in enumerate(lines, 1):
        column = 1
        for segment in line.render(terminal):
            style = segment.style or Style()
            ink = style.color.get_truecolor().hex if style.color else FAINT if style.dim else INK
            text = segment.text.replace("⋮", ":")  # a character that the font lacks
            xy = column / (columns + 2), 1 - (row + 0.5) / (len(lines) + 2)
            weight = "bold" if style.bold else None
            figure.text(*xy, text, family="monospace", size=POINTS, weight=weight, color=ink, va="center")
            column += segment.cell_length
    try:
        figure.savefig(path, metadata={"Creator" if path.endswith((".svg", ".pdf", ".ps", ".eps")) else "Software": PAINTER})
    except ValueError as error:
        raise ConfigError([Problem(flags=("png",), message=f"png: {path} cannot be written: {error}.")]) from error
