"""Puts faults into one side of a trainer and its sampler, and says what `megatron-grpo mismatch` names: the table of docs/reliability.md.

    python tools/mismatch_faults.py [--dtype bfloat16] [--only WORD] [--random 200] [--seed 0]

--only: faults whose description has the word. --random: so many models of other families and sizes with nothing wrong, instead of the
faults. Trainer and sampler are the real ones, on a CPU. Ends with 1 where a fault is not named, or something is where there is none.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this file is run as a script; what it imports of the repository comes after

from tests import mismatch_cases as cases  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.tiny_models import write_tiny  # noqa: E402

MODELS_PER_PROCESS = 10  # random models in one process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--only", default="")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return check_random_models(args, Path(folder)) if args.random else check_faults(args, Path(folder))


def check_faults(args: argparse.Namespace, folder: Path) -> int:
    every = cases.FAULTS + cases.CLEAN
    groups: dict[tuple[str, str], list[int]] = {}
    for index, one in enumerate(every):
        if args.only in one.what:
            groups.setdefault((one.model, one.layout), []).append(index)
    found = {}
    for (model, layout), indices in groups.items():
        paths = [write_tiny(folder / f"{model}-{layout}-{seed}", **cases.MODELS[model], seed=seed) for seed in (0, 1)]
        ranks = cases.LAYOUTS[layout][0]
        found |= dict(zip(indices, run_ranks(cases.found_of, ranks, paths, indices, args.dtype, timeout=900)[0], strict=True))
    print("| fault | model | log-probs differ by, nats | named | of its size | because |\n|---|---|---|---|---|---|")
    wrong = 0
    for index, one in sorted(found.items()):
        fault = every[index]
        is_right = cases.is_right(fault, one)
        wrong += not is_right
        mark = "" if is_right else f" (WRONG: {fault.named or 'nothing'} was to be named)"
        size = f"{one['difference']:.2g}" if one["named"] else f"{one['largest'][0]:.1e} at most ({one['largest'][1]})"
        print(
            f"| {fault.what} | {fault.model} | {one['nats']:.2g} | {one['named'] or 'none'}{mark} | {size} | {one['cause']} |", flush=True
        )
    print(f"\n{len(found) - wrong} of {len(found)} right, {args.dtype}")
    return 1 if wrong else 0


def check_random_models(args: argparse.Namespace, folder: Path) -> int:
    alarms, largest = 0, (0.0, "")
    for first in range(args.seed, args.seed + args.random, MODELS_PER_PROCESS):
        seeds = range(first, min(first + MODELS_PER_PROCESS, args.seed + args.random))
        # vLLM builds no model with experts after one without in one process.
        paths_by_experts = {True: [], False: []}
        for seed in seeds:
            model = cases.random_model(seed)
            paths_by_experts[model["family"] in ("qwen3_moe", "mixtral")].append(write_tiny(folder / str(seed), **model))
        for paths in filter(None, paths_by_experts.values()):
            for path, one in zip(paths, run_ranks(cases.found_at_random, 1, paths, first, args.dtype, timeout=900)[0], strict=True):
                largest = max(largest, one["largest"])
                if one["over"]:
                    alarms += 1
                    print(f"seed {path.name}: {one['over']}, {cases.random_model(int(path.name))}", flush=True)
        print(f"{seeds[-1] + 1 - args.seed} models, {alarms} alarms; largest {largest[0]:.1e} of its size ({largest[1]})", flush=True)
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
