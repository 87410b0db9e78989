"""`megatron-grpo mismatch` on a run: no finding in a clean run, and the operation of a tensor that a sync loses."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.runs import train, write_inputs
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mismatch")
    flags = [*write_inputs(folder / "in"), "--output_dir", str(folder / "out")]
    run_ranks(train, 1, [*flags, "--max_steps", "2", "--save_steps", "1", "--export_hf", "false"], timeout=300)
    return folder / "out"


def run_command(rank, world_size, words, loses=None):
    """Return (exit code, output). loses: a tensor that a sync leaves out without an error."""
    import contextlib
    import io

    from megatron_grpo.cli import main
    from megatron_grpo.core.rollout.vllm_weights import WeightLoader

    load = WeightLoader.load

    def without(self, worker, named, **more):
        return [name for name in load(self, worker, ((name, x) for name, x in named if name != loses), **more) if name != loses]

    WeightLoader.load = without
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(["mismatch", *words])
    return code, printed.getvalue()


def test_mismatch_compares_recorded_rows_with_trainer_of_their_version(run):
    [(code, printed)] = run_ranks(run_command, 1, [str(run / "checkpoints" / "iter_0000001"), "--json", "--rows", "8"], timeout=300)
    found = json.loads(printed)
    assert code == 0 and found["verdict"] == "" and found["named"] == [] and found["push"] == ""
    assert found["source"] == "recorded by the run with these weights" and (found["rows"], found["step"]) == (8, 1)
    assert 0 <= found["difference"]["mean"] <= found["difference"]["largest"] < 1e-4 and found["difference"]["beyond"] == 0
    names = [one["name"] for one in found["operations"]]
    assert (
        names[0] == "embedding"
        and "L1 q norm" in names
        and names[-4:] == ["log-prob", "log-probs when sampled", "prefix cache", "trainer in a batch"]
    )
    assert [one["step"] for one in found["drift"]] == [1, 2]
    assert (run / "mismatch" / "step_000001.png").read_bytes().startswith(b"\x89PNG")


def test_mismatch_names_operation_of_tensor_missing_in_sync(run):
    lost = "model.layers.1.self_attn.q_norm.weight"
    [(code, printed)] = run_ranks(run_command, 1, [str(run), "--row", "2"], lost, timeout=300)
    assert code == 1
    assert "step 2, float32, one rank" in printed and "sampled again from prompts of the run" in printed
    assert "Row 2 (" in printed and "layer 1, q norm: " in printed and "<- over" in printed
    assert "The rollout engine does not sample from" not in printed  # two steps of 1e-3: too small for the check of a push
