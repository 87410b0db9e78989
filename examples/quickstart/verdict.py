"""Says whether a quickstart run did what it promises. Exit code 0: yes; 1: no, and why.

python examples/quickstart/verdict.py output/quickstart
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

AT_MOST_BEFORE, AT_LEAST_AFTER = 0.5, 0.9  # held-out accuracy, greedy
MOST_DIFFERENCE = 1e-4  # nats between the sampler's and the trainer's log-probs, float32
PARTS = {"rollout": "sampling", "train": "training", "weight_sync": "syncing weights", "eval": "evaluating"}  # of a step's time
FILES = ("config.yaml", "metrics.jsonl", "completions", "plots/reward.png", "hf/config.json")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def find_faults(run: Path) -> tuple[list[str], str]:
    """What is wrong with the run, a sentence each; and the sentence that sums it up."""
    faults = [f"{name} is missing" for name in FILES if not (run / name).exists()]
    if not (run / "metrics.jsonl").exists() or not (run / "evaluations.jsonl").exists():
        return [*faults, "there is nothing to judge"], "no run"
    steps, evaluations = read(run / "metrics.jsonl"), read(run / "evaluations.jsonl")
    accuracy = [evaluation["correct"] for evaluation in evaluations]
    seconds = sum(step["time/step"] for step in steps)
    parts = {name: sum(step.get(f"time/{name}", 0.0) for step in steps) for name in PARTS}
    difference = max(step.get("sampling/sampling_logp_difference/max", 0.0) for step in steps)  # none where all rewards are equal
    if accuracy[0] > AT_MOST_BEFORE:
        faults.append(f"accuracy before training is {accuracy[0]:.3f}, more than {AT_MOST_BEFORE}: there was little left to learn")
    if accuracy[-1] < AT_LEAST_AFTER:
        faults.append(f"accuracy after training is {accuracy[-1]:.3f}, less than {AT_LEAST_AFTER}")
    second_half = accuracy[len(accuracy) // 2 :]
    if min(second_half) < AT_LEAST_AFTER <= accuracy[-1]:
        faults.append(f"accuracy fell to {min(second_half):.3f} in the second half of the run: what was learnt did not stay")
    if difference > MOST_DIFFERENCE:
        faults.append(f"sampler and trainer differ by up to {difference:.1e} nats, more than {MOST_DIFFERENCE}")
    summary = f"held-out accuracy {accuracy[0]:.3f} -> {accuracy[-1]:.3f} in {len(steps)} steps, {seconds:.0f} s of steps ("
    summary += ", ".join(f"{what} {parts[name]:.1f}" for name, what in PARTS.items()) + ")"
    return faults, summary


def main() -> int:
    run = Path(sys.argv[1] if len(sys.argv) > 1 else "output/quickstart")
    faults, summary = find_faults(run)
    for fault in faults:
        print(f"[verdict] {fault}")
    print(f"VERDICT: {'FAILED' if faults else 'PASSED'}: {summary} (see {run})")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
