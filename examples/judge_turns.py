"""Says whether an example with turns learnt what it promises, and draws how. Exit code 0: yes; 1: no, and why.

python examples/judge_turns.py output/calculator --before 0.5 --after 0.9 --curves environment/tool_calls environment/tool_errors
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

MAX_LOGPROB_DIFFERENCE = 1e-4  # nats between the sampler's and the trainer's log-probs, float32
MIN_STANDARD_ERRORS = 5.0  # standard errors of the change


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def find_problems(steps: list[dict], evaluations: list[dict], max_before: float, min_after: float) -> tuple[list[str], str]:
    """What is wrong with the run, a sentence each; and the sentence that sums it up."""
    if not steps or len(evaluations) != 2:
        return [f"there is nothing to judge: {len(steps)} steps, {len(evaluations)} evaluations"], "no run"
    problems = []
    before, after = ((one[f"mean@{one['n']}"], one[f"mean@{one['n']}/stderr"]) for one in evaluations)
    change, error = evaluations[1].get("change"), evaluations[1].get("change/stderr")
    difference = max(step.get("sampling/sampling_logp_difference/max", 0.0) for step in steps)  # none where all rewards are equal
    if before[0] > max_before:
        problems.append(f"the score before training is {before[0]:.3f}, more than {max_before}: there was little left to learn")
    if after[0] < min_after:
        problems.append(f"the score after training is {after[0]:.3f}, less than {min_after}")
    if change is None:
        problems.append("the two evaluations did not ask the same")
    elif not change > MIN_STANDARD_ERRORS * error:
        problems.append(f"the change, {change:+.3f}, is not {MIN_STANDARD_ERRORS:g} times its standard error, {error:.3f}")
    if sum(step.get("episodes/failed", 0) for step in steps):
        problems.append("some episodes failed")
    if not difference <= MAX_LOGPROB_DIFFERENCE:  # NaN is none
        problems.append(f"sampler and trainer differ by up to {difference:.1e} nats, more than {MAX_LOGPROB_DIFFERENCE}")
    seconds = sum(step["time/step"] for step in steps)
    scores = f"{before[0]:.3f} ± {before[1]:.3f} -> {after[0]:.3f} ± {after[1]:.3f}"
    return problems, f"held-out score, sampled, {scores} in {len(steps)} steps, {seconds:.0f} s of training"


def draw_plot(steps: list[dict], evaluations: list[dict], curves: list[str], path: Path) -> None:
    """Reward and held-out scores on the left, what else changed on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(*find_points(steps, f"rewards/{evaluations[0]['score']}/mean"), label="training", color="#2563a8")
    scores = [(one["step"], one[f"mean@{one['n']}"], 2 * one[f"mean@{one['n']}/stderr"]) for one in evaluations]
    at, values, errors = zip(*scores)
    left.errorbar(at, values, yerr=errors, fmt="o", color="#d1622b", capsize=4, label="held out, with two standard errors")
    left.set(title=f"Reward: {evaluations[0]['score']}", xlabel="optimizer step", ylim=(0, 1.05))
    for name, colour in zip(curves, ("#3a8f5c", "#8a5aa8", "#b8892b")):
        right.plot(*find_points(steps, name), label=name, color=colour)
    right.set(title="An episode, on average", xlabel="optimizer step")
    for axes in (left, right):
        axes.grid(color="#e4e7ea")
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def find_points(steps: list[dict], name: str) -> tuple[list[int], list[float]]:
    found = [(step["step"], step[name]) for step in steps if step.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--before", type=float, required=True, help="the highest score that leaves something to learn")
    parser.add_argument("--after", type=float, required=True, help="the lowest score that will do")
    parser.add_argument("--curves", nargs="+", default=["episodes/turns"], help="metrics for the plot")
    args = parser.parse_args()
    steps, evaluations = (
        read_jsonl(args.run / "metrics.jsonl"),
        read_jsonl(args.run.with_name(f"{args.run.name}-eval") / "evaluations.jsonl"),
    )
    problems, summary = find_problems(steps, evaluations, args.before, args.after)
    picture = args.run / "plots" / "learnt.png"
    if steps and evaluations:
        draw_plot(steps, evaluations, args.curves, picture)
    for problem in problems:
        print(f"[verdict] {problem}")
    print(f"VERDICT: {'FAILED' if problems else 'PASSED'}: {summary} (see {picture})")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
