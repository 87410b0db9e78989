"""Measure how much of sampling overlaps with training when one rollout is sampled ahead, with recorded sampling times.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --trace seconds.txt --ratios 1

The policy is trained for real. The sampler returns random completions after the number of seconds in the trace, without using CPU time, as
a server on another machine would. For each step the table compares its duration with the longer of sampling and training (the ideal) and
with their sum (without overlap). The trace is scaled to each ratio of mean sampling time to mean training time. Quote the ratios: seconds
depend on the machine.
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

os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the models, the runs and the ranks of the tests

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import run_ranks

FIRST = 3  # first step measured: earlier ones wait for the first rollout and have cold caches


def train(rank: int, world_size: int, flags: list[str], seconds: list[float]) -> None:
    """Run `megatron-grpo train` with a sampler that takes the given seconds for each rollout.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.
        flags: Settings.
        seconds: Sampling seconds of successive rollouts.
    """
    from megatron_grpo.cli import main
    from megatron_grpo.core.rollout.engine import make_completion
    from tests.scripted_engine import ScriptedEngine

    def make_answer(prompt, index, version):
        tokens = np.random.default_rng([prompt.number, index]).integers(4, 100, 256).tolist()
        return make_completion(prompt.token_ids, tokens, [-4.0] * len(tokens), text="", finish_reason="length", version=version)

    class TimedEngine(ScriptedEngine):
        def _answered(self, prompts, *asked):
            time.sleep(seconds[prompts[0].number // len(prompts)])  # duration of the recorded rollout
            return super()._answered(prompts, *asked)

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(["train", "--verify_weight_sync", "false", *flags], engine=lambda *_: TimedEngine(make_answer))
    if code:
        raise RuntimeError(said.getvalue())


def run_steps(flags: list[str], depth: int, seconds: list[float], num_steps: int) -> list[dict]:
    """Run training and return the metrics of its steps without the first three.

    Args:
        flags: Settings.
        depth: async_rollout_depth.
        seconds: Sampling seconds of successive rollouts.
        num_steps: Number of steps.
    """
    ahead = f"--async_rollout_depth {depth} --vllm_mode server --vllm_server_host 127.0.0.1"
    more = [*flags, *f"--max_steps {num_steps} {ahead}".split()]
    with tempfile.TemporaryDirectory() as out:
        run_ranks(train, 1, [*more, "--output_dir", out], seconds, timeout=3600)
        return read_jsonl(Path(out) / "metrics.jsonl")[FIRST:]


def main() -> None:
    """Run all ratios and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="file with sampling seconds of successive rollouts, one per line (default: lognormal, sigma 0.3)")
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="ratios of mean sampling time to mean training time"
    )
    parser.add_argument("--steps", type=int, default=15, help="optimizer steps of a run")
    arguments = parser.parse_args()
    trace = np.random.default_rng(0).lognormal(0.0, 0.3, 10 * arguments.steps)
    if arguments.trace:
        trace = np.loadtxt(arguments.trace, ndmin=1)
    trace = np.resize(trace, arguments.steps + 1) / trace[: arguments.steps + 1].mean()
    table = Table("sampling / training", "step, s", "the longer, s", "their sum, s", "step / the longer", "their sum / step")
    for column in table.columns:
        column.justify = "right"
    with tempfile.TemporaryDirectory() as folder:
        flags = write_inputs(Path(folder) / "inputs", layers=4, max_positions=512)
        at = flags.index("--vllm_kv_cache_memory_mb")
        flags = [*flags[:at], *flags[at + 2 :], "--max_completion_length", "256", "--export_hf", "false", "--log_completions_steps", "0",
                 "--rollout_importance_sampling_mode", "token_truncate"]  # fmt: skip
        alone = run_steps(flags, 0, [0.0] * (arguments.steps + 1), arguments.steps)
        training = float(np.mean([step["time/step"] for step in alone]))
        for ratio in arguments.ratios:
            seconds = (trace * ratio * training).tolist()
            ahead = run_steps(flags, 1, seconds, arguments.steps)
            # The rollout of a step is sampled while the step before it is trained.
            trained = [step["time/step"] - step["time/rollout"] for step in ahead]
            pairs = [(seconds[step["step"] - 1], before) for step, before in zip(ahead[1:], trained)]
            whole, longer, both = (
                float(np.mean(one)) for one in ([s["time/step"] for s in ahead], list(map(max, pairs)), list(map(sum, pairs)))
            )
            table.add_row(*(f"{one:.3g}" for one in (ratio, whole, longer, both, whole / longer, both / whole)))
            print(json.dumps({"ratio": ratio, "step_by_longer": whole / longer, "sum_by_step": both / whole}), flush=True)
    Console().print(table)


if __name__ == "__main__":
    main()
