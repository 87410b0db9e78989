"""Processes that a server starts end with it, and so do their children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PARENT = """
import multiprocessing, sys, time
from megatron_grpo.plugins.servers.serve_lifecycle import bind_children_to_parent
from tests.unit.servers.test_children import child
if __name__ == "__main__":
    bind_children_to_parent()
    multiprocessing.get_context("spawn").Process(target=child, args=(2,)).start()
    time.sleep(600)
"""


def child(generations: int) -> None:
    if generations > 1:
        import multiprocessing

        multiprocessing.get_context("spawn").Process(target=child, args=(generations - 1,)).start()
    print(os.getpid(), flush=True)
    time.sleep(600)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_server_child_processes_end_with_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                              env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}, start_new_session=True)  # fmt: skip
    try:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        until = time.monotonic() + 30
        while any(_is_alive(pid) for pid in pids):
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        with_session = subprocess.run(["ps", "-eo", "sid=,pid="], capture_output=True, text=True, check=True).stdout.split("\n")
        for sid, pid in (line.split() for line in with_session if line.strip()):
            if sid == str(parent.pid):
                os.kill(int(pid), signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
