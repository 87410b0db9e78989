"""A real run with a rank that is stopped during a step: the run ends, names the rank, and the same command resumes it."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.end_to_end import scripted
from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import RanksFailed, run_ranks


def train_and_stop(rank: int, world_size: int, flags: list[str], stops: bool) -> int:
    """Run `megatron-grpo train`, and stop rank 1 after the backward pass of its second optimizer step."""
    from megatron_grpo.cli import main
    from tests.scripted_engine import ScriptedEngine

    class Stops:
        def allows(self, gradient) -> bool:
            if stops and rank == 1 and gradient.step == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            return True

    def engine(cfg, inputs, parallel):
        return ScriptedEngine(scripted.read_answers(cfg, inputs.model_path))

    return main(["train", "--verify_weight_sync", "false", *flags], engine=engine, gradient_check=Stops())


def test_watchdog_names_stopped_rank_and_run_resumes(tmp_path):
    out = tmp_path / "out"
    flags = [*write_inputs(tmp_path), "--output_dir", str(out), *"--max_steps 3 --save_steps 1 --rank_heartbeat_timeout 15".split()]
    with pytest.raises(RanksFailed) as failed:
        run_ranks(train_and_stop, 2, flags, True, timeout=170)
    report = (out / "watchdog/report.txt").read_text()
    assert report.startswith("megatron-grpo: rank 1 on ") and "hangs in optimizer step 2, training" in report, failed.value
    where = r"at (test_watchdog\.py|<dynamic-code>) line \d+, allows: it is stopped \(SIGSTOP or SIGTSTP\)"  # cloudpickle 3.1.3: no file
    assert re.search(where, report), report
    assert "The newest checkpoint is that of optimizer step 1; the same command resumes from it." in report
    assert "rank 1 on" in str(failed.value) and "died" not in str(failed.value)
    assert run_ranks(train_and_stop, 2, flags, False, timeout=170) == [0, 0]
    assert [record["step"] for record in read_jsonl(out / "metrics.jsonl")] == [1, 2, 3]
