"""`megatron-grpo train --use_precision_aware_optimizer`, killed in a save: it resumes bit for bit, and with other dtypes."""

from __future__ import annotations

import pytest

from megatron_grpo.run.config import parse
from megatron_grpo.run.config.rules.settings import validate
from megatron_grpo.run.open_checkpoint import settings_of_checkpoint
from tests.end_to_end import scripted
from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.end_to_end.test_async_save import SAVES, TINY, UNEVEN, fingerprints, kill_in_phase
from tests.ranks import RanksFailed, run_ranks
from tests.step_dump_cases import replayed

STEPS = 4
FEW = "--use_precision_aware_optimizer true --main_grads_dtype bf16 --main_params_dtype fp16 --exp_avg_dtype fp8 --exp_avg_sq_dtype fp16"
OTHERS = "--main_grads_dtype fp32 --main_params_dtype fp32 --exp_avg_dtype bf16 --tensor_model_parallel_size 2"


def test_precision_aware_killed_run_resumes_exactly_and_with_other_dtypes(tmp_path):
    common = (
        "--torch_dtype bfloat16 --lr 1e-3 --check_replicas true --check_replicas_interval 1 --async_save true --logprob_diff_warn 0.001"
    )
    flags = [*write_inputs(tmp_path, rows=10, **TINY), *UNEVEN.split(), *SAVES.split(), *common.split(), *FEW.split()]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_ranks(scripted.train, 2, [*flags, "--output_dir", str(whole), "--max_steps", str(STEPS)], timeout=300) == [0, 0]
    flags += ["--output_dir", str(killed), "--max_steps"]
    with pytest.raises(RanksFailed, match="rank 1: the process was ended by SIGKILL"):
        run_ranks(kill_in_phase, 2, [*flags, str(STEPS)], 1, "telling", 3, timeout=300)
    assert not (killed / "checkpoints" / f"iter_{STEPS:07d}").exists()
    assert run_ranks(scripted.train, 2, [*flags, str(STEPS)], timeout=300) == [0, 0]
    names = ("step", "loss", "reward", "grad_norm", "num_tokens", "kl")
    expected, found = ([{name: row.get(name) for name in names} for row in read_jsonl(out / "metrics.jsonl")] for out in (whole, killed))
    assert found == expected and len(found) == STEPS and found[-1]["grad_norm"] > 0
    assert fingerprints(killed, STEPS) == fingerprints(whole, STEPS) and "__1_0.distcp" in fingerprints(whole, STEPS)
    assert run_ranks(scripted.train, 2, [*flags, str(STEPS + 1), *OTHERS.split()], timeout=300) == [0, 0]
    last = read_jsonl(killed / "metrics.jsonl")[-1]
    assert last["step"] == STEPS + 1 and last["skipped_iterations"] == 0 and last["grad_norm"] > 0

    # What looks back takes no step, so such an optimizer forbids nothing of it: neither the ordinary one nor float32.
    [step_dump] = (whole / "debug_dump").iterdir()
    [(code, told)] = run_ranks(replayed, 1, step_dump, "--json", "true", "--use_distributed_optimizer", "false")
    assert code == 0 and told["numbers"]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=0.02), told
    assert told["weights"]["same"] == told["weights"]["tensors"] and all(
        "the run's forward pass is reproduced" in one for one in told["verdict"]
    )
    opened = settings_of_checkpoint(parse(["--torch_dtype", "float32"]).config, whole / "checkpoints" / f"iter_{STEPS:07d}")
    assert validate(opened, ()) == [] and opened.model.torch_dtype == "float32"
