"""Check the result of a multi-turn example and plot it. Exit with code 0 if it passes; else print the problems and exit with code 1.

python examples/judge_turns.py output/calculator --before 0.5 --after 0.9 --curves environment/tool_calls environment/tool_errors
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

MAX_LOGPROB_DIFFERENCE = 1e-4  # nats, between sampler and trainer in float32
MIN_STANDARD_ERRORS = 5.0  # of the change in the score


def read_jsonl(path: Path) -> list[dict]:
    """Return the rows of a JSON Lines file; none if the file does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def find_problems(steps: list[dict], evaluations: list[dict], max_before: float, min_after: float) -> tuple[list[str], str]:
    """Return one sentence per problem of the run, and a one-line summary."""
    if not steps or len(evaluations) != 2:
        return [f"there is no result to check: {len(steps)} steps and {len(evaluations)} evaluations; 2 evaluations are needed"], "no run"
    problems = []
    before, after = ((one[f"mean@{one['n']}"], one[f"mean@{one['n']}/stderr"]) for one in evaluations)
    change, error = evaluations[1].get("change"), evaluations[1].get("change/stderr")
    difference = max(step.get("sampling/sampling_logp_difference/max", 0.0) for step in steps)  # absent if no step had a gradient
    if before[0] > max_before:
        problems.append(f"the score before training is {before[0]:.3f}, more than {max_before}")
    if after[0] < min_after:
        problems.append(f"the score after training is {after[0]:.3f}, less than {min_after}")
    if change is None:
        problems.append("the two evaluations have different prompts")
    elif not change > MIN_STANDARD_ERRORS * error:
        problems.append(f"the change, {change:+.3f}, is not {MIN_STANDARD_ERRORS:g} times its standard error, {error:.3f}")
    if sum(step.get("episodes/failed", 0) for step in steps):
        problems.append("some episodes failed")
    if not difference <= MAX_LOGPROB_DIFFERENCE:  # also true for NaN
        problems.append(f"sampler and trainer differ by up to {difference:.1e} nats, more than {MAX_LOGPROB_DIFFERENCE}")
    seconds = sum(step["time/step"] for step in steps)
    scores = f"{before[0]:.3f} ± {before[1]:.3f} -> {after[0]:.3f} ± {after[1]:.3f}"
    return problems, f"held-out score, sampled, {scores} in {len(steps)} steps, {seconds:.0f} s of training"


def draw_plot(steps: list[dict], evaluations: list[dict], curves: list[str], path: Path) -> None:
    """Plot reward and held-out scores on the left, and the metrics `curves` on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(*find_points(steps, f"rewards/{evaluations[0]['score']}/mean"), label="training", color="#2563a8")
    scores = [(one["step"], one[f"mean@{one['n']}"], 2 * one[f"mean@{one['n']}/stderr"]) for one in evaluations]
    score_steps, values, errors = zip(*scores)
    left.errorbar(score_steps, values, yerr=errors, fmt="o", color="#d1622b", capsize=4, label="held out, with two standard errors")
    left.set(title=f"Reward: {evaluations[0]['score']}", xlabel="optimizer step", ylim=(0, 1.05))
    for name, color in zip(curves, ("#3a8f5c", "#8a5aa8", "#b8892b")):
        right.plot(*find_points(steps, name), label=name, color=color)
    right.set(title="Means per episode", xlabel="optimizer step")
    for axes in (left, right):
        axes.grid(color="#e4e7ea")
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def find_points(steps: list[dict], name: str) -> tuple[list[int], list[float]]:
    """Return the steps that have a metric, and its values."""
    found = [(step["step"], step[name]) for step in steps if step.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def main() -> int:
    """Print the problems and the verdict of a run, and plot it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output_dir of the run; its evaluations are in RUN-eval")
    parser.add_argument("--before", type=float, required=True, help="highest allowed score before training")
    parser.add_argument("--after", type=float, required=True, help="lowest allowed score after training")
    parser.add_argument("--curves", nargs="+", default=["episodes/turns"], help="metrics to plot")
    args = parser.parse_args()
    steps, evaluations = (
        read_jsonl(args.run / "metrics.jsonl"),
        read_jsonl(args.run.with_name(f"{args.run.name}-eval") / "evaluations.jsonl"),
    )
    problems, summary = find_problems(steps, evaluations, args.before, args.after)
    plot = args.run / "plots" / "learning.png"
    if steps and evaluations:
        draw_plot(steps, evaluations, args.curves, plot)
    for problem in problems:
        print(f"[verdict] {problem}")
    print(f"VERDICT: {'FAILED' if problems else 'PASSED'}: {summary} (see {plot})")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
