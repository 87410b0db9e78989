"""The referee on the files of a run: no finding, and the differing settings if it is given others."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from tests.end_to_end.runs import write_inputs
from tests.end_to_end.test_compare_losses import train
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with stale and on-policy steps; the last is refused and dumped because its gradient is above the threshold."""
    folder = tmp_path_factory.mktemp("run")
    flags = [*write_inputs(folder), "--max_steps", "6", "--verify_weight_sync", "false", "--export_hf", "false", "--lr", "1e-2"]
    flags += [
        "--num_generations",
        "4",
        "--global_batch_size",
        "8",
        "--micro_batch_size",
        "2",
        "--steps_per_generation",
        "2",
        "--beta",
        "0.1",
    ]
    flags += ["--save_steps", "1", "--save_total_limit", "9", "--record_rows", "true", "--skip_grad_norm_above", "1.9"]
    flags += ["--compute_zero_advantage_rows", "true", "--max_skipped_steps", "10", "--debug_dump_steps", "9"]
    [codes] = run_ranks(train, 1, [*flags, "--output_dir", str(folder / "out")])
    assert codes == [0]
    return folder / "out"


def run_referee(*argv, system: str = "native") -> tuple[int, dict]:
    from megatron_grpo import cli

    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli.main(["referee", *map(str, argv), "--of", system, "--json"])
    return code, json.loads(out.getvalue())


def test_referee_accepts_step_dump_of_a_run(run):
    dumps = sorted((run / "debug_dump").iterdir())
    assert dumps
    for dump in dumps:
        code, told = run_referee(dump)
        assert code == 0 and not told["lacks"], told
        assert [one["quantity"] for one in told["findings"]] == ["advantages", "tokens in the mean", "kl", "loss"]


def test_referee_names_settings_that_differ_from_the_run(run):
    *_, dump = sorted((run / "debug_dump").iterdir())
    causes = {
        "--loss_type=dapo": "length bias",
        "--beta=0": None,
        "--kl_estimator=k2": "k3 instead of k2",
        "--scale_rewards=none": "deviation of the group",
    }
    for flag, cause in causes.items():
        code, told = run_referee(dump, flag)
        assert code == 3 and (cause is None or cause in told["cause"]), told


def test_referee_checks_advantages_of_recorded_rows_and_names_missing_columns(run):
    for path in (run / "checkpoints" / "iter_0000002", *sorted((run / "completions").glob("*.parquet"))):
        code, told = run_referee(path, "--num_generations", "4")
        assert code == 0 and [one["quantity"] for one in told["findings"]] == ["advantages"], told
        assert any("step dump" in line for line in told["lacks"])
