"""The `watch` command: a run as another terminal sees it, from the files that the run writes. It changes nothing."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megatron_grpo.commands.analysis.run_files import Points, RunFiles, downsample, format_text
from megatron_grpo.commands.start.show import WORDS
from megatron_grpo.core.base.errors import EXIT_DONE, ConfigError
from megatron_grpo.core.base.files import read_object
from megatron_grpo.run.metrics.display import NOW, describe_duration, progress_row

USAGE = f"usage: megatron-grpo watch {WORDS['watch']}"
SECONDS = 2.0  # between two drawings
SILENT = 10.0  # seconds without a sign of the run, which it gives every second
SPARKS, WIDTH = "▁▂▃▄▅▆▇█", 24
SHOWN = {
    "reward": "reward", "frac_reward_zero_std": "groups with equal rewards", "packing/completions": "completions",
    "packing/computed_completions": "computed", "completions/mean_length": "tokens per completion",
    "completions/clipped_ratio": "truncated", "entropy": "entropy", "kl": "KL", "grad_norm": "gradient norm",
    "sampling/sampling_logp_difference/max": "trainer - sampler", "tokens_per_second": "tokens per second", "time/step": "seconds per step",
}  # fmt: skip


def run_watch(argv: list[str]) -> int:
    """Show a run until Ctrl-C; with --once, or where standard output is no terminal, once.

    Returns:
        The exit code.

    Raises:
        ConfigError: The arguments are wrong, or the folder is not that of a run.
    """
    words = [word for word in argv if word != "--once"]
    if unknown := [word for word in words if word.startswith("-")]:
        raise ConfigError(f"Unknown argument {unknown[0]}. {USAGE}")
    if len(words) != 1:
        raise ConfigError(f"watch needs one OUTPUT_DIR, not {len(words)}. {USAGE}")
    folder = Path(words[0])
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} has no config.yaml. Name the output_dir of a run that has started.")
    console = Console(highlight=False)
    if "--once" in argv or not sys.stdout.isatty():
        console.print(run_view(folder))
        return EXIT_DONE
    with Live(run_view(folder), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(SECONDS)
                live.update(run_view(folder), refresh=True)
        except KeyboardInterrupt:
            return EXIT_DONE


def run_view(folder: Path) -> Group:
    """Return the view of a run: its step and phase, the newest metrics, held-out scores, events and completions."""
    run = RunFiles(folder)
    metrics, scores = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    for name, label in SHOWN.items():
        points = run.series(name)
        if any(value for _, value in points):
            metrics.add_row(Text(label, style="dim"), f"{points[-1][1]:.4g}", Text(sparkline(points), style="cyan"))
    for name, points in run.held_out().items():
        scores.add_row(Text(name), f"step {points[-1][0]}", f"{points[-1][1]:.3f}", Text(sparkline(points), style="cyan"))
    panels = [Panel(metrics, title="metrics")] * bool(metrics.rows) + [Panel(scores, title="held out")] * bool(scores.rows)
    events = [Text(f"step {event['step']}: {event['text']}", style="yellow") for event in run.events[-3:]]
    return Group(*head(run), Columns(panels), *events, *completions(run))


def head(run: RunFiles) -> list[Table | Text]:
    """Return the lines with the step and speed, and with the phase or the end of the run."""
    now = read_object(run.folder / NOW)
    silent = time.time() - float(now.get("time", 0.0))
    lost = f"No sign of the run for {describe_duration(silent)}: it was killed, or its machine is not reachable."
    if now and silent <= SILENT:
        speed, phase = str(now.get("speed", "")), str(now.get("phase") or "between two phases")
    else:
        speed, phase = "", run.end or (lost if now else "The run has ended.")
    step = Text(f"{run.name}: step {run.step}{f'/{run.total}' if run.total else ''}", style="bold")
    return [progress_row(step, run.step, run.total, speed), Text(phase)]


def sparkline(points: Points) -> str:
    """Return a line of at most WIDTH characters whose heights are means of neighbouring values.

    Args:
        points: (step, value) pairs in the order of the steps.
    """
    means = [mean for _, mean in downsample(points, WIDTH)]
    low, high = min(means), max(means)
    return "".join(SPARKS[int((mean - low) / ((high - low) or 1.0) * (len(SPARKS) - 1))] for mean in means)


def completions(run: RunFiles) -> list[Table]:
    """Return a table with the best and the worst completion of the two groups whose rewards differ most; empty without completions."""
    groups = run.last_groups()[:2]
    if not groups:
        return []
    title = f"Sampled after step {groups[0][0]['version']}"
    table = Table("prompt", "completion", "reward", title=title, title_justify="left", expand=True)
    for row in (row for rows in groups for row in (rows[0], rows[-1])):
        texts = format_text(row["prompt"], max_characters=120), format_text(row["completion"], max_characters=300)
        table.add_row(*map(Text, texts), f"{row['reward']:.3g}")
    return [table]
