"""Compare all combinations of loss options with a float64 reference, in several parallel layouts.

    python tools/combinations.py [--layouts 1 TP2 PP2 DP2 CP2]
    python tools/combinations.py --random 200 [--seed 0]

The options are loss type, importance sampling level, KL mode and advantage estimator: 1584 legal combinations. Each has further settings
drawn at random (clip ranges, corrections, filters, entropy). Micro-batches of 1, 2 or 4 completions and packed ones alternate. The tool
prints the worst relative error of loss and gradient tensors for each layout. The exit code is 1 if a loss is off by more than 1e-6 (vespo:
6e-6) or a gradient by more than 1e-5. A run takes twenty minutes on two cores. CI runs a part: tests/distributed/test_combinations.py.

With `--random N`, N runs are drawn completely: model, groups, rewards, layout, combination, settings and batch split. Their losses may be
off by 5e-6, because terms cancel in some of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the cores
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from megatron_grpo.core.settings import GrpoConfig
from tests import combinations as every
from tests import parity_cases as cases
from tests.ranks import run_ranks

RUNS_PER_MODEL = 10
VESPO_LIMIT = 6e-6  # the weight is a power of a product over a sequence, which amplifies the rounding of log-probs


def main() -> int:
    """Run the selected comparison and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["1", "TP2", "PP2", "DP2", "CP2"], choices=cases.LAYOUTS, metavar="LAYOUT")
    parser.add_argument("--random", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    return compare_random(args.random, args.seed) if args.random else compare_all(args.layouts)


def compare_all(layouts: list[str]) -> int:
    """Compare all combinations in each layout and return the exit code."""
    runs, is_good = every.iterate_runs(every.list_all()), True
    with tempfile.TemporaryDirectory() as name:
        made = every.make_inputs(Path(name))
        right = every.expect(made, runs, Path(name))
        for layout in layouts:
            is_good &= compare_layout(layout, made, runs, right, bar=1e-6)[2]
    return 0 if is_good else 1


def compare_random(count: int, seed: int) -> int:
    """Compare `count` random runs and return the exit code."""
    worst_loss, worst_gradient, is_good, done, with_quantile = 0.0, 0.0, True, 0, 0
    while done < count:
        rng = np.random.default_rng([seed, done])
        layout = str(rng.choice([name for name, case in cases.LAYOUTS.items() if not case.needs_experts]))
        shape = every.RANDOM_SHAPES[rng.integers(len(every.RANDOM_SHAPES))]
        groups = every.random_groups(rng)
        runs = every.random_runs(rng, cases.LAYOUTS[layout], min(RUNS_PER_MODEL, count - done))
        with tempfile.TemporaryDirectory() as name:
            made = every.make_inputs(Path(name), int(rng.integers(1000)), groups, layers=4, **shape)
            right = every.expect(made, runs, Path(name))
            print(f"{done:4} {shape} {groups}")
            loss, gradient, good = compare_layout(layout, made, runs, right, bar=5e-6)
        worst_loss, worst_gradient, is_good = max(worst_loss, loss), max(worst_gradient, gradient), is_good and good
        done += len(runs)
        with_quantile += sum(cfg.top_entropy_quantile < 1 for cfg, _ in runs.values())
    print(f"{done} runs, {with_quantile} with an entropy quantile: worst loss {worst_loss:.1e}, worst gradient {worst_gradient:.1e}")
    return 0 if is_good else 1


def is_rounding(loss_type: str, error: float, tensor: str = "") -> bool:
    """Return whether an error is explained by rounding although it exceeds the limit.

    Args:
        loss_type: Loss type of the run.
        error: Relative error.
        tensor: Name of the gradient tensor; empty for the loss.
    """
    return loss_type == "vespo" and not tensor and error <= VESPO_LIMIT


def compare_layout(
    layout: str, made: every.CombinationInputs, runs: every.Runs, right: every.ExpectedResults, *, bar: float
) -> tuple[float, float, bool]:
    """Compare all runs in one layout and print a line with the result.

    Args:
        layout: Name of the layout.
        made: Model and data of the runs.
        runs: Settings and batch split of each run.
        right: Numbers of the reference.
        bar: Limit of the relative error of a loss.

    Returns:
        The worst loss error, the worst gradient error, and whether all errors are within the limits.
    """
    start, case = time.perf_counter(), cases.LAYOUTS[layout]
    found = run_ranks(every.measure, case.world_size, made, case.settings, runs, right, timeout=3600)[-1]
    loss, gradient = max(found.loss.values()), max(found.gradient.values())
    print(f"{layout:<16} {len(found.loss)} combinations  loss {loss:.1e}  gradient {gradient[0]:.1e} ({gradient[1]})  "
          f"{time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
    beyond = [wrong for wrong in found.beyond(loss=bar) if not is_rounding(runs[wrong[0]][0].loss_type, *wrong[1:])]
    for key, *wrong in beyond:
        cfg, cut = runs[key]
        chosen = {name: value for name, value in vars(cfg).items() if value != getattr(GrpoConfig(), name)}
        print(f"    {key}: {wrong} {chosen} {cut}")
    return loss, gradient[0], not beyond


if __name__ == "__main__":
    sys.exit(main())
