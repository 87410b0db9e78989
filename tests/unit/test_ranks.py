"""The harness of distributed tests."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import RanksFailed, run_ranks


def test_run_ranks_sets_rank_variables_and_returns_results_in_order():
    offset = 10

    def body(rank, world_size, scale):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(dist.get_rank()) and dist.get_backend() == "gloo"
        return rank * scale + offset, total, torch.get_num_threads()

    results = run_ranks(body, 3, 2)
    assert [value for value, _, _ in results] == [10, 12, 14]
    assert all(total.item() == 3.0 and threads == 1 for _, total, threads in results)


def test_run_ranks_failure_ends_other_ranks_and_shows_traceback():
    def body(rank, world_size):
        answer = 41
        if rank == 1:
            assert answer == 42
        time.sleep(60)  # until it is killed

    start = time.monotonic()
    with pytest.raises(RanksFailed, match="assert 41 == 42") as failure:
        run_ranks(body, 2)
    assert time.monotonic() - start < 10 and set(failure.value.errors) == {1}
    assert "time.sleep" in str(failure.value) or "in body" in str(failure.value)  # where the other one was


def test_run_ranks_timeout_kills_ranks_and_children(tmp_path):
    def body(rank, world_size):
        pid = os.fork()
        if pid == 0:
            time.sleep(60)  # until it is killed
        (tmp_path / str(rank)).write_text(str(pid))
        time.sleep(60)  # until it is killed

    with pytest.raises(RanksFailed, match="not finished after 1 s"):
        run_ranks(body, 2, timeout=1)
    for path in tmp_path.iterdir():
        deadline = time.monotonic() + 5
        while _is_running(int(path.read_text())) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _is_running(int(path.read_text()))


def test_run_ranks_reports_killed_rank():
    def body(rank, world_size):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RanksFailed, match="rank 0: the process was ended by SIGKILL"):
        run_ranks(body, 2)


def test_run_ranks_calls_share_no_state():
    def body(rank, world_size):
        seen = os.environ.get("LEFT_BEHIND")
        os.environ["LEFT_BEHIND"] = "1"
        return seen

    assert run_ranks(body, 1) == run_ranks(body, 1) == [None]


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@settings(max_examples=2)
@given(st.booleans())
def test_hypothesis_examples_have_no_deadline(_):
    time.sleep(0.25)  # hypothesis ends a test after 0.2 s by default
