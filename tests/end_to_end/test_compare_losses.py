"""`compare-losses` repeats a recorded step: with the run's own settings exactly, with others as a run with those settings."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from tests.end_to_end import outside_parts
from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import run_ranks

STEPS = 4


def train(rank: int, world_size: int, *runs: list[str]) -> list[int]:
    """Train one run after another with scripted completions."""
    from megatron_grpo import cli

    return [cli.main(["train", *flags], engine=lambda cfg, inputs, parallel: outside_parts.Alphabet()) for flags in runs]


def compare_losses(rank: int, world_size: int, argv: list[str], warns: bool = False) -> tuple[str | int, ...]:
    from megatron_grpo import cli

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as said:
        code = cli.main(["compare-losses", *argv])
    return (code, out.getvalue(), said.getvalue()) if warns else (code, out.getvalue() or said.getvalue())


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with two steps per rollout, the second on stale rows. Steps 2 to 4 are recorded, the first of them after checkpoint 1."""
    return read_trained_step(tmp_path_factory.mktemp("run"), "--compute_zero_advantage_rows", "true")


def read_trained_step(folder: Path, *settings: str) -> Path:
    flags = [*write_inputs(folder), "--max_steps", str(STEPS), "--verify_weight_sync", "false", "--export_hf", "false"]
    flags += ["--num_generations", "2", "--global_batch_size", "8", "--micro_batch_size", "2", "--steps_per_generation", "2"]
    flags += ["--save_steps", "1", "--save_total_limit", "9", "--record_rows", "true", "--skip_grad_norm_factor", "none", *settings]
    [codes] = run_ranks(train, 1, [*flags, "--output_dir", str(folder / "out")])
    assert codes == [0]
    return folder


TRIES = ["loss_type=vespo", "loss_type=real", "loss_type=dapo epsilon_high=0.28", "global_batch_size=4", "staleness=1", "beta=0.1"]


@pytest.fixture(scope="module")
def found(run):
    """Report of step 2, whose rows are stale, by number of ranks."""
    argv = [str(run / "out"), "--step", "1", "--json", *(word for one in TRIES for word in ("--variant", one))]
    answers = {}
    for world, layout in ((1, []), (2, ["--pipeline_model_parallel_size", "2"])):
        code, said = run_ranks(compare_losses, world, [*argv, *layout, "--png", str(run / f"{world}.png")])[0]
        assert code == 0, said
        answers[world] = json.loads(said)
    return answers


def test_compare_losses_with_run_settings_repeats_the_run_with_cosine_one(run, found):
    line = next(one for one in read_jsonl(run / "out" / "metrics.jsonl") if one["step"] == 2)
    own = found[1]["variants"][0]
    assert (own["cosine"], own["rows"]) == (1.0, 8)
    for name in ("loss", "grad_norm"):
        assert own[name] == pytest.approx(line[name], rel=1e-5, abs=1e-7) and found[1]["recorded"][name] == line[name]
    assert own["clip_low"] == pytest.approx(line["clip_ratio/low_mean"]) and line["staleness/max"] == 1


def test_compare_losses_variants_differ_as_expected(found):
    told = dict(zip(["own", *TRIES], found[1]["variants"], strict=True))
    assert told["global_batch_size=4"]["rows"] == 4 and told["global_batch_size=4"]["cosine"] < 1
    assert told["beta=0.1"]["kl"] is not None and told["own"]["kl"] is None
    assert told["staleness=1"]["kl_sampler"] != told["own"]["kl_sampler"]
    assert 0 < told["loss_type=dapo epsilon_high=0.28"]["cosine"] < 1
    assert told["loss_type=real"]["loss"] != told["own"]["loss"] and told["loss_type=vespo"]["cosine"] < 1


def test_compare_losses_is_equal_in_each_layout(found):
    for one, two in zip(found[1]["variants"], found[2]["variants"], strict=True):
        for name in ("loss", "grad_norm", "cosine", "kl_sampler", "ess"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), (one["name"], name)


def test_compare_losses_variant_predicts_the_step_of_a_run(run, found, tmp_path):
    """A run that resumes from the checkpoint with the same rows has the predicted loss and gradient norm."""
    lines = {}
    for name, setting in (("loss_type=vespo", ["--loss_type", "vespo"]), ("loss_type=real", ["--loss_type", "real"])):
        flags = [*write_inputs(run), "--max_steps", "2", "--verify_weight_sync", "false", "--export_hf", "false", *setting]
        flags += ["--compute_zero_advantage_rows", "true"]
        flags += ["--num_generations", "2", "--global_batch_size", "8", "--micro_batch_size", "2", "--steps_per_generation", "2"]
        out = tmp_path / name
        flags += ["--output_dir", str(out), "--resume", str(run / "out" / "checkpoints" / "iter_0000001")]
        assert run_ranks(train, 1, flags) == [[0]]
        [lines[name]] = [one for one in read_jsonl(out / "metrics.jsonl") if one["step"] == 2]
    for told in found[1]["variants"]:
        if told["name"] in lines:
            for key in ("loss", "grad_norm"):
                # vespo weighs a sequence by a power of its whole ratio, so what rounding does to each token adds up.
                rel = 1e-4 if told["name"] == "loss_type=vespo" else 1e-5
                assert told[key] == pytest.approx(lines[told["name"]][key], rel=rel, abs=1e-7), told["name"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--variant", "loss_type=gspo"], "loss_type cannot be 'gspo'"),
        (["--variant", "advantage_estimator=rloo"], "changes which rows are sampled or their rewards"),
        (["--variant", "global_batch_size=3"], "whole groups of 2 of the 8 rows"),
        (["--variant", "staleness=7"], "needs a checkpoint of the run that many steps later. Available: 1, 2, 3"),
        (["--variant", "vespo"], "needs name=value"),
        (["--variant", "loss_type=vespo delta=4"], "loss_type vespo does not have"),
        (["--step", "9"], "step 9 has no recorded rows. Checkpoints that have them: 1, 2, 3"),
    ],
)
def test_compare_losses_impossible_variant_is_an_error_before_loading(run, argv, said):
    code, text = run_ranks(compare_losses, 1, [str(run / "out"), *(["--step", "1"] if "--step" not in argv else []), *argv])[0]
    assert code == 2 and said in " ".join(text.split()), text


def test_compare_losses_without_recorded_rows_names_the_setting(tmp_path):
    code, text = run_ranks(compare_losses, 1, [str(tmp_path)])[0]
    assert code == 2 and "--record_rows true" in " ".join(text.split())


def test_compare_losses_leaves_out_rows_without_old_logprobs(tmp_path):
    run = read_trained_step(tmp_path)
    argv = [str(run / "out"), "--step", "1", "--json", "--variant", "loss_type=vespo"]
    [(code, said, warned)] = run_ranks(compare_losses, 1, argv, True)
    assert code == 0, said
    recorded, (own, _) = json.loads(said)["recorded"], json.loads(said)["variants"]
    line = next(one for one in read_jsonl(run / "out" / "metrics.jsonl") if one["step"] == 2)
    left_out = round(8 * (1 - line["packing/computed_rows"]))
    assert left_out and f"{left_out} of 8 rows have no old log-probs" in warned
    for name in ("loss", "grad_norm"):
        assert own[name] == pytest.approx(recorded[name], rel=1e-5, abs=1e-7)
