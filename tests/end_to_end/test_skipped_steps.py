"""Runs in which a rank spoils gradients: they skip the step, stop after several in a row, and resume bit for bit."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from unittest import mock

import pytest

from tests.distributed.test_gradient_check import is_no_number, spoil_gradient
from tests.end_to_end import scripted
from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import run_ranks
from tests.step_dump_cases import replayed

STEPS, BAD_RANK = 8, 1
# Rollouts of 24 rows against steps of 16, two passes: a step that is skipped was to keep log-probs, and samples wait in each checkpoint.
UNEVEN = ["--allow_unaligned_generation", "true", "--generation_batch_size", "24", "--num_iterations", "2", "--micro_batch_size", "4"]
EXACT = ("loss", "reward", "grad_norm", "staleness/mean", "num_tokens", "learning_rate", "skipped_iterations")


def train(rank: int, world_size: int, flags: list[str], spoils: tuple[int, ...], spike: int | None = None):
    """Run `megatron-grpo train` with a scripted engine and spoiled gradients; return the exit code and the output.

    In steps `spoils` (from 0) the gradient of rank 1's second micro-batch is NaN; in step `spike` it is a thousand times too large. The
    median exists after three norms.
    """
    from megatron_grpo.core.policy import gradient_check as guard
    from megatron_grpo.core.policy.policy import Policy

    take = Policy.train_step

    def train_step(self, batch, beside=None):
        how = is_no_number if batch.step in spoils else (lambda gradient: 1e3 * gradient)
        is_bad = batch.step in spoils or batch.step == spike
        with spoil_gradient(self, BAD_RANK, how, micro_batch=1) if is_bad else contextlib.nullcontext():
            return take(self, batch, beside)

    said = io.StringIO()
    with mock.patch.object(Policy, "train_step", train_step), mock.patch.object(guard, "FEWEST", 3):
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = scripted.train(rank, world_size, flags)
    return code, said.getvalue()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("skipped")
    flags = [*write_inputs(folder, rows=30), *UNEVEN, *("--max_steps", str(STEPS)), *("--lr_decay_style", "linear")]
    flags += ["--save_steps", "1", "--save_total_limit", "none", "--skip_grad_norm_factor", "8", "--log_completions_steps", "0"]
    flags += ["--logprob_diff_warn", "100"]  # the scripted sampler is not the policy
    flags += ["--check_replicas", "--check_replicas_interval", "1"]  # which finds nothing
    return folder, flags


@pytest.fixture(scope="module")
def whole(inputs):
    """Step 3 of 8 has a NaN gradient, step 7 a spike."""
    folder, flags = inputs
    found = run_ranks(train, 2, [*flags, "--output_dir", str(folder / "whole")], (2,), 6, timeout=240)
    assert [code for code, _ in found] == [0, 0], found
    return folder / "whole", found[0][1]


def read_steps(out: Path) -> list[dict]:
    return [{name: step[name] for name in EXACT if name in step} for step in read_jsonl(out / "metrics.jsonl")]


def test_run_skips_bad_gradients_and_continues(whole):
    out, said = whole
    steps = read_jsonl(out / "metrics.jsonl")
    assert [step["skipped_iterations"] for step in steps] == [0, 0, 1, 1, 1, 1, 2, 2]
    assert [step["grad_norm"] is None for step in steps] == [place == 2 for place in range(STEPS)]
    assert [step["learning_rate"] for step in steps] == pytest.approx([1e-3 * (1 - place / STEPS) for place in range(STEPS)])
    assert "optimizer step 3 is skipped: its gradient is not finite" in said
    assert "optimizer step 7 is skipped: its gradient norm" in said and "(skip_grad_norm_factor)" in said


def test_skipped_step_is_dumped_and_replays(whole):
    """Its NaN does not come from its rows: replayed on one rank without the hook, its gradient is finite."""
    out, said = whole
    assert sorted(path.name for path in out.glob("debug_dump/*")) == ["step_000003_not_finite", "step_000007_spike"]
    assert f"megatron-grpo replay {out}/debug_dump/step_000003_not_finite" in said
    [(code, told)] = run_ranks(replayed, 1, out / "debug_dump/step_000003_not_finite", "--json", "true", timeout=120)
    assert code == 0 and "All values are finite here but were not in the run" in told["verdict"][0]
    assert told["was"]["grad_norm"] == "inf" and len(told["rows"]) == 16
    assert max(row["forward"] for row in told["rows"]) < 1e-4 and told["numbers"]["loss"] == pytest.approx(told["was"]["loss"], abs=1e-6)


def test_skipped_step_logs_rank_micro_batch_and_rows(whole, inputs):
    out, said = whole
    spoil_gradient, spike = read_jsonl(out / "skipped.jsonl")
    schedule = {line["step"]: line["rows"] for line in read_jsonl(out / "schedule.jsonl")}
    for record, step in ((spoil_gradient, 3), (spike, 7)):
        [culprit] = record["bad_micro_batches"]
        assert record["step"] == step and (culprit["ranks"], culprit["micro_batch"]) == ([BAD_RANK], 1)
        assert [[row["rollout"], row["row"]] for row in culprit["rows"]] == schedule[step][1][BAD_RANK]
    for row in spoil_gradient["bad_micro_batches"][0]["rows"]:
        named = f"row {row['row']} of rollout {row['rollout']} (prompt {row['prompt_number']}, row {row['dataset_row']} of the data set)"
        assert named in said and row["prompt_number"] == 6 * row["rollout"] + row["row"] // 4


def test_checkpoint_is_marked_good_once_its_samples_are_trained(whole):
    """Rollouts are sampled at steps 0, 3 and 6 with the weights of those steps; step 6 (the seventh) is skipped, step 7 trains its rows."""
    out, _ = whole
    good = {int(path.parent.name[5:]) for path in out.glob("checkpoints/iter_*/good.json")}
    assert good == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("after", [3, 6])
def test_resumed_run_skips_the_same_steps_exactly(inputs, whole, tmp_path, after):
    """From just after a spoiled step, and from before one that the median determines: its norms are in the checkpoint.

    The resumed runs save by time, after each step.
    """
    out, _ = whole
    flags = [*inputs[1], "--output_dir", str(tmp_path / "out"), "--resume", str(out / f"checkpoints/iter_{after:07d}")]
    flags += ["--save_steps", "0", "--save_interval_seconds", "1e-6"]
    found = run_ranks(train, 2, flags, (2,), 6, timeout=240)
    assert [code for code, _ in found] == [0, 0], found
    assert read_steps(tmp_path / "out") == read_steps(out)[after:]
    saved = {int(path.name[5:]) for path in (tmp_path / "out").glob("checkpoints/iter_*")}
    assert saved == set(range(after + 1, STEPS + 1))
    files = [sorted((path / "hf").glob("*.safetensors")) for path in (out, tmp_path / "out")]
    assert files[0] and [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_consecutive_skipped_steps_end_the_run_and_name_the_last_good_checkpoint(inputs, tmp_path):
    out = tmp_path / "out"
    flags = [*inputs[1], "--output_dir", str(out), "--max_skipped_steps", "3", "--save_total_limit", "1"]
    found = run_ranks(train, 2, flags, (2, 4, 5, 6, 7), timeout=240)
    assert [code for code, _ in found] == [1, 1]
    good = out / "checkpoints/iter_0000003"
    told = "".join(said for _, said in found)
    assert told.count("3 optimizer steps in a row were skipped (max_skipped_steps 3); the run stops") == 1
    assert f"The last good checkpoint is {good}; continue with --resume {good}." in told
    assert sorted(path.name for path in out.glob("checkpoints/iter_*")) == [good.name, "iter_0000006"]
    assert len(read_jsonl(out / "metrics.jsonl")) == 7

    found = run_ranks(train, 2, flags, (), timeout=240)  # of itself it takes the newest, and says what it is
    assert [code for code, _ in found] == [0, 0] and f"The last confirmed one is {good} (use it with --resume)." in found[0][1]
    assert [step["skipped_iterations"] for step in read_steps(out)] == [0, 0, 1, 1, 2, 3, 3, 3]
