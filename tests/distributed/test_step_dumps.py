"""A faulty step on two ranks is dumped, and one rank that replays it names the cause."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests import parity_cases as cases
from tests import step_dump_cases as kept
from tests.combinations import with_teacher
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

NORM = "decoder.layers.1.input_layernorm.weight"
TP, SP = cases.TP, cases.SP


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", layers=2, vocab=125, std=0.1)


@pytest.fixture(scope="module")
def batches(dense):
    return cases.stored_rollout(dense, vocab=125, num_steps=2, stale=0)


def run(path, batches, folder, settings, *, poison=None, spoil=None, check=0, flags=()):
    """Take two steps on two ranks, the second with a fault; return the ranks' messages, and the replay's if there is a dump."""
    cfg = cases.settings(**dict(logprob_diff_warn=100.0) | settings)  # what is stored is not what a sampler would say

    def body(rank, world):
        from megatron_grpo.core.base.errors import RunError

        policy, said = cases.build(path, cfg, world), []
        step_callback = kept.make_step_recorder(policy, cfg, path, folder, check=check, said=said)
        kept.take(policy, step_callback, kept.make_samples(batches[0]), 0)
        if spoil is not None and rank == 1:
            spoil(policy)
        try:
            trained = kept.take(policy, step_callback, kept.make_samples(batches[1], poison), 1)
        except RunError as error:
            return said, str(error), None
        return said, trained.skipped, {name: float(trained.metrics[name]) for name in ("loss", "grad_norm")}

    ranks = run_ranks(body, 2, timeout=120)
    found = sorted(folder.glob("step_*"))
    replays = [run_ranks(kept.replayed, 1, one, "--json", "true", *flags, timeout=120)[0] for one in found]
    return ranks, found, replays


@pytest.mark.parametrize("settings", [{}, {TP: 2}], ids=["DP2", "TP2"])
def test_replay_on_one_rank_names_nan_advantage(dense, batches, tmp_path, settings):
    ranks, found, replays = run(dense, batches, tmp_path, settings, poison={5: dict(advantage=math.nan)})
    [path], [(code, told)] = found, replays
    assert path.name == "step_000002_not_finite" and code == 0
    assert ranks[0][1] == "its gradient is not finite" and any("megatron-grpo replay" in line for line in ranks[0][0])
    assert told["weights"]["same"] == told["weights"]["tensors"] == told["weights"]["recorded"] > 20
    [meta] = told["verdict"]
    assert meta.startswith("FAULT: row 5 of rollout 1 (prompt 2): its advantages are not finite")
    assert [row["key"] for row in told["rows"] if row["what"]] == [[1, 5]] and len(told["rows"]) == cases.NUM_ROWS
    assert not [one for one in tmp_path.iterdir() if "partial" in one.name]


def change_config(**values):
    def change(path):
        facts = json.loads((path / "step_dump.json").read_text()) | values
        (path / "step_dump.json").write_text(json.dumps({name: value for name, value in facts.items() if value != "gone"}))

    return change


def change_setting(name, value):
    def change(path):
        facts = json.loads((path / "step_dump.json").read_text())
        change_config(settings=facts["settings"] | {name: value})(path)

    return change


def truncate_file(name):
    def change(path):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[: len(whole) // 2])

    return change


# What is done to a step dump -> flags, and what is said. Nothing of it loads a model.
SPOILED = {
    "not an object": (lambda path: (path / "step_dump.json").write_text("[]"), [], "has format None; this version reads format 1"),
    "no settings": (change_config(settings="gone"), [], "not a complete step dump: step_dump.json cannot be read (KeyError: 'settings')"),
    "a loss that is none": (change_setting("loss_type", "grqo"), [], "loss_type in the settings of the step dump cannot be 'grqo'"),
    "a number in words": (change_setting("beta", "much"), [], "beta in the settings of the step dump must be a number"),
    "a list for a number": (
        change_setting("num_generations", [1, 2]),
        [],
        "num_generations in the settings of the step dump takes one value",
    ),
    "no rows of the timetable": (change_config(micro_steps=[]), [], "its step has no rows"),
    "other micro-steps": (change_config(micro_steps=[{"rows": [0, 1]}]), [], "step_dump.json cannot be read"),
    "a cut file of rows": (truncate_file("rows/rank_00000.npz"), [], "rows/rank_00000.npz cannot be read"),
    "a cut forward": (truncate_file("forward/rank_00000.npz"), [], "forward/rank_00000.npz cannot be read"),
    "cut generators": (truncate_file("rng.npz"), [], "rng.npz cannot be read"),
    "no rows": (lambda path: shutil.rmtree(path / "rows"), [], "8 of its 8 rows are missing"),
    "no weights": (lambda path: shutil.rmtree(path / "weights"), [], "/weights) does not exist"),
    "an adapter that is gone": (change_config(weights={"folder": "adapter"}), [], "the adapter before the step, does not exist"),
    "a checkpoint that was removed": (change_config(weights={"folder": None, "checkpoint": "/gone"}), [], "/gone, does not exist"),
    "a checkpoint that is none": (change_config(weights={"folder": None, "checkpoint": "/"}), [], "resume: /manifest.json is missing"),
    "another checkpoint": (lambda path: None, ["--resume", "/gone"], "resume: /gone/manifest.json is missing"),
    "a flag that is none": (lambda path: None, ["--tensor_paralel", "2"], "tensor_paralel is not a setting"),
}


@pytest.fixture(scope="module")
def step_dump(dense, batches, tmp_path_factory):
    """Dump of a step on one rank."""
    folder, cfg = tmp_path_factory.mktemp("debug_dump"), cases.settings(logprob_diff_warn=100.0)

    def body(rank, world):
        policy = cases.build(dense, cfg, world)
        kept.take(
            policy, kept.make_step_recorder(policy, cfg, dense, folder), kept.make_samples(batches[0], {5: dict(advantage=math.nan)}), 0
        )

    run_ranks(body, 1, timeout=120)
    [path] = folder.glob("step_*")
    return path


@pytest.mark.parametrize("name", SPOILED)
def test_replay_of_incomplete_step_dump_is_an_error(step_dump, tmp_path, name):
    change, flags, said = SPOILED[name]
    path = shutil.copytree(step_dump, tmp_path / "step_000001_not_finite")
    change(path)
    [(code, text)] = run_ranks(kept.replayed, 1, path, *flags, timeout=60)
    assert code == 2 and said in " ".join(text.split()) and "Traceback" not in text, text


def test_step_dump_full_disk_blocks_no_rank(dense, batches, tmp_path):
    cfg = cases.settings(logprob_diff_warn=100.0)
    write_text = Path.write_text

    def full(path, *args, **kwargs):
        if path.name == "step_dump.json":
            raise OSError(28, "No space left on device")
        return write_text(path, *args, **kwargs)

    def body(rank, world):
        policy, said = cases.build(dense, cfg, world), []
        step_callback = kept.make_step_recorder(policy, cfg, dense, tmp_path, said=said)
        with mock.patch.object(Path, "write_text", full):
            trained = kept.take(policy, step_callback, kept.make_samples(batches[0], {5: dict(advantage=math.nan)}), 0)
        return trained.skipped, said

    for skipped, said in run_ranks(body, 2, timeout=60):
        assert skipped == "its gradient is not finite"
        assert ["could not be written" in line and "No space left" in line for line in said] == [True]
    assert not list(tmp_path.iterdir())


def test_replay_names_infinite_weight(dense, batches, tmp_path):
    def spoil(policy):  # each rank has a shard of its own, so nobody has another copy to compare with
        policy.tensors()["decoder.layers.0.mlp.linear_fc2.weight"].data[3, 2] = math.inf

    _, [path], [(_, told)] = run(dense, batches, tmp_path, {TP: 2}, spoil=spoil)
    assert path.name == "step_000002_not_finite"
    assert list(told["weights"]["not_finite"]) == ["model.layers.0.mlp.down_proj.weight"]
    assert told["verdict"][0].startswith("FAULT: the weight model.layers.0.mlp.down_proj.weight is not finite (1 of its ")
    assert "inf" in told["verdict"][0] and told["weights"]["same"] == told["weights"]["tensors"]


@pytest.mark.parametrize("settings", [{TP: 2, SP: True}, dict(torch_dtype="bfloat16")], ids=["TP2 SP", "DP2 bfloat16"])
def test_replay_names_flipped_bit(dense, batches, tmp_path, settings):
    def spoil(policy):
        kept.flip(policy.tensors()[NORM], 7, 5)

    ranks, [path], [(_, told)] = run(dense, batches, tmp_path, settings, spoil=spoil, check=1)
    assert path.name == "step_000002_replica_mismatch"
    assert len({error for _, error, _ in ranks}) == 1
    _, error, trained = ranks[0]
    assert trained is None and error.startswith(
        "replica check before optimizer step 2 (all replicas were equal at step 1): values of " + NORM
    )
    assert "ranks 0 and 1" in error and "no checkpoint is written" in error
    assert f"weight {NORM} differs between ranks 0 and 1: 1 of " in told["verdict"][0] and "differ in bit 5 of" in told["verdict"][0]
    assert "the first at [7]" in told["verdict"][0]
    if settings.get("torch_dtype") is None:
        assert [copy["rank"] for copy in told["copies"]] == [0, 1] and all(np.isfinite(copy["loss"]) for copy in told["copies"])


def test_replay_of_dump_without_lost_rank_needs_all_rows(dense, batches, tmp_path):
    """Two data-parallel ranks hang before the gradient reduction; then the rows of one of them are removed."""
    cfg = cases.settings(logprob_diff_warn=100.0)

    def body(rank, world):
        class Hangs(Exception):
            pass

        policy = cases.build(dense, cfg, world)
        step_callback = kept.make_step_recorder(policy, cfg, dense, tmp_path)

        def hang(batch, beside=None):
            step_callback.dump_on_hang("a rank hangs (rank_heartbeat_timeout 300 s)")
            raise Hangs

        policy.train_step = hang
        with pytest.raises(Hangs):
            kept.take(policy, step_callback, kept.make_samples(batches[0]), 0)
        step_callback.dump_on_hang("between two steps nothing is left behind")

    run_ranks(body, 2, timeout=120)
    [path] = tmp_path.glob("step_*")
    assert path.name == "step_000001_time_out"
    [(code, told)] = run_ranks(kept.replayed, 1, path, "--json", "true", timeout=120)
    assert code == 0 and told["why"].startswith("a rank hangs") and len(told["rows"]) == cases.NUM_ROWS and len(told["lacks"]) == 2
    assert told["verdict"] == ["The step is reproduced, and nothing in it is wrong: the cause is outside the step."]
    (path / "rows/rank_00001.npz").unlink()
    [(code, told)] = run_ranks(kept.replayed, 1, path, timeout=120)
    assert code == 2 and "4 of its 8 rows are missing" in told


TAUGHT = dict(teacher_model_server=["http://teacher:8000"], teacher_kl_coef=0.7)


@pytest.mark.parametrize(
    "more", [{}, dict(tuner_type="lora", lora_rank=4), TAUGHT], ids=["full", "lora", "kept words and a teacher's log-probs"]
)
def test_replay_of_clean_step_repeats_figures_in_other_layouts(dense, batches, tmp_path, more):
    """Its dump is caused by a made-up gap to the sampler; loss, norm and log-probs are equal in other layouts."""
    if more is TAUGHT:
        batches = [[with_teacher(row) for row in cases.with_kept(dense, rows, vocab=125)] for rows in batches]
    settings = dict(logprob_diff_warn=0.01, beta=0.05, **{TP: 2}, **more)
    ranks, found, replays = run(dense, batches, tmp_path, settings)
    [path], [(_, told)] = found, replays
    assert path.name == "step_000001_logp_gap"  # the second step's is not twice as large
    assert told["lacks"] == [] and told["weights"]["same"] == told["weights"]["tensors"] == told["weights"]["recorded"] > 0
    here = told["numbers"]
    [two, _] = run_ranks(kept.replayed, 2, path, "--json", "true", timeout=120)
    for numbers in (here, two[1]["numbers"]):
        assert numbers["loss"] == pytest.approx(told["was"]["loss"], rel=1e-4, abs=1e-7)
        assert numbers["grad_norm"] == pytest.approx(told["was"]["grad_norm"], rel=1e-4)
    assert max(row["forward"] for row in told["rows"]) < 1e-4
    assert any("check the sampler" in line for line in told["verdict"])
    norms = [row["norm"] for row in told["rows"]]
    assert np.isfinite(norms).all() and min(norms) >= 0
