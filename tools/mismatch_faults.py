"""Inject faults into a trainer or its sampler, and check which cause `megatron-grpo mismatch` names.

    python tools/mismatch_faults.py [--dtype bfloat16] [--only WORD] [--random 200] [--seed 0]

Trainer and sampler are the real ones, on a CPU. The tool prints the table of docs/reliability.md. The exit code is 1 if a fault is not
named, or if a cause is named where there is no fault.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # as a script, only its own folder is on the path

from tests import mismatch_cases as cases  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.tiny_models import write_tiny  # noqa: E402

MODELS_PER_PROCESS = 10  # random models that share a process


def main() -> int:
    """Run the selected checks and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--only", default="", help="check only faults whose description contains this text")
    parser.add_argument("--random", type=int, default=0, help="check this many random models without faults instead")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first random model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return check_random_models(args, Path(folder)) if args.random else check_faults(args, Path(folder))


def check_faults(args: argparse.Namespace, folder: Path) -> int:
    """Check each fault and each case without a fault, print the table and return the exit code."""
    every = cases.FAULTS + cases.CLEAN
    groups: dict[tuple[str, str], list[int]] = {}
    for index, one in enumerate(every):
        if args.only in one.what:
            groups.setdefault((one.model, one.layout), []).append(index)
    found = {}
    for (model, layout), indices in groups.items():
        paths = [write_tiny(folder / f"{model}-{layout}-{seed}", **cases.MODELS[model], seed=seed) for seed in (0, 1)]
        ranks = cases.LAYOUTS[layout][0]
        found |= dict(zip(indices, run_ranks(cases.find_mismatches, ranks, paths, indices, args.dtype, timeout=900)[0], strict=True))
    print("| fault | model | log-probs differ by, nats | named | of its size | because |\n|---|---|---|---|---|---|")
    wrong = 0
    for index, one in sorted(found.items()):
        fault = every[index]
        is_right = cases.is_right(fault, one)
        wrong += not is_right
        mark = "" if is_right else f" (WRONG: {fault.named or 'nothing'} should be named)"
        size = f"{one['difference']:.2g}" if one["named"] else f"{one['largest'][0]:.1e} at most ({one['largest'][1]})"
        print(
            f"| {fault.what} | {fault.model} | {one['nats']:.2g} | {one['named'] or 'none'}{mark} | {size} | {one['cause']} |", flush=True
        )
    print(f"\n{len(found) - wrong} of {len(found)} right, {args.dtype}")
    return 1 if wrong else 0


def check_random_models(args: argparse.Namespace, folder: Path) -> int:
    """Check random models without faults, print each false alarm and return the exit code."""
    alarms, largest = 0, (0.0, "")
    for first in range(args.seed, args.seed + args.random, MODELS_PER_PROCESS):
        seeds = range(first, min(first + MODELS_PER_PROCESS, args.seed + args.random))
        # In one process, vLLM cannot build a model with experts after one without.
        paths_by_experts = {True: [], False: []}
        for seed in seeds:
            model = cases.random_model(seed)
            paths_by_experts[model["family"] in ("qwen3_moe", "mixtral")].append(write_tiny(folder / str(seed), **model))
        for paths in filter(None, paths_by_experts.values()):
            for path, one in zip(paths, run_ranks(cases.find_random_mismatches, 1, paths, first, args.dtype, timeout=900)[0], strict=True):
                largest = max(largest, one["largest"])
                if one["over"]:
                    alarms += 1
                    print(f"seed {path.name}: {one['over']}, {cases.random_model(int(path.name))}", flush=True)
        print(f"{seeds[-1] + 1 - args.seed} models, {alarms} alarms; largest {largest[0]:.1e} of its size ({largest[1]})", flush=True)
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
