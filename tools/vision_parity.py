"""Compare vision-language models in every layout with transformers in float64: log-probs and gradients of all parts.

    python tools/vision_parity.py [--families qwen2_5_vl ...] [--layouts "TP2 SP" CP2 ...] [--ways shared ...]

Ranks are processes connected by gloo. Rows have up to two images and share some of them; some completions contain image placeholders that
were sampled. The export before the first step must equal the checkpoint bit for bit. A run takes half an hour on two cores; a part of it is
a test. The exit code is 1 if any difference exceeds the limits.
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

from tests import parity_cases as cases  # noqa: E402
from tests import vision_cases as vision  # noqa: E402
from tests.ranks import RanksFailed, run_ranks  # noqa: E402

STEPS = 2
# Adapters start at zero, so after two steps they have the relative error of a step, which Adam divides by its size.
LIMITS = {"loss": 1e-6, "gradient": 1e-5, "weight": 1e-4}


def main() -> int:
    """Compare all selected cases, print a line for each and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(vision.FAMILIES), choices=vision.FAMILIES)
    parser.add_argument("--layouts", nargs="+", default=list(vision.LAYOUTS), choices=vision.LAYOUTS, metavar="LAYOUT")
    parser.add_argument("--ways", nargs="+", default=list(vision.WAYS), choices=vision.WAYS, metavar="WAY")
    args = parser.parse_args()
    found, red = dict[tuple[str, str, str], tuple[float, cases.Distance]](), 0
    for family in args.families:
        with tempfile.TemporaryDirectory() as folder:
            path = vision.write_vlm(folder, family)
            batches = vision.rollout(path, num_steps=STEPS)
            wanted = vision.logprobs_in_float64(path, batches[0])
            references: dict[frozenset, cases.Trained] = {}
            for layout in (name for name in args.layouts if vision.suits(family, name)):
                ways = {way: vision.WAYS[way] for way in args.ways if vision.suits(family, layout, way)}
                found |= {
                    (family, layout, way): one for way, one in compare_layout(path, layout, ways, batches, wanted, references).items()
                }
                for way in ways:
                    logprobs, distance = found[family, layout, way]
                    is_red = not distance.within(**LIMITS) or not logprobs < 1e-5
                    red += is_red
                    how = f"{'RED ' * is_red}{family:10} {layout:14} {way:20} log-probs {logprobs:.1e}, {describe(distance)}"
                    print(how, flush=True)
    distances = [distance for _, distance in found.values()]
    print(f"{len(found)} runs, {red} beyond {LIMITS} or log-probs beyond 1e-5")
    print(f"worst: log-probs {max(one for one, _ in found.values()):.1e}, {describe(cases.merge_worst(distances))}")
    return 1 if red else 0


def describe(d: cases.Distance) -> str:
    """Return a phrase with the numbers of a distance."""
    return f"loss {d.loss:.0e}, gradient {d.gradient:.1e} ({d.worst_gradient}), weights after {STEPS} steps {d.weight:.0e}"


def compare_layout(path, layout: str, ways, batches, wanted, references) -> dict[str, tuple[float, cases.Distance]]:
    """Return (worst log-prob difference, distance) of each way in one layout; infinite if a rank failed.

    Args:
        path: Path of the checkpoint.
        layout: Name of the layout.
        ways: Settings of each way.
        batches: Rows of each step.
        wanted: Log-probs in float64.
        references: Reference results by settings; missing ones are added.
    """
    where = vision.LAYOUTS[layout]
    try:
        results_by_rank = run_ranks(vision.all_ways, where.world_size, path, where.settings, ways, batches, timeout=120 + 60 * len(ways))
    except RanksFailed as error:  # continue with the other layouts
        print(error, file=sys.stderr)
        return dict.fromkeys(ways, (float("inf"), cases.Distance.failed()))
    found = {}
    for way, chosen in ways.items():
        key = frozenset((name, str(value)) for name, value in chosen.items() if name in vision.DECIDES)
        if key not in references:
            references[key] = cases.reference(path, vision.settings(path, chosen), batches)
        distance = cases.merge_worst([cases.distance(mine[way][1], references[key]) for mine in results_by_rank])
        found[way] = max(vision.far(mine[way][0], wanted) for mine in results_by_rank), distance
    return found


if __name__ == "__main__":
    sys.exit(main())
