"""Time limits after which a run stops, and requests to Slurm."""

from __future__ import annotations

import os
import time

import pytest

from megatron_grpo.run.config.parse import resolve
from megatron_grpo.run.jobs import list_time_limits, problems_with_limits, requeue
from megatron_grpo.run.peers import read_process_age


def make_config(*flags: str):
    return resolve([*flags], launcher_world_size=1)


def make_slurm_environment(seconds: float, left: float) -> dict[str, str]:
    end = round(time.time() + left)
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_START_TIME": str(round(end - seconds)), "SLURM_JOB_END_TIME": str(end)}


def test_time_limit_is_counted_from_process_start():
    [limit] = list_time_limits(make_config("--stop_after_minutes", "1.5"), 1000.0, {})
    assert limit.at == 1090.0 and limit.why == "stop_after_minutes (1.5)"
    assert list_time_limits(make_config(), 1000.0, {}) == []


@pytest.mark.parametrize(
    ("flags", "seconds", "lead"),
    [((), 12 * 3600, 300), ((), 600, 60), (("--stop_before_end_seconds", "45"), 600, 45), (("--stop_before_end_seconds", "0"), 600, None)],
)
def test_time_limit_of_slurm_job_is_its_end_minus_margin(flags, seconds, lead):
    found = list_time_limits(make_config(*flags), 0.0, make_slurm_environment(seconds, left=500))
    assert [limit.at - time.monotonic() for limit in found] == pytest.approx([500 - lead] if lead else [], abs=2)
    assert all(limit.why == f"the end of Slurm's job 7, {lead} s from it (stop_before_end_seconds)" for limit in found)


def test_time_limit_without_slurm_end_time_is_absent():
    assert list_time_limits(make_config(), 0.0, {"SLURM_JOB_ID": "7"}) == []


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (
            ("--stop_before_end_seconds", "700"),
            make_slurm_environment(600, 600),
            "(700) is not less than the 600 s of Slurm job 7: .* Use 60, or request more",
        ),
        (("--requeue", "true"), {}, "requeue true requeues a Slurm job, and this is not a Slurm job"),
        (("--requeue", "true"), {"SLURM_JOB_ID": "7"}, "requeue true requires scontrol, which was not found"),
    ],
)
def test_time_limit_settings_that_cannot_work_are_rejected(monkeypatch, tmp_path, flags, env, said):
    import re

    monkeypatch.setenv("PATH", str(tmp_path))
    [problem] = problems_with_limits(make_config(*flags), env)
    assert re.search(said.replace("(700)", r"\(700\)"), problem.message) and problem.flags == (flags[0].strip("-"),)
    assert problems_with_limits(make_config(), env) == []


def test_requeue_returns_the_message_of_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "could not be requeued" in requeue({"SLURM_JOB_ID": "7"})
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\n[ $2 = 7 ] || {{ echo "Invalid job id specified" >&2; exit 1; }}\n')
    scontrol.chmod(0o755)
    assert requeue({"SLURM_JOB_ID": "7"}) == "job 7 is requeued"
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert requeue({"SLURM_JOB_ID": "8"}) == "job 8 could not be requeued: Invalid job id specified"


def test_process_age_increases_and_is_zero_for_unknown_process():
    first, second = read_process_age(os.getpid()), (time.sleep(0.2), read_process_age(os.getpid()))[1]
    assert 0 < first < second < read_process_age(1) and read_process_age(2**22 + 1) == 0.0
