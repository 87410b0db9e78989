"""Check that `--check_replicas` detects seeded faults, and that it raises no false alarm.

    python tools/replica_faults.py faults            all seeded faults of tests/replica_check_cases.py; prints the table of
                                                     docs/reliability.md
    python tools/replica_faults.py clean [200]       this many runs of two steps without faults, drawn from layouts, models, optimizers
                                                     and tuners

The exit code is 1 if a fault is not reported as expected, or if there is a false alarm.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the cores
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import parity_cases as cases
from tests import replica_check_cases as checks
from tests.tiny_models import write_tiny

# A run combines one random element of each.
OPTIMIZERS = ({}, {}, dict(use_distributed_optimizer=False), dict(overlap_grad_reduce=True),
              dict(overlap_grad_reduce=True, overlap_param_gather=True))  # fmt: skip
TUNERS = ({}, {}, dict(tuner_type="lora"), dict(tuner_type="lora", lora_dropout=0.1))
MEMORY = ({}, dict(recompute_granularity="selective"),
          dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1))  # fmt: skip
DTYPES = ({}, {}, dict(torch_dtype="bfloat16"))
LOSSES = ({}, dict(beta=0.05), dict(loss_type="dapo"), dict(loss_type="dr_grpo", beta=0.1), dict(importance_sampling_level="sequence"))
CUTS = ({}, dict(micro_batch_size=2), dict(max_tokens_per_micro_batch=32), dict(share_prefix="true"))


def write_models(folder: Path) -> dict[str, Path]:
    """Write the models of the cases and return their paths by name."""
    return {name: write_tiny(folder / name, **how) for name, how in cases.MODELS.items()}


def check_faults(folder: Path) -> bool:
    """Check each seeded fault, print the table and return whether all were reported as expected."""
    at, well = write_models(folder), True
    batches = {name: cases.stored_rollout(path, vocab=125, num_steps=2, stale=0) for name, path in at.items()}
    found = checks.seeded(list(checks.FAULTS), at, batches)
    print("| fault | finding | layout | said |\n| --- | --- | --- | --- |")
    for name, fault in checks.FAULTS.items():
        before, after, gap = found[name][0]
        right = before is None and len(set(found[name])) == 1 and (fault.says in (after or "") if fault.says else after is None and gap)
        well &= bool(right)
        said = after.split("equal): ")[-1].split(";")[0] if after else f"nothing; log-prob difference: {gap}"
        layout = ", ".join(f"{key} {value}" for key, value in fault.settings.items()) or "two data-parallel ranks"
        print(f"| {name} | {fault.finding or ''} | {layout}; {fault.model} | {said}{'' if right else ' NOT AS EXPECTED'} |")
    for finding, why in checks.NOT_POSSIBLE.items():
        print(f"| | {finding} | | not possible here: {why} |")
    return well


def check_sound_runs(folder: Path, count: int, seed: int = 0) -> bool:
    """Check random runs without faults and return whether there was no false alarm.

    Args:
        folder: Folder of the models.
        count: Number of runs.
        seed: Seed of the runs.
    """
    at, rng, drawn = write_models(folder), random.Random(seed), {}
    pairs = [(name, model) for name, case in cases.LAYOUTS.items() for model in cases.MODELS
             if case.world_size > 1 and cases.suits(case, model)]  # fmt: skip
    while sum(map(len, drawn.values())) < count:
        name, model = rng.choice(pairs)
        layout = cases.LAYOUTS[name].settings | cases.MODEL_SETTINGS.get(model, {})
        ways = {}
        for way in map(rng.choice, (OPTIMIZERS, TUNERS, MEMORY, DTYPES, LOSSES, CUTS)):
            ways |= way
        if ways.get("tuner_type") and model == "MLA" or ways.get("lora_dropout") and "share_prefix" in ways:
            continue
        if not ways.get("max_tokens_per_micro_batch") and not cases.is_legal(cases.LAYOUTS[name], ways):
            continue
        drawn.setdefault((name, model), []).append(layout | ways)
    false = 0
    for (name, model), settings in drawn.items():
        runs = [(one, cases.stored_rollout(at[model], vocab=125, num_steps=2, seed=rng.randrange(10**6))) for one in settings]
        said = checks.clean(cases.LAYOUTS[name], model, at[model], runs, cases.LAYOUTS[name].settings)
        for one, found in zip(settings, said, strict=True):
            false += bool(found)
            if found:
                print(f"{name}, {model}, {one}: {found[0]}", flush=True)
        print(f"{name}, {model}: {len(runs)} runs", file=sys.stderr, flush=True)
    print(f"{count} sound runs over {len(drawn)} pairs of layout and model: {false} false alarms")
    return not false


if __name__ == "__main__":
    what, *rest = sys.argv[1:] or ["faults"]
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(
            0
            if (check_faults(Path(scratch)) if what == "faults" else check_sound_runs(Path(scratch), int(rest[0]) if rest else 200))
            else 1
        )
