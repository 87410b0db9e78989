"""The `report` command: one HTML page of a run, or of several on the same axes. The page needs no server and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_grpo import __version__
from megatron_grpo.commands.analysis.run_files import Points, Row, RunFiles, downsample, format_text, is_number, runs_in
from megatron_grpo.commands.start.show import WORDS
from megatron_grpo.core.base import activity
from megatron_grpo.core.base.errors import EXIT_DONE, ConfigError
from megatron_grpo.core.base.files import atomic_write_text, parse_yaml
from megatron_grpo.run.config.read import split_flags
from megatron_grpo.run.config.table import table
from megatron_grpo.run.metrics.display import describe_duration

PAGE = Path(__file__).parent / "page"
GENERATOR = '<meta name="generator" content="megatron-grpo report">'  # marks a page that may be replaced
USAGE = f"usage: megatron-grpo report {WORDS['report']}"
MOST_POINTS = 1500  # of a curve; a longer one is drawn as means of neighbours
MOST_ROWS = 25  # in the table of a figure, besides those of curves with fewer points than that
MOST_TEXT = 1200  # characters of a prompt or completion
MOST_EVENTS = 50
MOST_ANSWERS, MOST_GROUPS = 8, 6


HELD_OUT, EACH_REWARD = "evaluations.jsonl", "rewards/{name}/mean"  # stand for one curve per set, and per reward, in page/figures.yaml


def run_report(argv: list[str]) -> int:
    """Write the page of one run, or of several.

    Returns:
        The exit code.

    Raises:
        ConfigError: The arguments are wrong, a folder holds no run, or the file must not be written.
    """
    values, words = split_flags(argv, ("-o", "--output"))
    if unknown := [word for word in words if word.startswith("-")]:
        raise ConfigError(f"Unknown argument {unknown[0]}. {USAGE}")
    if without_file := [name for name, files in values.items() if "" in files]:
        raise ConfigError(f"{without_file[0]} needs a file. {USAGE}")
    if not words:
        raise ConfigError(f"No output_dir of a run is named. {USAGE}")
    runs = runs_in([*map(Path, words)])
    targets = [*values["-o"], *values["--output"]] or ["report.html" if len(runs) > 1 else f"{words[0]}/report.html"]
    target = Path(targets[-1])
    try:
        if target.exists() and GENERATOR not in target.read_text(encoding="utf-8", errors="replace"):
            raise ConfigError(f"{target} exists and was not written by this command. Name another file with -o.")
        atomic_write_text(target, make_page(runs))
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}. Name another file with -o.") from error
    print(f"Report: {target.resolve()} ({target.stat().st_size / 1000:,.0f} kB)")
    return EXIT_DONE


def make_page(runs: Sequence[RunFiles]) -> str:
    """Return the page.

    Args:
        runs: The runs, in the order of their colours.
    """
    import jinja2

    listed, _ = parse_yaml((PAGE / "figures.yaml").read_text(encoding="utf-8"))
    figures = [drawn for figure in listed if (drawn := figure_data(figure, runs))]
    blob = json.dumps([figure["data"] for figure in figures], separators=(",", ":")).replace("<", "\\u003c")
    styles = [(PAGE / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "page.css")]
    scripts = [(PAGE / name).read_text(encoding="utf-8") for name in ("uPlot.iife.min.js", "page.js")]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"number": number, "text": partial(format_text, max_characters=MOST_TEXT)}
    return environment.get_template("page.html.j2").render(
        title=" and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        generator=GENERATOR, version=__version__, licence=(PAGE / "uPlot.LICENSE").read_text(encoding="utf-8"),
        policy=f"default-src 'none'; style-src {hashes(styles)}; script-src {hashes(scripts)}; base-uri 'none'; form-action 'none'",
        styles=styles, scripts=scripts, blob=blob, figures=figures,
        runs=[describe_run(run) for run in runs], settings=settings_rows(runs),
        versions=compare_values([{str(k): v for k, v in run.plan.get("versions", {}).items()} for run in runs]),
    )  # fmt: skip


def hashes(texts: Sequence[str]) -> str:
    """Return the sources of a Content-Security-Policy that allow these scripts or styles alone."""
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)


# ---- figures ---------------------------------------------------------------------------------------------------------------------------


def figure_data(figure: Row, runs: Sequence[RunFiles]) -> dict[str, Any] | None:
    """Return what the template and the script need of a figure; None if no run has data that differs from 0.

    Args:
        figure: Its entry in page/figures.yaml.
        runs: Files of each run.
    """
    names, series, curves = dict[str, None](), list[dict[str, Any]](), list[Points]()
    for number_of_run, run in enumerate(runs):
        for number, (metric, label, points) in enumerate(read_curves(figure, run)):
            if any(value for _, value in points):
                names[metric] = None
                label = label if len(runs) == 1 else f"{run.name}: {label}"
                series.append({"label": label, "run": number_of_run, "place": number, "dots": metric == HELD_OUT})
                curves.append(downsample(points, MOST_POINTS))
    if not curves:
        return None
    values = [dict(points) for points in curves]
    steps = sorted({step for col in values for step in col})
    columns = [[float(f"{col[step]:.5g}") if step in col else None for step in steps] for col in values]  # what a figure can show
    is_log = figure.get("is_log", False) and all(value > 0 for points in curves for _, value in points)
    listed = {*steps[:: -(-len(steps) // MOST_ROWS)], steps[-1], *(s for col in values if len(col) <= MOST_ROWS for s in col)}
    labels = [curve["label"] for curve in series]
    return {
        "figure": figure,
        "names": list(names),
        "labels": labels,
        "words": "; ".join(f"{label}: {describe_points(points)}" for label, points in zip(labels, curves, strict=True)),
        "rows": [(step, [column[index] for column in columns]) for index, step in enumerate(steps) if step in listed],
        "data": {"series": series, "log": is_log, "exact": figure.get("is_exact", False), "values": [steps, *columns]},
    }


def describe_points(points: Points) -> str:
    """Describe a curve in words.

    Args:
        points: Its points; not empty.
    """
    (first, start), (last, end), values = points[0], points[-1], [value for _, value in points]
    return f"{start:.3g} at step {first}, {end:.3g} at step {last}, minimum {min(values):.3g}, maximum {max(values):.3g}"


def read_curves(figure: Row, run: RunFiles) -> list[tuple[str, str, Points]]:
    """Return (metric, label, points) of the curves that a figure has of a run; without data the points are empty."""
    curves: list[tuple[str, str, Points]] = []
    for metric, label in figure["metrics"].items():
        if metric == HELD_OUT:
            held_out = run.held_out()
            curves += [(metric, label if len(held_out) == 1 else f"{label} {name}", points) for name, points in held_out.items()]
        elif metric == EACH_REWARD:
            names = sorted({name for record in run.steps for name in record if re.fullmatch(r"rewards/.+/mean", name)})
            curves += [(name, name[8:-5], run.series(name)) for name in names if len(names) > 1]
        else:
            curves.append((metric, label, run.series(metric)))
    return curves


# ---- the rest of the page --------------------------------------------------------------------------------------------------------------


def describe_run(run: RunFiles) -> dict[str, Any]:
    """Return the contents of a run and what the template shows of them besides figures and settings."""
    seconds = run.phases()
    total = sum(seconds.values()) or 1.0
    phases = [(activity.WORDS.get(name, name), value, value / total) for name, value in seconds.items() if value >= 0.005 * total]
    changes = run.changes()
    differences = [change["score_after"] - change["score_before"] for change in changes]
    return vars(run) | {
        "end": run.end or "The end of the run is not recorded: it is still running, or it was killed.",
        "summary": summary(run),
        "events": [event for event in run.events if event.get("kind") and event.get("text")][-MOST_EVENTS:],
        "num_earlier": max(0, len(run.events) - MOST_EVENTS),
        "phases": phases,
        "answers": largest(changes),
        "counts": (sum(d > 0 for d in differences), sum(d < 0 for d in differences), sum(d == 0 for d in differences)),
        "groups": [rows for rows in run.last_groups()[:MOST_GROUPS] if rows[0]["reward"] > rows[-1]["reward"]],
    }


def summary(run: RunFiles) -> list[tuple[str, str]]:
    """Return (name, value) pairs for the summary at the top of the page."""
    rewards = [value for _, value in run.series("reward")]
    window = max(1, min(10, len(rewards) // 2))
    seconds = sum(value for _, value in run.series("time/step"))
    worst = max((value for _, value in run.series("sampling/sampling_logp_difference/max")), default=None)
    rows = [
        ("optimizer steps", f"{run.step:,} of {run.total:,}" if run.total else f"{run.step:,}"),
        ("trained tokens", f"{run.steps[-1].get('num_tokens') or 0:,}"),
        ("time in steps", describe_duration(seconds)),
    ]
    if rewards:
        means = sum(rewards[:window]) / window, sum(rewards[-window:]) / window
        rows.append((f"reward, first and last {window} rollout{'s' * (window > 1)}", f"{means[0]:.3f} → {means[1]:.3f}"))
    for name, points in run.held_out().items():
        change = f"{points[0][1]:.3f} → {points[-1][1]:.3f}" if len(points) > 1 else f"{points[0][1]:.3f}"
        rows.append((f"held out ({name}), first and last", change))
    if worst is not None:
        rows.append(("largest difference of trainer and sampler", f"{worst:.2g} nats"))
    computed, all_rows = (sum(value for _, value in run.series(f"packing/{name}completions")) for name in ("computed_", ""))
    if all_rows:
        rows.append(("computed completions, over which token metrics are means", f"{computed:,.0f} of {all_rows:,.0f}"))
    return [*rows, ("skipped steps", f"{run.steps[-1].get('skipped_iterations') or 0:,}")]


def largest(changes: Sequence[Row]) -> list[Row]:
    """Return the answers whose score changed most, at most a quarter of them worse than before."""
    changed = sorted(changes, key=lambda row: -abs(row["score_after"] - row["score_before"]))
    better = [row for row in changed if row["score_after"] > row["score_before"]]
    worse = [row for row in changed if row["score_after"] < row["score_before"]]
    return [*better[: MOST_ANSWERS - min(len(worse), MOST_ANSWERS // 4)], *worse][:MOST_ANSWERS]


def settings_rows(runs: Sequence[RunFiles]) -> list[tuple[str, list[str], bool]]:
    """Return (name, value of each run, whether they differ) of settings that differ from their default in some run.

    Args:
        runs: Files of each run.
    """
    defaults = {name: setting.default for name, setting in table().items()}
    changed = {name for run in runs for name, value in run.settings.items() if name in defaults and value != defaults[name]}
    return compare_values([{name: value for name, value in run.settings.items() if name in changed} for run in runs])


def compare_values(columns: Sequence[Row]) -> list[tuple[str, list[str], bool]]:
    """Return (name, values, whether they differ) for each name, in the order of the first column that has it.

    Args:
        columns: Values by name, one mapping for each run.
    """
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, [str(column.get(name, "–")) for column in columns]) for name in names]
    return [(name, values, len(set(values)) > 1) for name, values in rows]


def number(value: Any) -> str:
    """Format a number of a table."""
    return f"{value:.4g}" if is_number(value) else "–"
