"""Compare colocated partial rollouts with waiting for all completions, and with the simulation of `plan --lengths`.

    python benchmarks/partial_rollouts.py
    python benchmarks/partial_rollouts.py --depths 0 1 2 --seeds 3 --steps 24 --slots 32

The task is the longer case of `end_to_end.py`, whose answers can be learned and whose lengths are lognormal and constant. Runs of the
depths alternate and use the same correction (token_truncate). For each sampling step, the rank counts the engine's steps, their CPU seconds
and their tokens. The simulation uses the lengths that the run sampled, and the costs of an engine step, of a request and of a prompt token
that fit the run's engine steps best. The first three steps and the last are excluded, except from the reward.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the ranks of the tests, and the task

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.end_to_end import write_longer
from megatron_grpo.plugins.partial_rollouts import plan as partial_rollouts
from tests.end_to_end.runs import read_jsonl
from tests.ranks import run_ranks

FIRST, WINDOW = partial_rollouts.FIRST, 5  # number of excluded steps; number of steps of a mean reward


def train(rank: int, world_size: int, flags: list[str], counts: str) -> None:
    """Run `megatron-grpo train` and write the engine's steps in each sampling step to a file.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.
        flags: Settings.
        counts: Path of a .jsonl file.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.llm_engine import LLMEngine

    from megatron_grpo.cli import main
    from megatron_grpo.core.trainer.rollouts import Rollouts

    step, schedule, sample = LLMEngine.step, Scheduler.schedule, Rollouts.sample
    scheduled, engine_steps = (
        [0, 0],
        list[tuple[float, int, int]](),
    )  # [requests, tokens] of the last step; (CPU seconds, requests, tokens) of each

    def count_schedule(self, *args, **kwargs):
        output = schedule(self, *args, **kwargs)
        scheduled[:] = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
        return output

    def count_step(self):
        start = time.process_time()
        outputs = step(self)
        engine_steps.append((time.process_time() - start, *scheduled))
        return outputs

    def count_sample(self, *args, **kwargs):
        engine_steps.clear()
        start = time.process_time()
        result = sample(self, *args, **kwargs)
        if result:
            line = {"begun": start, "cpu": time.process_time() - start, "steps": engine_steps}
            with Path(counts).open("a") as file:
                file.write(json.dumps(line) + "\n")
        return result

    LLMEngine.step, Scheduler.schedule, Rollouts.sample = count_step, count_schedule, count_sample
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(["train", *flags])
    if code:
        raise RuntimeError(said.getvalue())


def measure(config: Path, depth: int, seed: int, steps: int, slots: int) -> dict:
    """Return the engine's steps by sampling step, the lengths of completions by rollout, and the metrics of a run.

    Args:
        config: Configuration file.
        depth: async_rollout_depth.
        seed: Seed.
        steps: Optimizer steps.
        slots: vllm_max_num_seqs.
    """
    import pyarrow.parquet

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        flags = ["--config", str(config), "--output_dir", str(out), "--seed", str(seed), "--max_steps", str(steps),
                 "--async_rollout_depth", str(depth), "--rollout_importance_sampling_mode", "token_truncate",
                 "--vllm_max_num_seqs", str(slots), "--export_hf", "false", "--log_completions_steps", "1"]  # fmt: skip
        run_ranks(train, 1, flags, str(Path(folder) / "counts"), timeout=3600)
        counts, lines = read_jsonl(Path(folder) / "counts"), read_jsonl(out / "metrics.jsonl")
        lengths: dict[int, list[int]] = {}
        for path in sorted((out / "completions").glob("*.parquet")):
            table = pyarrow.parquet.read_table(path, columns=["rollout", "prompt_number", "generation", "num_completion_tokens"])
            for row in sorted(table.to_pylist(), key=lambda row: (row["prompt_number"], row["generation"])):
                lengths.setdefault(row["rollout"], []).append(row["num_completion_tokens"])
    return dict(counts=counts, lengths=[lengths[number] for number in sorted(lengths)], reward=[line["reward"] for line in lines],
                age=[line.get("staleness/tokens/mean", 0.0) for line in lines],
                recomputed=[line.get("rollout/recomputed_tokens", 0) for line in lines],
                begun=[one["begun"] for one in counts])  # fmt: skip


def fit_costs(run: dict) -> tuple[float, float, float]:
    """Return the CPU seconds of an engine step, of a request in it and of a prompt token, by least squares."""
    cpu, requests, tokens = np.array([step for one in run["counts"][FIRST:] for step in one["steps"]]).T
    fit = np.linalg.lstsq(np.stack([np.ones_like(cpu), requests, tokens - requests], axis=1), cpu, rcond=None)[0]
    return fit[0], fit[1], fit[2]


def simulate(run: dict, depth: int, slots: int) -> tuple[float, float]:
    """Return the simulated (engine steps, seconds) of a sampling step."""
    step, request, token = fit_costs(run)
    seconds = partial_rollouts.sampling_times(run["lengths"], slots, depth, step=step / request, recomputed=token / request)
    steps = partial_rollouts.sampling_times(run["lengths"], slots, depth, step=1e9, recomputed=0.0)
    return mean(steps[FIRST:-1]) / 1e9, request * mean(seconds[FIRST:-1])


def compute_figures(run: dict, depth: int, slots: int) -> dict[str, float]:
    """Return the means of a run over the sampling steps that count."""
    counted = run["counts"][FIRST:-1]
    steps, seconds = simulate(run, depth, slots)
    tokens = sum(map(sum, run["lengths"][FIRST:-1]))
    return {
        "engine steps": mean(len(one["steps"]) for one in counted),
        "simulated steps": steps,
        "sampling": mean(sum(cpu for cpu, *_ in one["steps"]) for one in counted),
        "simulated": seconds,
        "whole step": (run["begun"][-1] - run["begun"][FIRST]) / len(counted),
        "age": mean(run["age"][FIRST:]),
        "recomputed": sum(run["recomputed"][FIRST:-1]) / tokens,
        "first": mean(run["reward"][:WINDOW]),
        "last": mean(run["reward"][-WINDOW:]),
    }


def main() -> None:
    """Run all depths and seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1, 2], help="values of async_rollout_depth")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of a run")
    parser.add_argument("--slots", type=int, default=32, help="vllm_max_num_seqs; a rollout has 64 completions")
    arguments = parser.parse_args()
    found: dict[int, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "longer").mkdir()
        config = write_longer(Path(folder) / "longer")
        for seed in range(arguments.seeds):
            for depth in arguments.depths:
                run = measure(config, depth, seed, arguments.steps, arguments.slots)
                found.setdefault(depth, []).append(compute_figures(run, depth, arguments.slots))
                print(json.dumps({"depth": depth, "seed": seed, "load": os.getloadavg()[0]} | found[depth][-1]), flush=True)
    table = Table("depth", *found[arguments.depths[0]][0])
    for depth, runs in found.items():
        table.add_row(str(depth), *(f"{median(run[name] for run in runs):.3g}" for name in runs[0]))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
