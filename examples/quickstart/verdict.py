"""Check the result of a quickstart run. Exit with code 0 if it passes; else print the problems and exit with code 1.

python examples/quickstart/verdict.py output/quickstart
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

MAX_BEFORE, MIN_AFTER = 0.5, 0.9  # greedy accuracy on held-out sums
MAX_LOGPROB_DIFFERENCE = 1e-4  # nats, between sampler and trainer in float32
# Metric of a phase's time -> its name in the summary.
PHASES = {"rollout": "sampling", "train": "training", "weight_sync": "weight sync", "eval": "evaluation"}
FILES = ("config.yaml", "metrics.jsonl", "completions", "plots/reward.png", "hf/config.json")


def read_jsonl(path: Path) -> list[dict]:
    """Return the rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def find_problems(run: Path) -> tuple[list[str], str]:
    """Return one sentence per problem of the run, and a one-line summary."""
    problems = [f"{name} is missing" for name in FILES if not (run / name).exists()]
    if not (run / "metrics.jsonl").exists() or not (run / "evaluations.jsonl").exists():
        return [*problems, "metrics.jsonl or evaluations.jsonl is missing: there is no result to check"], "no run"
    steps, evaluations = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "evaluations.jsonl")
    accuracy = [evaluation["correct"] for evaluation in evaluations]
    seconds = sum(step["time/step"] for step in steps)
    seconds_by_phase = {name: sum(step.get(f"time/{name}", 0.0) for step in steps) for name in PHASES}
    difference = max(step.get("sampling/sampling_logp_difference/max", 0.0) for step in steps)  # absent if no step had a gradient
    if accuracy[0] > MAX_BEFORE:
        problems.append(f"accuracy before training is {accuracy[0]:.3f}, more than {MAX_BEFORE}")
    if accuracy[-1] < MIN_AFTER:
        problems.append(f"accuracy after training is {accuracy[-1]:.3f}, less than {MIN_AFTER}")
    second_half = accuracy[len(accuracy) // 2 :]
    if min(second_half) < MIN_AFTER <= accuracy[-1]:
        problems.append(f"accuracy fell to {min(second_half):.3f} in the second half of the run")
    if difference > MAX_LOGPROB_DIFFERENCE:
        problems.append(f"sampler and trainer differ by up to {difference:.1e} nats, more than {MAX_LOGPROB_DIFFERENCE}")
    summary = f"held-out accuracy {accuracy[0]:.3f} -> {accuracy[-1]:.3f} in {len(steps)} steps, {seconds:.0f} s of steps ("
    summary += ", ".join(f"{label} {seconds_by_phase[name]:.1f}" for name, label in PHASES.items()) + ")"
    return problems, summary


def main() -> int:
    """Print the problems and the verdict of the run whose output_dir is the first argument."""
    run = Path(sys.argv[1] if len(sys.argv) > 1 else "output/quickstart")
    problems, summary = find_problems(run)
    for problem in problems:
        print(f"[verdict] {problem}")
    print(f"VERDICT: {'FAILED' if problems else 'PASSED'}: {summary} (see {run})")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
