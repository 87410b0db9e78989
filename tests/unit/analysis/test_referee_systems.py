# ruff: noqa: E501 - one case a line
"""The referee on dumps of verl, slime and Megatron-SWIFT, correct ones and ones with planted errors."""

from __future__ import annotations

import contextlib
import io
import json
import re

import numpy as np
import pytest

from tests import referee_dumps as dumps


def run_referee(*argv) -> tuple[int, dict]:
    from megatron_grpo import cli

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = cli.main(["referee", *map(str, argv), "--json"])
    text = out.getvalue()
    return code, json.loads(text) if code in (0, 3) else {"said": text}


VERL = ["--of", "verl", "actor_rollout_ref.rollout.n=4"]
SLIME = ["--of", "slime", "--n-samples-per-prompt", "4"]
SWIFT = ["--of", "swift", "--num_generations", "4"]
IS = [*VERL, "algorithm.rollout_correction.rollout_is=token"]
# (writer, its settings, command line): sound, and for each fault the quantity and words of the cause
CASES = {
    "verl": (dumps.dump_verl, {}, VERL, {
        "n": ("advantages", "n instead of n - 1"), "length": ("loss", "length bias"), "padding": ("loss", "padding"),
        "stale": ("loss", "staleness ignored"), "clip": ("loss", "clip on the wrong side"), "dual": ("loss", "delta"),
        "micro": ("loss", "mean of micro-batch means")}),
    "verl, KL": (dumps.dump_verl, {"kl": 0.1}, [*VERL, "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.1"], {}),
    "verl, rows": (dumps.dump_verl, {"mode": "seq-mean-token-mean"}, [*VERL, "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"], {}),
    "verl, sums": (dumps.dump_verl, {"mode": "seq-mean-token-sum"}, [*VERL, "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"], {}),
    "verl, norm": (dumps.dump_verl, {"mode": "seq-mean-token-sum-norm"}, [*VERL, "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"], {}),
    "verl, norm by a number": (dumps.dump_verl, {"mode": "seq-mean-token-sum-norm", "horizon": 20}, [*VERL, "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "actor_rollout_ref.actor.loss_scale_factor=20"], {}),
    "verl, correction": (dumps.dump_verl, {"correction": True}, IS, {
        "twice": ("loss", "applied twice"), "side": ("correction", "wrong side")}),
    "slime": (dumps.dump_slime, {}, SLIME, {"mask": ("loss", "masked tokens counted"), "stale": ("loss", "staleness"), "clip": ("loss", "clip")}),
    "slime, tokens": (dumps.dump_slime, {"per_token": True}, [*SLIME, "--calculate-per-token-loss"], {"stale": ("loss", "staleness")}),
    "slime, KL": (dumps.dump_slime, {"kl": 0.1}, [*SLIME, "--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3"], {
        "kl side": ("loss", "exchanged"), "k2": ("loss", "k2 instead of k3")}),
    "slime, file": (dumps.dump_slime_train_data, {}, SLIME, {"n": ("advantages", "n instead of n - 1")}),
    "swift": (dumps.dump_swift, {}, [*SWIFT, "--beta", "0"], {"token mean": ("loss", "a mean over the tokens of each micro-batch"), "clip": ("loss", "clip")}),
    "swift, dapo": (dumps.dump_swift, {"loss_type": "dapo"}, [*SWIFT, "--beta", "0", "--loss_type", "dapo"], {
        "micro": ("loss", "micro-batch means"), "scale": ("loss", "divided by the number of micro-batches once more")}),
    "swift, bnpo": (dumps.dump_swift, {"loss_type": "bnpo"}, [*SWIFT, "--beta", "0", "--loss_type", "bnpo"], {}),
    "swift, KL": (dumps.dump_swift, {"beta": 0.1}, [*SWIFT, "--beta", "0.1"], {"kl": ("loss", "KL of the wrong sign")}),
    "swift, overlong": (dumps.dump_swift, {"overlong": True}, [*SWIFT, "--beta", "0", "--overlong_filter", "true"], {
        "truncated": ("loss", "truncated rows kept")}),
    "swift, correction": (dumps.dump_swift, {"mode": "token_truncate"}, [*SWIFT, "--beta", "0", "--rollout_importance_sampling_mode",
        "token_truncate"], {"twice": ("loss", "applied twice"), "none": ("loss", "is not applied")}),
    "swift, sequence mask": (dumps.dump_swift, {"mode": "sequence_mask"}, [*SWIFT, "--beta", "0", "--rollout_importance_sampling_mode",
        "sequence_mask"], {"twice": ("loss", "applied twice")}),
    "swift, log": (dumps.write_swift_completions, {}, SWIFT, {"n": ("advantages", "n instead of n - 1")}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_referee_reports_nothing_for_correct_dumps(name, tmp_path):
    write, settings, argv, _ = CASES[name]
    for seed in range(3):
        code, told = run_referee(write(tmp_path / str(seed), seed, **settings), *argv)
        assert code == 0 and told["findings"] and "loss_scale_factor" not in str(told["lacks"]), (seed, told)


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, (*_, faults) in CASES.items() for wrong in faults])
def test_referee_names_a_planted_fault_first(name, wrong, tmp_path):
    write, settings, argv, faults = CASES[name]
    code, told = run_referee(write(tmp_path, 3, wrong=wrong, **settings), *argv)
    assert code == 3 and told["first"] == faults[wrong][0] and faults[wrong][1] in told["cause"], told


def test_files_of_other_versions_are_refused_by_name(tmp_path):
    path = dumps.dump_slime_train_data(tmp_path, 0, version=1)
    code, told = run_referee(path, *SLIME)
    assert code == 2 and "has format_version 1. This version reads 2" in told["said"]
    file = min(dumps.dump_verl(tmp_path / "verl", 0).iterdir())
    code, told = run_referee(file.parent, "--of", "swift")
    assert code == 2 and "was written by verl 0.9.1. This version reads swift 4.6.0" in told["said"]
    with np.load(file) as arrays:
        np.savez(file, **dict(arrays) | {"system": "verl 0.9.1.dev0"})
    code, told = run_referee(file.parent, *VERL)
    assert code == 2 and "was written by verl 0.9.1.dev0. This version reads verl 0.8. and verl 0.9." in told["said"]


@pytest.mark.parametrize("system", ["trl", "verl", "slime", "swift"])
def test_referee_hooks_have_at_most_20_lines(system):
    assert len([line for line in dumps.read_hook(system).splitlines() if line and line != "# fmt: off"]) <= 20


def test_referee_reports_missing_columns_with_the_hook_to_use(tmp_path):
    (tmp_path / "1.jsonl").write_text(json.dumps({"input": "p", "output": "c", "gts": None, "score": 1.0, "step": 1}) + "\n")
    code, told = run_referee(tmp_path / "1.jsonl", "--of", "verl")
    assert code == 0 and not told["findings"] and re.search(r"use the hook of docs/referee_verl.md", " ".join(told["lacks"]))
