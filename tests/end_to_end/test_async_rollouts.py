"""Async rollouts, one ahead, in complete runs: each step equals transformers', also after a kill or a signal.

Completions are scripted by prompt and weight version, in a thread of the engine.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest

from megatron_grpo import cli
from tests.end_to_end import scripted
from tests.end_to_end.outside_parts import Alphabet
from tests.end_to_end.runs import read_jsonl, stop_after_steps, write_inputs
from tests.end_to_end.test_many_steps import LORA, SIZES, get_weights
from tests.ranks import run_ranks

STEPS = 6
AHEAD = ["--async_rollout_depth", "1", "--vllm_mode", "server", "--vllm_server_host", "127.0.0.1"]
CORRECTED = ["--rollout_importance_sampling_mode", "token_truncate", "--rollout_importance_sampling_threshold", "1.02"]
UNALIGNED = ["--allow_unaligned_generation", "true", "--generation_batch_size", "12", "--num_iterations", "2"]
SAVED = ["--save_steps", "2", "--save_total_limit", "none", "--max_tokens_per_micro_batch", "40"]
CASES = {
    "two steps per rollout, held to a reference by the reward": (2, [
        "--steps_per_generation", "2", "--tensor_model_parallel_size", "2", "--beta", "0.1", "--kl_in_reward", "true", *CORRECTED]),
    "an adapter, against the sampler itself": (1, ["--num_iterations", "2", "--old_logprobs", "rollout", *LORA]),
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    optimizer = "--lr 2e-3 --adam_eps 1e-5 --clip_grad 0.5 --weight_decay 0.1"
    others = f"--max_steps {STEPS} --temperature 0.9"
    flags = write_inputs(tmp_path_factory.mktemp("inputs"))
    at = flags.index("--vllm_kv_cache_memory_mb")
    return [*flags[:at], *flags[at + 2 :], *SIZES, *optimizer.split(), *others.split(), *AHEAD]


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """An uninterrupted run of two ranks whose rollouts span optimizer steps."""
    out, flags = tmp_path_factory.mktemp("whole"), [*inputs, *UNALIGNED, *CORRECTED, *SAVED]
    assert run_ranks(scripted.train, 2, [*flags, "--output_dir", str(out)]) == [0, 0]
    return out, flags


def assert_it_is_that_of_transformers(out: Path, flags: list[str], world_size: int) -> None:
    right, found = scripted.compute_expected(flags, world_size, scripted.score_even), read_jsonl(out / "metrics.jsonl")
    assert [step["loss"] for step in found] == pytest.approx(right.losses, rel=1e-5, abs=2e-6)
    assert [step["grad_norm"] for step in found] == pytest.approx(right.grad_norms, rel=1e-5)
    for name, wanted in right.weights.items():
        bound = 5e-5 if name.endswith("lora_B.weight") else 1e-5  # it began at zero: all of it is updates
        assert np.linalg.norm(get_weights(out)[name] - wanted) <= bound * np.linalg.norm(wanted), name


def test_async_rollouts_across_steps_equal_transformers(whole):
    out, flags = whole
    assert_it_is_that_of_transformers(out, flags, 2)
    steps = read_jsonl(out / "metrics.jsonl")
    assert [(step["staleness/mean"], step["staleness/lag"]) for step in steps] == [(0, 0), (1, 0), (2, 0), (3, 3), (4, 3), (5, 3)]
    # What is under way while others train is told when it comes in: at step 2, for a checkpoint.
    assert [step["step"] for step in steps if "reward" in step] == [1, 2]
    assert [step["step"] for step in steps if "time/rollout_overlapped" in step] == [2]


@pytest.mark.parametrize("case", CASES)
def test_async_rollouts_steps_equal_transformers_one_rollout_late(inputs, tmp_path, case):
    world_size, changes = CASES[case]
    flags = [*inputs, *changes, "--output_dir", str(tmp_path)]
    assert run_ranks(scripted.train, world_size, flags) == [0] * world_size
    assert_it_is_that_of_transformers(tmp_path, flags, world_size)


def assert_same(one: Path, other: Path, names=("loss", "grad_norm", "staleness/mean", "staleness/lag")) -> None:
    """Compare bit for bit the steps that the second run has recorded."""
    steps = {step["step"]: step for step in read_jsonl(one / "metrics.jsonl")}
    for step in read_jsonl(other / "metrics.jsonl"):
        assert [step.get(name) for name in names] == [steps[step["step"]].get(name) for name in names]
    for name, wanted in get_weights(one).items():
        assert np.array_equal(get_weights(other)[name], wanted), name


def test_async_rollouts_killed_run_resumes_exactly(whole, tmp_path):
    out, flags = whole
    at = str(out / "checkpoints" / "iter_0000002")
    assert run_ranks(scripted.train, 2, [*flags, "--output_dir", str(tmp_path), "--resume", at]) == [0, 0]
    assert [step["step"] for step in read_jsonl(tmp_path / "metrics.jsonl")] == [3, 4, 5, 6]
    assert_same(out, tmp_path, ("loss", "grad_norm", "staleness/mean", "staleness/lag", "reward", "num_tokens"))


def train_until_signal(rank: int, world_size: int, flags: list[str]) -> int:
    """Run `scripted.train`, and send a signal after two recorded optimizer steps."""
    stop_after_steps(flags, 2)
    return scripted.train(rank, world_size, flags)


def test_async_rollouts_signal_keeps_running_rollout_and_resumes_exactly(inputs, tmp_path):
    flags = [*inputs, *UNALIGNED, *CORRECTED, "--stop_drain_seconds", "600"]
    assert run_ranks(scripted.train, 1, [*flags, "--output_dir", str(tmp_path / "whole")]) == [0]
    flags += ["--output_dir", str(tmp_path / "out")]
    assert run_ranks(train_until_signal, 1, flags) == [3]
    assert run_ranks(scripted.train, 1, flags) == [0]
    assert_same(tmp_path / "whole", tmp_path / "out")


def train_with_a_sampler_of_somebody_else(rank: int, world_size: int, flags: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return cli.main(["train", *flags], engine=lambda *_: Alphabet()), said.getvalue()


def test_async_rollouts_engine_without_background_sampling_is_an_error(inputs, tmp_path):
    flags = [*inputs, *CORRECTED, "--output_dir", str(tmp_path)]
    [(code, said)] = run_ranks(train_with_a_sampler_of_somebody_else, 1, flags)
    assert code == 2 and "Alphabet has no `begin` (rollout.engine.BackgroundSampler). Use async_rollout_depth 0." in " ".join(said.split())
