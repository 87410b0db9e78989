"""Measure the cost of `--check_replicas true`: CPU seconds of a check relative to the optimizer steps between two checks.

    python benchmarks/replica_check.py [steps]

Two gloo ranks, a model of a few million parameters and short rows: a step has little work per weight, so the share is an upper bound. Time
outside optimizer steps (sampling, weight sync, scoring) is not counted.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the ranks of the tests

from megatron_grpo.run.config.settings import RunConfig
from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.replica_check_cases import ReplicaCheckObserver
from tests.tiny_models import write_tiny

GROUPS = tuple((24, (96, 60, 80, 72)) for _ in range(4))  # 16 rows, 1,600 tokens
LAYOUTS = {"DP2": ("dense", {}), "TP2 SP": ("dense", {cases.TP: 2, cases.SP: True}), "EP2": ("MoE", {cases.EP: 2}),
           "DP2, bfloat16": ("dense", dict(torch_dtype="bfloat16"))}  # fmt: skip
MODELS = {"dense": dict(family="qwen3", layers=4, vocab=8000, hidden=256, std=0.02),
          "MoE": dict(family="qwen3_moe", layers=4, vocab=8000, hidden=256, std=0.02)}  # fmt: skip


def measure(path, settings, samples, steps: int):
    """Return (number of parameters, CPU seconds of a step, CPU seconds of a check) of each rank.

    Args:
        path: Path of the model.
        settings: Settings of the layout.
        samples: Rows of a step.
        steps: Optimizer steps; the first is discarded.
    """

    def body(rank, world):

        from megatron_grpo.commands.analysis.replica_check import ReplicaCheck

        class TimedReplicaCheck(ReplicaCheck):
            seconds = 0.0

            def compare(self, *args):
                began = time.process_time()
                try:
                    return super().compare(*args)
                finally:
                    self.seconds += time.process_time() - began

        policy = cases.build(path, cases.settings(**settings), world)
        check, step, total = TimedReplicaCheck(1), 0.0, 0.0
        for index in range(steps):
            rows = [dataclasses.replace(sample, version=index, on_policy_version=index) for sample in samples]
            batch, check.seconds = cases.make_batch(policy, rows, index), 0.0
            looks, began = ReplicaCheckObserver(policy, check), time.process_time()
            policy.train_step(batch, looks)
            assert looks.found is None
            if index:  # the first step is slower
                step += time.process_time() - began - check.seconds
                total += check.seconds
        count = sum(parameter.numel() for chunk in policy.chunks for parameter in chunk.parameters())
        return count, step / (steps - 1), total / (steps - 1)

    return run_ranks(body, 2, timeout=900)


def main(steps: int) -> None:
    """Measure all layouts and print the table."""
    every = RunConfig().check_replicas_interval
    print(f"| layout | parameters a rank | step, CPU s | check, CPU s | share at --check_replicas_interval {every} |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        for name, (model, settings) in LAYOUTS.items():
            path = Path(scratch) / model
            if not path.exists():
                write_tiny(path, **MODELS[model])
            [samples] = cases.stored_rollout(path, vocab=8000, num_steps=1, groups=GROUPS, stale=0)
            found = measure(path, settings, samples, steps)
            count, step, check = max(found, key=lambda one: one[2] / one[1])
            print(f"| {name} | {count:,} | {step:.3f} | {check:.4f} | {check / (every * step + check):.2%} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 6)
