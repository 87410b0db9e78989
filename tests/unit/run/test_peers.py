"""Detection of dead ranks on a machine by the other ranks."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_grpo.run.peers import Peers, Process, process_stat
from megatron_grpo.run.watchdog import Heartbeat, Watchdog

GLOO = RuntimeError("[pair.cc:525] Connection closed by peer [127.0.0.1]:1")


def find_process(child: subprocess.Popen) -> Process:
    mine = Process.mine()
    return dataclasses.replace(mine, pid=child.pid, started=process_stat(child.pid)[19])


@pytest.fixture
def job():
    """(what rank 0 sees of the job, rank 1's process)."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    yield Peers(dist.PrefixStore("x", store), rank=0, processes=[Process.mine(), find_process(child)]), child
    child.kill()
    child.wait()


def test_peers_report_nothing_while_all_ranks_live(job):
    peers, _ = job
    assert peers.why_doomed() is None


@pytest.mark.parametrize(("number", "says"), [(signal.SIGKILL, "9, SIGKILL"), (signal.SIGRTMIN + 13, "47")])
def test_peers_report_killed_rank_with_signal(job, number, says):
    peers, child = job
    child.send_signal(number)
    while peers.why_doomed() is None:
        time.sleep(0.01)
    assert f"rank 1 died (signal {says}) without an error message (process {child.pid} " in peers.why_doomed()
    child.wait()
    assert f"rank 1 died without an error message (process {child.pid} " in peers.explain(GLOO)


def test_peers_ignore_rank_that_finished(job):
    peers, child = job
    others = Peers(peers._store, rank=1, processes=peers.processes)
    others.report_done()
    child.kill()
    child.wait()
    assert peers.why_doomed() is None


def test_peers_do_not_explain_rank_that_reported_its_failure(job):
    peers, _ = job
    Peers(peers._store, rank=1, processes=peers.processes).report_failure()
    assert peers.why_doomed() == ""
    assert "another rank failed and reports the reason" in peers.explain(GLOO)


def test_peers_give_no_reason_for_rank_that_reported_failure_and_exited(job):
    """The others hear of it as their launcher ends them."""
    peers, child = job
    Peers(peers._store, rank=1, processes=peers.processes).report_failure()
    child.kill()
    child.wait()
    assert peers.why_doomed() == ""


@pytest.mark.parametrize("error", [ValueError("Connection closed by peer"), RuntimeError("shapes differ")])
def test_peers_do_not_explain_errors_of_this_rank(job, error):
    assert job[0].explain(error) is None


def test_peers_name_stopped_rank_after_collective_timeout(job, tmp_path):
    """The other end lives and says nothing; its pulse stands still."""
    peers, _ = job
    store = dist.PrefixStore("watchdog", peers._store)
    for rank in (1, 2):
        store.set(f"pulse/{rank}", json.dumps(asdict(Heartbeat(beat=3))))
    watchdog = Watchdog(store, rank=0, processes=[*peers.processes, peers.processes[1]], timeout=60.0, output_dir=tmp_path,
                        wait_for_all=lambda: None, leaves=lambda rank: None)  # fmt: skip
    ended = threading.Event()

    def beat():
        while not ended.wait(0.05):
            store.set("pulse/2", json.dumps(asdict(Heartbeat(beat=time.monotonic_ns()))))

    watchdog.period = 0.3  # with a timeout as short as that it would end this process
    threading.Thread(target=beat, daemon=True).start()
    try:
        told = peers.explain(
            RuntimeError("[unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to complete"), watchdog.who_is_silent
        )
    finally:
        ended.set()
        watchdog.close()
    assert told.startswith(f"rank 1 (process {peers.processes[1].pid} on ") and "rank 2" not in told and "rank 0" not in told


def test_peers_explain_death_by_full_shared_memory(job, tmp_path, monkeypatch):
    peers, child = job
    (tmp_path / "shm").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path / "shm")], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        monkeypatch.setattr("megatron_grpo.run.peers.SHARED_MEMORY", str(tmp_path / "shm"))
        child.kill()
        child.wait()
        assert "shm has 0 MiB; give it more (docker run --shm-size 16g)" in peers.why_doomed()
    finally:
        subprocess.run(["umount", str(tmp_path / "shm")], check=True)
