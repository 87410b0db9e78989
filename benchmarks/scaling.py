"""Measure the cost of a parallel layout: CPU seconds of one training step, summed over its ranks, relative to one rank.

    python benchmarks/scaling.py --rounds 3

Every layout trains the same samples from the same weights. Its loss and gradients are compared with those of one rank before a ratio is
printed. A ratio of 1.00 means that nothing is computed twice, sent or waited for. Jobs with one rank and with two alternate.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the models and the ranks of the tests

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_grpo.core.types import Sample
from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

MODELS = {
    "dense": dict(family="qwen3", vocab=512, hidden=256, layers=4, heads=8, kv_heads=4, ffn=512, max_positions=1024, std=0.05),
    "8 experts": dict(family="qwen3_moe", vocab=512, hidden=256, layers=4, heads=8, kv_heads=4, ffn=256, experts=8, max_positions=1024,
                      std=0.05),
}  # fmt: skip
LAYOUTS = [("dense", "TP2"), ("dense", "TP2 SP"), ("dense", "PP2"), ("dense", "CP2"), ("dense", "DP2"), ("8 experts", "EP2")]
PROMPTS, G, PROMPT, COMPLETION = 8, 8, 64, (32, 192)  # groups, their completions, tokens of a prompt, of a completion (from, to)


def make_rollout(step: int) -> list[Sample]:
    """Return the samples of a step."""
    rng, found = np.random.default_rng(step), []
    for prompt_number in range(PROMPTS):
        prompt, rows = rng.integers(4, 512, PROMPT), []
        for row in range(G):
            tokens = np.concatenate([prompt, rng.integers(4, 512, rng.integers(*COMPLETION))])
            rows.append(Sample(
                row=prompt_number * G + row, rollout=step, prompt_number=prompt_number, version=step, on_policy_version=step,
                token_ids=tokens,
                mask=np.arange(len(tokens)) >= PROMPT, sampler_logprobs=np.full(len(tokens), np.nan, dtype=np.float32),
                advantage=float(rng.normal()), is_zero_std=False, is_truncated=False,
            ))  # fmt: skip
        found += cases.with_prefix(rows)
    return found


def train(rank: int, world: int, path: Path, changes: dict, steps: int):
    """Return the CPU seconds of each step except the first, and the first step's loss and gradients (on rank 0).

    Args:
        rank: Rank of this process.
        world: Number of ranks.
        path: Path of the model.
        changes: Settings of the layout.
        steps: Number of measured steps.
    """
    cfg = cases.settings(loss_type="dapo", clip_grad=1.0, lr=1e-6, temperature=1.0, max_completion_length=COMPLETION[1],
                         max_tokens_per_micro_batch=2048, **changes)  # fmt: skip
    policy = cases.build(path, cfg, world)
    gradients: dict[str, np.ndarray] = {}
    act = policy.optimizer.step

    def record_and_step():
        if not gradients:
            gradients.update(cases.full_gradients(policy))
        return act()

    policy.optimizer.step = record_and_step
    seconds, losses = [], []
    for step in range(steps + 1):
        batch = cases.make_batch(policy, make_rollout(step), step)
        begin = time.process_time()
        losses.append(policy.train_step(batch).metrics["loss"])
        seconds.append(time.process_time() - begin)
    return seconds[1:], losses[0], gradients if rank == 0 else {}


def check_gradients(found, right, layout: str) -> float:
    """Return the worst relative error of a gradient tensor; exit if it is not a rounding error, because times would be meaningless.

    Args:
        found: Result of the layout.
        right: Result of one rank.
        layout: Name of the layout.
    """
    (_, loss, gradients), (_, right_loss, right_gradients) = found, right
    assert gradients.keys() == right_gradients.keys(), gradients.keys() ^ right_gradients.keys()
    worst = max(float(np.linalg.norm(gradients[n] - g) / np.linalg.norm(g)) for n, g in right_gradients.items())
    if worst > 1e-4 or abs(loss - right_loss) > 1e-5 * max(1, abs(right_loss)):
        raise SystemExit(f"{layout}: loss {loss} instead of {right_loss}, gradients off by {worst:.1e}: this is not the same step")
    return worst


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each layout, and as many of one rank")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a job, after a warm-up step")
    return parser.parse_args()


def main() -> None:
    """Measure all layouts and print the table."""
    arguments, console = parse_arguments(), Console(width=140)
    table = Table("model", "layout", "one rank, CPU s", "all ranks, CPU s", "all ranks / one: median (from, to)", "gradients differ by",
                  title=f"one train step, medians of {arguments.rounds} pairs of jobs")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name, layout in LAYOUTS:
            path = Path(folder) / name
            if not path.exists():
                write_tiny(path, **MODELS[name])
            case, pairs, worst = cases.LAYOUTS[layout], [], 0.0
            for _ in range(arguments.rounds):
                alone = run_ranks(train, 1, path, {}, arguments.steps, timeout=600)
                together = run_ranks(train, case.world_size, path, case.settings, arguments.steps, timeout=600)
                worst = max(worst, check_gradients(together[0], alone[0], layout))
                pairs.append((np.median(alone[0][0]), np.median(np.sum([rank[0] for rank in together], axis=0))))
            one, all_ranks = np.array(pairs).T
            ratios = all_ranks / one
            table.add_row(name, layout, f"{np.median(one):.2f}", f"{np.median(all_ranks):.2f}",
                          f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", f"{worst:.0e}")  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
