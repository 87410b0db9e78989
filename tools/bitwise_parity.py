"""Count the log-probs of trainer and sampler that differ in any bit under `--bitwise_parity true`, and print a table.

    python tools/bitwise_parity.py [--models qwen3 mixtral ...] [--layouts 1 "TP2 SP" ...] [--dtypes float32 bfloat16] [--steps 2]

Models and layouts come from tests/bitwise_parity_cases.py; ranks are processes connected by gloo. All cases together take about ten minutes
of CPU time. The exit code is 1 if any bit differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the cores
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # as a script, only its own folder is on the path

from tests import bitwise_parity_cases as cases  # noqa: E402
from tests.ranks import RanksFailed, run_ranks  # noqa: E402


def main() -> int:
    """Compare all selected cases, print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=cases.MODELS, metavar="MODEL", default=list(cases.MODELS))
    parser.add_argument("--layouts", nargs="+", choices=cases.LAYOUTS, metavar="LAYOUT", default=list(cases.LAYOUTS))
    parser.add_argument("--dtypes", nargs="+", choices=cases.DTYPES, default=list(cases.DTYPES))
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps, each followed by a weight sync")
    args = parser.parse_args()
    print(f"Processor with {cases.read_cpu_features()}.\n\n| dtype | model | layout | {' | '.join(cases.COMPARED)} |\n{'|---' * 7}|")
    count = wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for dtype, model in ((dtype, model) for dtype in args.dtypes for model in args.models):
            path = cases.write(Path(folder) / f"{model}, {dtype}", model, dtype)
            for layout in (layout for layout in args.layouts if cases.is_supported(model, layout, dtype)):
                found = count_mismatches(path, layout, dtype, args.steps)
                count, wrong = count + 1, wrong + (found is None or not all(one.is_exact for one in found.values()))
                cells = ["failed"] * len(cases.COMPARED) if found is None else [str(found[name]) for name in cases.COMPARED]
                print(f"| {dtype} | {model} | {layout} | {' | '.join(cells)} |", flush=True)
    print(f"\n{count} cases, {wrong} with differing bits")
    return 1 if wrong else 0


def count_mismatches(path: Path, layout: str, dtype: str, steps: int) -> dict[str, cases.EqualLogprobs] | None:
    """Return the counts of one case by the name of the compared quantity; None if a rank failed."""
    case = cases.LAYOUTS[layout]

    def body(rank, world):
        return cases.compare(rank, world, path, steps=steps, torch_dtype=dtype, **case.settings)

    try:
        return cases.sum_counts_over_ranks(run_ranks(body, case.world_size, timeout=600))
    except RanksFailed as error:  # continue with the other cases
        print(error, file=sys.stderr)
        return None


if __name__ == "__main__":
    sys.exit(main())
