"""`train --check_replicas` on two ranks: differing replicas end the run before a save; a step dump has no secrets."""

from __future__ import annotations

import contextlib
import io
import re
from unittest import mock

from safetensors.torch import load_file, save_file

from tests.end_to_end import scripted
from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import run_ranks
from tests.step_dump_cases import flip, replayed

SECRET = "hf_" + "Zq7" * 9
SIZES = ["--micro_batch_size", "4", "--max_steps", "3", "--save_steps", "1", "--log_completions_steps", "0", "--export_hf", "false"]
SIZES += ["--logprob_diff_warn", "100"]  # the scripted sampler is not the policy


def train(rank: int, world_size: int, flags: list[str]):
    """Flip a bit of one weight of rank 1 before the second step. Return the exit code and the output."""
    from megatron_grpo.commands.analysis.replica_check import list_tensors
    from megatron_grpo.core.policy.policy import Policy

    take = Policy.train_step

    def train_step(self, batch, beside=None):
        if batch.step == 1 and rank == 1:
            flip(list_tensors(self)["decoder.final_layernorm.weight"], 4, 0)
        return take(self, batch, beside)

    said = io.StringIO()
    with mock.patch.object(Policy, "train_step", train_step), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = scripted.train(rank, world_size, flags)
    return code, said.getvalue()


def test_replica_check_flipped_bit_ends_the_run_and_keeps_checkpoints(tmp_path):
    flags = [*write_inputs(tmp_path, rows=12), *SIZES, "--output_dir", str(tmp_path / "out")]
    found = run_ranks(train, 2, [*flags, "--check_replicas", "--check_replicas_interval", "1"], timeout=240, env={"HF_TOKEN": SECRET})
    assert [code for code, _ in found] == [1, 1], found
    said = "".join(text for _, text in found)
    assert (
        "replica check before optimizer step 2 (all replicas were equal at step 1): values of decoder.final_layernorm.weight differ "
        "between the data and" in said
    )
    assert "Traceback" not in said
    out = tmp_path / "out"
    assert [path.name for path in out.glob("checkpoints/iter_*")] == ["iter_0000001"] and len(read_jsonl(out / "metrics.jsonl")) == 1
    [step_dump] = out.glob("debug_dump/*")
    assert step_dump.name == "step_000002_replica_mismatch"
    files = [path for path in step_dump.rglob("*") if path.is_file()]
    assert len(files) > 6 and not [path for path in files if SECRET.encode() in path.read_bytes()]
    [(code, told)] = run_ranks(replayed, 1, step_dump, timeout=120)
    assert code == 0 and "1 of 64 values, the first at [4]" in told and "bit 0 of 32" in told
    assert "with rank 1's copy of decoder.final_layernorm.weight: loss " in told
    [weights] = (step_dump / "weights").glob("*.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    [(code, told)] = run_ranks(replayed, 1, step_dump, "--resume", str(out / "checkpoints/iter_0000001"), timeout=120)
    assert code == 0 and re.search(r"weights: (\d+) of \1 tensors are those of the run", told), "not those of the step dump, but as typed"


def test_replica_check_with_warn_continues_the_run(tmp_path):
    flags = [*write_inputs(tmp_path, rows=12), *SIZES, "--max_steps", "2", "--save_steps", "0", "--output_dir", str(tmp_path / "out")]
    found = run_ranks(
        train,
        2,
        [*flags, "--check_replicas", "--check_replicas_interval", "1", "--check_replicas_action", "warn", "--debug_dump_steps", "0"],
        timeout=240,
    )
    assert [code for code, _ in found] == [0, 0], found
    assert "WARNING: replica check before optimizer step 2" in found[0][1] and len(read_jsonl(tmp_path / "out/metrics.jsonl")) == 2
    assert not (tmp_path / "out/debug_dump").exists()
